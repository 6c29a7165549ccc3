"""A real PyTorch job becomes a trace."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.play.check import load_trace
from testbed.play.join import join
from testbed.play.trace import RECEIVE, SEND, SIGNAL, WAIT, WORK, Operation
from testbed.play.unlinked import play_unlinked
from tests.forked import Program
from tests.play.test_trace_commands import run_command

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=[2, 3])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Path]]:
    ranks: int = request.param
    folder = tmp_path_factory.mktemp("job")
    # Its sockets stay on the loopback device.
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [
        Program(
            [str(Path(__file__).with_name("recorded_job.py")), str(rank), str(ranks), str(folder)],
            env=environment,
            merged=True,
        )
        for rank in range(ranks)
    ]
    try:
        for process in started:
            said, _ = process.communicate(timeout=120)
            assert process.returncode == 0, said
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return ranks, [folder / f"job.{rank}.rank" for rank in range(ranks)]


def test_a_job_becomes_a_trace(job: tuple[int, list[Path]], tmp_path: Path) -> None:
    ranks, files = job
    run_command("trace", "join", *files, "-o", tmp_path / "job.trace")
    trace = load_trace(tmp_path / "job.trace")
    assert (len(trace.nodes), trace.steps) == (ranks, 3)
    play_unlinked(trace)
    for rank in range(ranks):
        lanes = {lane.name: lane for lane in trace.lanes if lane.node == rank}
        assert list(lanes) == ["compute", "collectives"]
        for step in range(3):
            compute = list(lanes["compute"].operations(step))
            assert [(op.peer, op.value) for op in compute if op.kind == SEND] == [((rank + 1) % ranks, 4000)]
            assert [op.peer for op in compute if op.kind == RECEIVE] == [(rank - 1) % ranks]
            assert sum(op.value for op in compute if op.kind == WORK) > 40e6  # as long as the job has slept
            sent: dict[str, list[int]] = {}
            for op in lanes["collectives"].operations(step):
                if op.kind == SEND:
                    assert op.peer == (rank + 1) % ranks
                    sent.setdefault(trace.labels[op.label], []).append(op.value)
            parts = 2 * (ranks - 1)
            # The barrier is a ring of one byte.
            assert sent.pop("all_reduce") == [-(-2000 // ranks)] * parts + [1] * parts
            assert sent.pop("all_gather") == [40] * (ranks - 1)
            assert sent.pop("broadcast", []) == ([4000] if (rank + 1) % ranks != ranks - 1 else [])
            assert not sent


def test_work_goes_on_beside_a_collective_that_nobody_waits_for(job: tuple[int, list[Path]]) -> None:
    for lane in join(job[1]).lanes:
        for step in range(3) if lane.name == "compute" else ():
            waited, beside = (_work_beside(list(lane.operations(step)), number) for number in (0, 1))
            assert waited == []  # all_reduce
            assert sum(beside) >= 10e6  # all_gather: as long as the job has slept


def _work_beside(operations: Sequence[Operation], number: int) -> list[int]:
    """Return what is worked on between the beginning of a step's collective of that number and the wait for its end."""
    first = [i for i, op in enumerate(operations) if op.kind == SIGNAL][number]
    last = next(i for i, op in enumerate(operations) if i > first and op.kind == WAIT)
    return [op.value for op in operations[first:last] if op.kind == WORK]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda files: files.pop(), r"files of the ranks \[0\], and the job had 2 ranks"),
        (lambda files: files[1].write_text("{}\n"), "was not written by a recorder: 'version'"),
        (lambda files: files[1].write_text(""), "was not written by a recorder"),
        (lambda files: files[1].write_text(files[1].read_text().replace('"version":1', '"version":9')), "version 9"),
        (lambda files: files[1].write_text("\n".join(files[1].read_text().splitlines()[:-1])), "rank 0: 3, rank 1: 2"),
        (lambda files: files[1].unlink(), "cannot read .*No such file"),
    ],
)
def test_files_that_do_not_make_a_job_are_refused(
    change: Callable[[list[Path]], object], said: str, tmp_path: Path
) -> None:
    files = []
    for rank in range(2):
        about = {"version": 1, "rank": rank, "ranks": 2}
        files.append(tmp_path / f"job.{rank}.rank")
        lines = [about, *([[0, WORK, 0, 0, 0, 5]] for _ in range(3))]
        files[-1].write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    assert join(files).steps == 3
    change(files)
    with pytest.raises(SpecError, match=said):
        join(files)


_numbers = st.one_of(st.integers(-1, 5), st.integers(), st.text(max_size=2), st.none())
_rows = st.one_of(st.lists(_numbers, min_size=5, max_size=7), _numbers)


@given(steps=st.lists(st.lists(_rows, max_size=4), max_size=3))
def test_rows_that_make_no_sense_are_refused(
    steps: list[list[object]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "made-up.rank"
    lines = [{"version": 1, "rank": 0, "ranks": 1}, *steps]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with contextlib.suppress(SpecError):
        join([path])
