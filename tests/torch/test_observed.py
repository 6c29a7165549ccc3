"""An observed job computes what it computes otherwise; what it did is noted, summed up, and becomes a trace."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.export.perfetto import write_observed
from testbed.trace import gloo
from testbed.trace.check import load_trace
from testbed.trace.format import RECEIVE, SEND, WORK
from testbed.trace.join_ranks import join
from testbed.trace.observations import read_observations, sent_bytes, timeline, totals
from testbed.trace.simulate import simulate
from tests.timelines import check_events, check_nesting, pairs
from tests.torch.jobs import run_ranks
from tests.trace.test_trace_commands import run_command


@pytest.fixture(scope="module", params=[2, 3])
def observed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """Return what the ranks of a job have said, and the folder with what was noted."""
    folder = tmp_path_factory.mktemp("observed")
    wanted = {"TESTBED_TORCH": json.dumps({"folder": str(folder / "notes"), "record": True})}
    return run_ranks("every_operation.py", request.param, folder / "job", wanted), folder / "notes"


@pytest.mark.slow
def test_an_observed_job_computes_the_same(observed: tuple[list[str], Path], tmp_path: Path) -> None:
    assert run_ranks("every_operation.py", len(observed[0]), tmp_path / "job") == observed[0]


@pytest.mark.slow
def test_everything_is_noted_once_and_ends(observed: tuple[list[str], Path]) -> None:
    for rank in read_observations(observed[1]):
        operations = list(rank.of("op"))
        numbers = [line["number"] for line in operations]
        assert sorted(numbers) == list(range(1, len(numbers) + 1))
        assert all(line["begin"] <= line["called"] <= line["end"] for line in operations)
        assert {line["what"] for line in operations} == {*gloo.OPERATIONS, "send", "receive"}
        assert len(rank.steps) == 2  # of the only optimiser
        for wait in rank.of("wait"):
            assert wait["begin"] <= wait["end"]


@pytest.mark.slow
def test_what_one_rank_sends_another_receives(observed: tuple[list[str], Path]) -> None:
    job = read_observations(observed[1])
    for rank in job:
        for other in job:
            groups = [group for group, members in rank.groups.items() if {rank.rank, other.rank} <= {*members}]
            for group in groups if rank is not other else []:
                sent, received = (
                    [
                        line["bytes"]
                        for line in one.of("op")
                        if (line["what"], line["group"]) == (what, group)
                        and one.groups[group][line["peer"]] == two.rank
                    ]
                    for one, two, what in ((rank, other, "send"), (other, rank, "receive"))
                )
                assert sent == received


@pytest.mark.slow
def test_the_trace_sends_what_gloo_sends(observed: tuple[list[str], Path], tmp_path: Path) -> None:
    run_command("trace", "join", observed[1], "-o", tmp_path / "job.trace")
    trace, job = load_trace(tmp_path / "job.trace"), read_observations(observed[1])
    assert len(trace.nodes) == len(job)
    simulate(trace)
    for rank in job:
        stated: dict[int, int] = {}
        for line in rank.of("op"):
            for peer, count in sent_bytes(rank, line).items():
                stated[peer] = stated.get(peer, 0) + count
        made: dict[int, int] = {}
        for lane in trace.lanes:
            for at in range(len(lane)) if lane.node == rank.rank else ():
                if lane.kind[at] == SEND:
                    made[lane.peer[at]] = made.get(lane.peer[at], 0) + lane.value[at]
        assert made == stated


@pytest.mark.slow
def test_commands_print_totals_and_write_a_timeline(observed: tuple[list[str], Path], tmp_path: Path) -> None:
    said = run_command("trace", "observed", observed[1], "-o", tmp_path / "job.json")
    job = read_observations(observed[1])
    assert f"{len(job)} ranks, 2 steps" in said
    for total in totals(job):
        assert total.what in said
        assert total.wire_bytes is not None
    events = json.loads((tmp_path / "job.json").read_text())["traceEvents"]
    check_events(events)
    check_nesting(events)
    slices = sum(event["ph"] == "X" for event in events)
    assert slices == sum(len(rank.steps) for rank in job)
    assert pairs(events, "b", "e") == len(timeline(job)) - slices


def test_what_a_coded_job_sends_is_counted_below_its_codecs(tmp_path: Path) -> None:
    wanted = {"TESTBED_TORCH": json.dumps({"folder": str(tmp_path / "notes"), "codec": "all_reduce: int8"})}
    run_ranks("coded_job.py", 2, tmp_path / "job", wanted)
    job = read_observations(tmp_path / "notes")
    called, sent = ({total.what: total for total in totals(job) if total.level == level} for level in (0, 1))
    assert not any(total.wire_bytes for total in called.values())
    assert set(called) == {"all_reduce", "broadcast"}
    assert set(sent) == {"all_gather", "broadcast"}
    assert 0.25 < sent["all_gather"].payload_bytes / called["all_reduce"].payload_bytes < 0.27, "int8, not fp32"
    wire = sum(
        size for rank in job for line in rank.of("op") if line["level"] for size in sent_bytes(rank, line).values()
    )
    assert sum(total.wire_bytes or 0 for total in sent.values()) == wire > 0
    with pytest.raises(SpecError, match="observe it without --codec"):
        join(job)


# ------------------------------------------------------------------ made-up notes
def test_waits_of_two_threads_overlap_and_are_not_slices_of_one(tmp_path: Path) -> None:
    waits = [
        {"kind": "wait", "number": n, "begin": begin, "end": end} for n, begin, end in ((1, 200, 700), (2, 300, 900))
    ]
    lines = [
        _op(1, "all_reduce", 100, 690),
        _op(2, "all_reduce", 120, 890),
        *waits,
        {"kind": "step", "at": 1000, "by": 0},
    ]
    write_observed(timeline(read_observations(_job(tmp_path / "job", lines, lines))), tmp_path / "job.json")
    events = json.loads((tmp_path / "job.json").read_text())["traceEvents"]
    check_events(events)
    check_nesting(events)
    assert pairs(events, "b", "e") == 8
    assert [event["name"] for event in events if event["ph"] == "X"] == ["step 0"] * 2


def _job(folder: Path, *ranks: list[dict[str, Any]]) -> Path:
    """Write the files of a job from the lines of each rank."""
    folder.mkdir(exist_ok=True)
    for number, lines in enumerate(ranks):
        about = {"kind": "about", "version": 1, "rank": number, "ranks": len(ranks), "device": "cpu"}
        group = {"kind": "group", "name": "0", "ranks": list(range(len(ranks))), "level": 0}
        text = "".join(json.dumps(line) + "\n" for line in [about, group, *lines])
        (folder / f"rank-{number}.jsonl").write_text(text)
    return folder


def _op(number: int, what: str, begin: int, end: int, **more: Any) -> dict[str, Any]:
    line = {"kind": "op", "number": number, "what": what, "call": what, "group": "0", "level": 0, "bytes": 4000}
    return line | {"item": 4, "begin": begin, "called": begin + 1, "end": end} | more


def _work_by_program(folder: Path) -> list[list[int]]:
    trace = join(read_observations(folder))
    return [
        [operation.value for operation in lane.operations(0) if operation.kind == WORK]
        for lane in trace.lanes
        if lane.name == "program"
    ]


def test_work_is_what_lies_between_less_what_was_waited_for(tmp_path: Path) -> None:
    wait = {"kind": "wait", "number": 1, "begin": 151, "end": 900}
    lines = [_op(1, "all_reduce", 100, 890), wait, _op(2, "barrier", 1000, 2000, bytes=0)]
    assert _work_by_program(_job(tmp_path, lines, lines)) == [[50, 100]] * 2


def test_a_reducer_waits_where_the_backward_pass_ends(tmp_path: Path) -> None:
    """A bucket that ended beside the backward pass was not waited for; the last one was, until it ended."""
    lines = [_op(1, "all_reduce", 100, 200), _op(2, "all_reduce", 301, 900), {"kind": "backward_end", "at": 402}]
    lines.append({"kind": "step", "number": 0, "by": 0, "at": 950})
    assert _work_by_program(_job(tmp_path, lines, lines)) == [[200, 100, 50]] * 2
    # Without that mark, the gap in which it ended is taken for a wait.
    lines.pop(2)
    assert _work_by_program(_job(tmp_path, lines, lines)) == [[101, 50]] * 2


def test_messages_of_one_channel_are_received_as_they_were_sent(tmp_path: Path) -> None:
    """Whatever other channels do, and whoever posts first."""
    left = [
        _op(k, "send", 10 * k, 500, bytes=size, peer=1, tag=tag)
        for k, size, tag in ((1, 11, 0), (2, 22, 5), (3, 33, 0))
    ]
    right = [
        _op(k, "receive", 10 * k, 500, bytes=size, peer=0, tag=tag)
        for k, size, tag in ((1, 22, 5), (2, 11, 0), (3, 33, 0))
    ]
    left += [{"kind": "wait", "number": k, "begin": 40 + k, "end": 500} for k in (1, 2, 3)]
    right += [{"kind": "wait", "number": k, "begin": 40 + k, "end": 500} for k in (1, 2, 3)]
    trace = join(read_observations(_job(tmp_path, left, right)))
    sizes = {lane.tag[at]: lane.value[at] for lane in trace.lanes for at in range(len(lane))
             if (lane.node, lane.kind[at]) == (0, SEND)}  # fmt: skip
    program = next(lane for lane in trace.lanes if (lane.node, lane.name) == (1, "program"))
    received = [sizes[program.tag[at]] for at in range(len(program)) if program.kind[at] == RECEIVE]
    assert [size for size in received if size != 48] == [48 + size for size in (22, 11, 33)]
    simulate(trace)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda files: files[1].unlink(), r"holds files of the ranks \[0\], but the job had 2 ranks"),
        (lambda files: [file.unlink() for file in files], "holds no rank-.*jsonl"),
        (lambda files: files[1].write_text("{}\n"), "was not written by an observer: KeyError: 'version'"),
        (lambda files: files[1].write_text(""), "was not written by an observer"),
        (lambda files: files[1].write_text(files[1].read_text().replace('"version": 1', '"version": 9')), "version 9"),
        (lambda files: files[1].write_text(files[1].read_text().replace('"item": 4', '"item": 0')), "invalid numbers"),
        (lambda files: files[1].write_text(files[1].read_text().replace('"all_reduce"', '"dance"')), "gloo has no"),
        (
            lambda files: files[1].write_text("".join(files[1].read_text().splitlines(True)[:-1])),
            "rank 0: 1, rank 1: 0",
        ),
        (
            lambda files: files[1].write_text(
                "".join(line for line in files[1].read_text().splitlines(True) if '"op"' not in line)
            ),
            "message 0 from rank 1 to rank 0 is received but not sent",
        ),
    ],
)  # fmt: skip
def test_files_that_do_not_make_a_job_are_refused(
    change: Callable[[list[Path]], object], said: str, tmp_path: Path
) -> None:
    lines = [_op(1, "all_reduce", 100, 890), {"kind": "step", "number": 0, "by": 0, "at": 950}]
    folder = _job(tmp_path, lines, lines)
    assert join(read_observations(folder)).steps == 1
    change(sorted(folder.glob("*")))
    with pytest.raises(SpecError, match=said):
        join(read_observations(folder))


_numbers = st.one_of(st.integers(-1, 5), st.integers(), st.text(max_size=2), st.none())
_fields = st.dictionaries(
    st.sampled_from(["number", "what", "call", "bytes", "item", "begin", "called", "end", "peer", "root", "tag"]),
    _numbers,
)


@given(changes=st.lists(_fields, max_size=3))
def test_lines_that_make_no_sense_are_refused(
    changes: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    lines = [_op(1, "all_reduce", 100, 890), _op(2, "send", 10, 20, peer=0, tag=0), _op(3, "broadcast", 10, 20, root=0)]
    made = [line | change for line, change in zip(lines, [*changes, {}, {}, {}], strict=False)]
    folder = _job(tmp_path_factory.getbasetemp() / "made-up", made)
    with contextlib.suppress(SpecError):
        join(read_observations(folder))
