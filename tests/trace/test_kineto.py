"""Profiles of torch.profiler become what an observer would have noted, and then traces."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.trace import gloo
from testbed.trace.format import SIGNAL, WAIT, WORK, Trace
from testbed.trace.join_ranks import join
from testbed.trace.observations import ObservedRank, read_observations
from testbed.trace.simulate import simulate, step_ends
from testbed.trace.totals import bytes_by_pair
from tests.trace.test_trace_commands import run_command

_LAUNCH_US = 5
Event = dict[str, Any]
_Harm = Callable[[list[Path]], Any]


def _compute(begin: float, end: float, number: int = 0) -> list[Event]:
    """A kernel that computes, and the host's launch of it; times in µs."""
    args = {"correlation": number} if number else {}
    kernel = {"ph": "X", "cat": "kernel", "name": "sgemm", "tid": 7, "ts": begin, "dur": end - begin, "args": args}
    launch = {**kernel, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": begin - _LAUNCH_US, "dur": 2}
    return [kernel, launch]


def _collective(begin: float, end: float, elements: int, name: str = "allreduce", **args: Any) -> list[Event]:
    """A kernel of NCCL as recent profiles describe it."""
    about = {"Collective name": name, "In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"}
    about |= {"Process Group Name": "0", "Process Group Ranks": "[0, 1]", "Group size": 2, **args}
    kernel = f"ncclDevKernel_{name}_RING_LL(ncclDevComm*)"
    return [{"ph": "X", "cat": "kernel", "name": kernel, "tid": 40, "ts": begin, "dur": end - begin, "args": about}]


def _step(begin: float, end: float, number: int = 1) -> Event:
    name = f"ProfilerStep#{number}"
    return {"ph": "X", "cat": "user_annotation", "name": name, "tid": 1, "ts": begin, "dur": end - begin, "args": {}}


def _write(folder: Path, *ranks: Sequence[Event], **about: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, events in enumerate(ranks):
        info = {"backend": "nccl", "rank": rank, "world_size": len(ranks), **about}
        profile = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": [{"ph": "M", "name": "x"}, *events]}
        (folder / f"worker{rank}.pt.trace.json").write_text(json.dumps(profile))
    return folder


def _ddp() -> list[Event]:
    """Two buckets: one is reduced beside the backward pass, and the optimiser waits for the other."""
    return [
        *_compute(0, 10_000),
        *_collective(4_000, 6_000, 1000),
        *_collective(10_000, 14_000, 500),
        *_compute(14_003, 15_000),
        _step(-10, 15_500),
    ]


def _waits(rank: ObservedRank) -> list[tuple[int, float, float]]:
    return [(line["number"], line["begin"] / 1000, line["end"] / 1000) for line in rank.of("wait")]


def test_a_device_waits_for_what_it_idled_for_and_for_what_its_group_began_earlier(tmp_path: Path) -> None:
    job = read_observations(_write(tmp_path / "p", _ddp(), _ddp()))
    for rank in job:
        assert [(line["what"], line["bytes"], line["item"]) for line in rank.of("op")] == [
            ("all_reduce", 4000, 4), ("all_reduce", 2000, 4),
        ]  # fmt: skip
        assert _waits(rank) == [(0, 10_000, 14_000), (1, 10_000, 14_000)]
        assert rank.steps == [15_000_000]


def test_the_trace_works_as_long_as_the_device_less_what_it_waited(tmp_path: Path) -> None:
    trace = join(read_observations(_write(tmp_path / "p", _ddp(), _ddp())))
    assert trace.steps == 1
    for lane in trace.lanes:
        if lane.name == "program":
            assert sum(value for kind, value in zip(lane.kind, lane.value, strict=True) if kind == WORK) == 11_000_000
    assert step_ends(trace, simulate(trace), 1)[-1] == 11_000_000
    sent = {pair.sender: pair.payload_bytes for pair in bytes_by_pair(trace)}
    for rank in range(2):
        assert sent[rank] == sum(
            sum(
                gloo.wire_bytes(
                    gloo.calls({"what": "all_reduce", "call": "", "bytes": size, "item": 4}, rank, 2)
                ).values()
            )
            for size in (4000, 2000)
        )


def test_a_collective_that_nobody_idled_for_is_waited_for_at_the_end_of_its_step(tmp_path: Path) -> None:
    events = [
        *_compute(0, 900, 1), *_collective(100, 200, 10), _step(-10, 500, 1),
        *_compute(1_000, 1_900, 2), *_collective(1_100, 1_200, 10), _step(500, 1_500, 2),
    ]  # fmt: skip
    job = read_observations(_write(tmp_path / "p", events, events))
    assert _waits(job[0]) == [(0, 1_000, 1_000), (1, 1_900, 1_900)]
    assert job[0].steps == [1_000_000, 1_900_000]  # the second begins with what was launched in it
    trace = join(job)
    assert trace.steps == 2
    by_step = [[op.kind for op in trace.lanes[0].operations(step)] for step in range(2)]
    assert [kinds.count(WAIT) for kinds in by_step] == [kinds.count(SIGNAL) for kinds in by_step] == [1, 1]


def _older(events: Sequence[Event]) -> list[Event]:
    """Describe the calls, not the kernels, as profiles did before PyTorch 2.4."""
    made = []
    for event in events:
        args = event["args"]
        if "Collective name" in args:
            name = {"allreduce": "all_reduce", "_allgather_base": "_all_gather_base"}[args["Collective name"]]
            shapes = {"Input Dims": [[args["In msg nelems"] // 2, 2]], "Input type": ["float"]}
            call = {**event, "cat": "user_annotation", "name": f"nccl:{name}", "ts": event["ts"] - 1, "args": shapes}
            made += [call, {**event, "args": {}}]
        else:
            made.append(event)
    return made


def test_older_profiles_say_the_same_by_the_order_of_calls(tmp_path: Path) -> None:
    events = [*_ddp(), *_collective(14_500, 14_600, 64, "_allgather_base")]
    new, old = (
        read_observations(_write(tmp_path / name, made, made)) for name, made in (("a", events), ("b", _older(events)))
    )
    assert [rank.lines for rank in old] == [rank.lines for rank in new]


def test_groups_and_splits_are_read_and_profiles_may_be_compressed(tmp_path: Path) -> None:
    uneven = {"In split size": "[1, 3]", "Out split size": "[1, 2]", "Process Group Name": "7"}
    events = [
        *_compute(0, 10),
        *_collective(1, 2, 40, "all_to_allv", **uneven),
        *_collective(3, 4, 8, "broadcast", Rank=1),
    ]
    groups = [{"pg_name": "0", "ranks": []}, {"pg_name": "7", "ranks": [1, 0]}]
    folder = _write(tmp_path / "p", events, events, pg_config=groups)
    for path in folder.iterdir():
        path.with_suffix(".json.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    first = read_observations(folder)[0]
    assert first.groups == {"0": (0, 1), "7": (1, 0)}
    spread, broadcast = first.of("op")
    assert (spread["group"], spread["what"], spread["splits"]) == ("7", "all_to_all", [[40, 120], [40, 80]])
    assert (broadcast["group"], broadcast["root"]) == ("0", 1)


def test_a_reduce_scatter_of_nccl_sends_half_of_an_all_reduce(tmp_path: Path) -> None:
    def sent(name: str) -> int:
        events = [*_compute(0, 10), *_collective(1, 2, 8_000, name)]
        trace = join(read_observations(_write(tmp_path / name, events, events, events)))
        return sum(pair.payload_bytes for pair in bytes_by_pair(trace))

    whole, half = sent("allreduce"), sent("_reduce_scatter_base")
    assert 2 * half == whole > 2 * 3 * 2 * 32_000 // 3


def _drop(files: list[Path]) -> None:
    files[1].unlink()


def _edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[list[Path]], None]:
    def edit(files: list[Path]) -> None:
        profile = json.loads(files[1].read_text())
        change(profile)
        files[1].write_text(json.dumps(profile))

    return edit


def _args(**args: Any) -> Callable[[list[Path]], None]:
    return _edit(lambda profile: [e["args"].update(args) for e in profile["traceEvents"] if "nccl" in e["name"]])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_drop, r"holds files of the ranks \[0\], but the job had 2 ranks"),
        (lambda files: files[1].write_text("{"), "was not written by torch.profiler in a job over NCCL"),
        (lambda files: files[1].rename(files[1].with_name("x.json.gz")).write_bytes(b"\x1f\x8b\x08"), "EOFError"),
        (_edit(lambda profile: profile.pop("distributedInfo")), "start torch.profiler after init_process_group"),
        (_edit(lambda profile: profile.update(traceEvents=[_step(0, 1)])), "0 kernels of NCCL, .* TESTBED"),
        (_edit(lambda profile: profile["traceEvents"].pop(3)), r"the ranks \(0, 1\) differ: \[2, 1\] collectives"),
        (_args(**{"Collective name": "coalesced"}), "lacks data to play 'coalesced'.*TESTBED_TORCH"),
        (_args(dtype="Quaternion"), "cannot compute the size of .* from shapes .* types .*Quaternion"),
        (_args(**{"In msg nelems": -1}), "invalid numbers"),
    ],
)  # fmt: skip
def test_a_profile_that_says_too_little_is_refused(
    harm: Callable[[list[Path]], Any], said: str, tmp_path: Path
) -> None:
    folder = _write(tmp_path / "p", _ddp(), _ddp())
    harm(sorted(folder.iterdir()))
    with pytest.raises(SpecError, match=said):
        read_observations(folder)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["ts", "dur", "args", "cat"]), inner),
    max_leaves=8,
)


_PLACES = ["traceEvents", "distributedInfo", "pg_config", "world_size", "args", "ts", "dur", "cat", "dtype", "name"]
_PLACES += ["In msg nelems", "Process Group Name", "Process Group Ranks", "In split size", "Collective name", "Rank"]


@given(value=_json, where=st.sampled_from([*_PLACES, "ranks"]))
def test_any_other_profile_is_refused_or_read(value: Any, where: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    split = {"In split size": "[1, 3]", "Out split size": "[1, 3]", "Rank": 1}
    events = [*_ddp(), *_collective(14_000, 14_001, 8, "all_to_all", **split)]
    folder = _write(tmp_path_factory.mktemp("any"), events, events, pg_config=[{"pg_name": "0", "ranks": []}])
    path = folder / "worker1.pt.trace.json"
    profile = json.loads(path.read_text())
    info, inner = profile["distributedInfo"], [event.get("args", {}) for event in profile["traceEvents"]]
    for event in [profile, info, *info["pg_config"], *profile["traceEvents"], *inner]:
        if where in event:
            event[where] = value
    path.write_text(json.dumps(profile))
    with contextlib.suppress(SpecError):
        join(read_observations(folder))


@st.composite
def _profiles(draw: st.DrawFn) -> list[list[Event]]:
    """Ranks that do the same collectives, and compute for any time between, beside and after them."""
    sizes = draw(st.lists(st.integers(1, 5000), min_size=1, max_size=5))
    ranks = []
    for _ in range(draw(st.integers(2, 4))):
        events, now = [*_compute(0, 5)], 5
        for size in sizes:
            begin = now + draw(st.integers(0, 50))
            end = begin + draw(st.integers(1, 50))
            events += _collective(begin, end, size)
            if draw(st.booleans()):
                events += _compute(begin, begin + draw(st.integers(1, 80)))
            now = end
        ranks.append([*events, *_compute(now + draw(st.integers(0, 90)), now + 100), _step(-10, now + 200)])
    return ranks


@given(ranks=_profiles())
def test_any_profiles_become_a_trace_that_takes_no_longer_than_what_was_profiled(
    ranks: list[list[Event]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    trace: Trace = join(read_observations(_write(tmp_path_factory.mktemp("any"), *ranks)))
    spans = [max(e["ts"] + e["dur"] for e in events if e["cat"] == "kernel") for events in ranks]
    works = {lane.node: 0 for lane in trace.lanes}
    for lane in trace.lanes:
        works[lane.node] += sum(v for kind, v in zip(lane.kind, lane.value, strict=True) if kind == WORK)
    assert all(works[rank] <= 1000 * span for rank, span in enumerate(spans))
    assert max(works.values()) <= step_ends(trace, simulate(trace), 1)[-1] <= sum(works.values())


def test_profiles_are_printed_joined_and_drawn(tmp_path: Path) -> None:
    folder = _write(tmp_path / "p", _ddp(), _ddp())
    said = run_command("trace", "observed", str(folder))
    assert "2 ranks, 1 steps" in said
    assert "all_reduce" in said
    run_command("trace", "join", str(folder), "-o", str(tmp_path / "job.trace"))
    assert "a step takes 11" in run_command("trace", "show", str(tmp_path / "job.trace"))
