"""A recording over loopback: the same frames in the same order, the same losses, the same time; slower where the link
is.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from test_host import finish, popen, read, start

from testbed import results
from testbed.metrics.steps import align, measured
from testbed.pipeline.control import EvaluationDone, Host, JobDone, JobFailed, StepDone
from testbed.pipeline.job import Endpoint, Limits, StageJob, jobs
from testbed.pipeline.replay import recorded_work
from testbed.records import StepRecord
from testbed.spec import Cell
from tests import synthetic

MS = 1_000_000
SOON_S = 60.0
CLOSE = 0.03
"""How far a replay's step time may be from that of a full run."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        found = [stack.enter_context(Host(popen, f"stage {stage}", light=True)) for stage in range(3)]
        for host in found:
            host.wait_ready(SOON_S)
        yield found


def record(folder: Path, *, training: dict[str, Any] | None = None, **shape: Any) -> results.Run:
    """A run that never happened, over links without an effect."""
    pipeline = synthetic.Pipeline(synthetic.profile(), **{"update_ns": 3 * MS, **shape})
    stated = {"steps": 6, "warmup_steps": 1, "evaluate_every": 3, **(training or {})}
    cell = pipeline.cell.model_copy(
        update={
            "workload": pipeline.cell.workload.model_copy(update={"model": "gpt2-mini"}),
            "training": pipeline.cell.training.model_copy(update=stated),
        }
    )
    return synthetic.write_run(folder, cell, pipeline)


def jobs_of(cell: Cell, recorded: Path, folder: Path) -> tuple[StageJob, ...]:
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stages = cell.pipeline.stages
    return jobs(
        cell,
        addresses=tuple(f"127.0.0.{stage + 1}" for stage in range(stages)),
        port=port,
        token=os.urandom(16).hex(),
        vocabulary=96,
        tokens="none",
        folder=str(folder),
        devices=(("lo",),) * stages,
        overhead_bytes=0,
        limits=Limits(connect_s=20, message_s=20),
        replay=str(recorded),
    )


def replay(hosts: list[Host], work: Sequence[StageJob]) -> list[list[StepRecord]]:
    heard = begin(hosts, work)
    assert all(isinstance(said[-1], JobDone) for said in heard), heard
    return [read(Path(job.folder), job.stage) for job in work]


def begin(hosts: list[Host], work: Sequence[StageJob]) -> list[list[Any]]:
    used = hosts[: len(work)]
    start(used, tuple(work))
    return finish(used)


def step_s(stages: Sequence[Sequence[StepRecord]]) -> float:
    return statistics.median(step.seconds for step in measured(align(stages)))


def test_a_light_host_has_no_torch(hosts: list[Host]) -> None:
    for host in hosts:
        assert "libtorch" not in Path(f"/proc/{host.process.pid}/maps").read_text()


@pytest.mark.parametrize(
    "shape",
    [
        {"stages": 1},
        {"stages": 2, "codec_ns": 2 * MS},
        {"schedule": "1f1b", "accumulation": 2},
        {"paced": True, "forward_ns": 8 * MS, "backward_ns": 16 * MS},
        {"paced": True, "forward_ns": 4 * MS, "backward_ns": 8 * MS, "stages": 2, "dilation": 2},
    ],
    ids=["one stage", "two stages", "accumulated", "paced", "dilated"],
)
def test_sizes_order_and_losses_are_those_of_the_recording(
    hosts: list[Host], tmp_path: Path, shape: dict[str, Any]
) -> None:
    run = record(tmp_path / "recorded", training={"evaluate_uncompressed": True}, **shape)
    cell = run.cell
    made = replay(hosts, jobs_of(cell, run.folder, tmp_path / "replayed"))
    for stage, found in enumerate(made):
        asked = run.steps(stage)
        assert [told(one) for one in found] == [told(one) for one in asked]
        for new, old in zip(found, asked, strict=True):
            works = recorded_work(old, cell.compute.dilation)
            for action, work in zip(new.actions, works, strict=True):
                assert (
                    action.encoded_ns >= action.computed_ns >= action.decoded_ns >= action.input_ns >= action.asked_ns
                )
                if action.began_ns is not None and action.maths_ns is not None and action.due_ns is not None:
                    assert action.maths_ns - action.began_ns >= work.maths_ns
                    assert action.computed_ns >= action.due_ns
                else:
                    assert action.computed_ns >= action.decoded_ns
    assert all(one.counters is not None and len(one.sockets) == (cell.pipeline.stages > 1) for one in made[0])


def told(step: StepRecord) -> tuple[Any, ...]:
    """What the network cannot change."""
    return (
        *(step.step, step.phase, step.warmup, step.loss, step.gradient_norm, step.learning_rate, step.tokens),
        [(one.kind, one.microbatch) for one in step.actions],
        sorted((one.direction, one.microbatch, one.raw_bytes, one.payload_bytes) for one in step.sent),
        sorted((one.direction, one.microbatch, one.payload_bytes) for one in step.received),
    )


@pytest.mark.parametrize("shape", [{"paced": True}, {}], ids=["paced", "measured"])
def test_without_links_a_replay_takes_the_time_of_its_recording(
    hosts: list[Host], tmp_path: Path, shape: dict[str, Any]
) -> None:
    run = record(tmp_path / "recorded", forward_ns=20 * MS, backward_ns=40 * MS, schedule="1f1b", **shape)
    asked = step_s([run.steps(stage) for stage in range(3)])
    for attempt in range(2):
        found = step_s(replay(hosts, jobs_of(run.cell, run.folder, tmp_path / f"replayed-{attempt}")))
        if abs(found / asked - 1) <= CLOSE:
            return
    raise AssertionError(f"a step of {asked * 1e3:.1f} ms took {found * 1e3:.1f} ms")


class SlowWire:
    """Between two stages: what it is given it hands over later. It listens for the earlier stage."""

    def __init__(self, behind: Endpoint, delay_s: float) -> None:
        self._behind, self._delay_s = behind, delay_s
        self._listener = socket.create_server(("127.0.0.9", 0))
        self.front = Endpoint(address="127.0.0.9", port=self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        near, _ = self._listener.accept()
        far = None
        while far is None:
            with contextlib.suppress(ConnectionRefusedError):
                far = socket.create_connection((self._behind.address, self._behind.port))
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
        back.start()
        self._carry(near, far)
        back.join()
        near.close()
        far.close()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        while part := source.recv(1 << 20):
            time.sleep(self._delay_s)
            target.sendall(part)
        target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> SlowWire:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self._threads[0].join(SOON_S)


def test_frames_are_waited_for(hosts: list[Host], tmp_path: Path) -> None:
    """One micro-batch: its activations and its gradient cross the slow wire, one after the other."""
    run = record(tmp_path / "recorded", stages=2, microbatches=1, paced=True, payload_bytes=1000)
    delay_s = 0.1
    near, far = jobs_of(run.cell, run.folder, tmp_path / "replayed")
    assert near.downstream is not None
    with SlowWire(near.downstream, delay_s) as wire:
        found = replay(hosts, (near.model_copy(update={"downstream": wire.front}), far))
    asked = step_s([run.steps(stage) for stage in range(2)])
    assert step_s(found) >= asked + 2 * delay_s


def test_the_last_stage_tells_of_progress(hosts: list[Host], tmp_path: Path) -> None:
    run = record(tmp_path / "recorded", stages=2)
    heard = begin(hosts, jobs_of(run.cell, run.folder, tmp_path / "replayed"))
    assert heard[0] == [JobDone(ended="steps")]
    losses = [step.loss for step in run.steps(1)]
    assert [said.loss for said in heard[1] if isinstance(said, StepDone | EvaluationDone)] == losses


def test_asked_to_finish_all_stages_end_after_the_same_step(hosts: list[Host], tmp_path: Path) -> None:
    run = record(tmp_path / "recorded", training={"steps": 500}, stages=2, paced=True, microbatches=2)
    work = jobs_of(run.cell, run.folder, tmp_path / "replayed")
    start(hosts[:2], work)
    while not any(isinstance(said, StepDone) for said in hosts[1].messages()):
        time.sleep(0.01)
    hosts[0].finish()
    heard = finish(hosts[:2])
    assert [said[-1] for said in heard] == [JobDone(ended="asked")] * 2
    done = [[(one.step, one.phase) for one in read(Path(job.folder), job.stage)] for job in work]
    assert done[0] == done[1]
    assert 0 < len(done[0]) < len(run.steps(0))


def test_a_budget_is_one_of_the_replays_own_time(hosts: list[Host], tmp_path: Path) -> None:
    run = record(tmp_path / "recorded", stages=2, paced=True, forward_ns=10 * MS, backward_ns=20 * MS)
    step = step_s([run.steps(stage) for stage in range(2)])
    budget = {"training": run.cell.training.model_copy(update={"budget_s": 2.5 * step})}
    work = jobs_of(run.cell.model_copy(update=budget), run.folder, tmp_path / "replayed")
    heard = begin(hosts, work)
    assert [said[-1] for said in heard] == [JobDone(ended="budget")] * 2
    assert [(one.step, one.phase) for one in read(Path(work[0].folder), 0)] == [
        *((number, "train") for number in range(3)),
        (3, "evaluation"),
    ]


def _cut_in_a_step(run: results.Run) -> None:
    path = run.folder / "steps-1.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-2]) + lines[-2][:-100])


def _cut_in_the_evaluation(run: results.Run) -> None:
    path = run.folder / "steps-1.jsonl"
    path.write_bytes(path.read_bytes()[:-100])


def _empty(run: results.Run) -> None:
    (run.folder / "steps-1.jsonl").unlink()


def _without_summary(run: results.Run) -> None:
    (run.folder / "summary.json").unlink()


def _failed(run: results.Run) -> None:
    summary = run.summary
    assert summary is not None
    results.write_json(
        run.folder / "summary.json", summary.model_copy(update={"status": "failed", "error": "the lab burnt down"})
    )


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_cut_in_a_step, "steps-1.jsonl holds 5 of 6 training steps"),
        (_cut_in_the_evaluation, "steps-1.jsonl holds 6 of 6 training steps, but not the evaluation after them"),
        (_empty, "steps-1.jsonl holds 0 of 6 training steps"),
        (_without_summary, "it has no summary"),
        (_failed, "it failed: the lab burnt down"),
    ],
)
def test_a_recording_that_is_not_whole(hosts: list[Host], tmp_path: Path, harm: Any, message: str) -> None:
    run = record(tmp_path / "recorded", stages=2)
    harm(run)
    limits = {"limits": Limits(connect_s=2, message_s=2)}
    work = [job.model_copy(update=limits) for job in jobs_of(run.cell, run.folder, tmp_path / "replayed")]
    heard = begin(hosts, work)
    failures = [said[-1] for said in heard]
    assert all(isinstance(failed, JobFailed) for failed in failures), failures
    causes = [failed.message for failed in failures if failed.error == "ResultsError"]
    assert causes
    for cause in causes:
        assert f"cannot replay {run.folder}: {message}; remove the folder" in cause
