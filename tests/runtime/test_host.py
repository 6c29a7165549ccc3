"""Stage hosts as processes, with the real GPT-2: every cut is the same training, and nothing outlives its parent."""

from __future__ import annotations

import itertools
import math
import os
import re
import resource
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed import forks
from testbed.errors import StageError
from testbed.faults import NodeFault
from testbed.metrics.ideal import unshaped_step_s
from testbed.metrics.steps import align
from testbed.profiles import load_profile
from testbed.records import StepRecord
from testbed.runtime.control_plane import EvaluationDone, Host, JobDone, JobFailed, Start, StepDone
from testbed.runtime.gather import make_sockets
from testbed.runtime.place_job import PlaceJob
from testbed.spec import Cell, Paced
from testbed.training.kinds import set_up_torch
from tests.forked import in_child, is_gone
from tests.over_loopback import jobs_over_loopback, read_steps
from tests.specs import text_spec
from tests.synthetic import cell

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 240.0
"""Only what hangs takes as long, on any machine."""
VOCABULARY = 96
STEPS = 4
S = 10**9


def a_cell(stages: int, schedule: str = "1f1b", in_flight: int = 3, **training: Any) -> Cell:
    shape: dict[str, Any] = {"stages": stages, "microbatches": 2, "schedule": schedule, "in_flight": in_flight}
    stated = {"steps": STEPS, "warmup_steps": 1, "seed": 3, "evaluate_every": 2, **training}
    made = cell(links=load_profile("datacenter"), training=stated, **shape)
    workload = text_spec(text="none", sequence_length=16, validation_batches=2)
    return made.model_copy(update={"workload": workload})


pytestmark = pytest.mark.slow  # hosts with torch, some of which are killed


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "tokens.npy"
    np.save(path, np.random.default_rng(0).integers(VOCABULARY, size=20_000).astype(np.uint16))
    return path


def a_host(stage: int) -> Host:
    return Host(forks.popen, f"stage {stage}")


@pytest.fixture(scope="module")
def shared() -> Iterator[list[Host]]:
    """Three hosts for all tests: each does one job after another, and dies in one of the last tests."""
    with ExitStack() as stack:
        hosts = [stack.enter_context(a_host(stage)) for stage in range(3)]
        for host in hosts:
            host.wait_ready(SOON_S)
        yield hosts


@pytest.fixture
def last(shared: list[Host]) -> Host:
    """One of the hosts, to be killed: no test after this one may ask for three."""
    return shared.pop(0)


def jobs_of(cell: Cell, folder: Path, tokens: Path) -> tuple[PlaceJob, ...]:
    return jobs_over_loopback(
        cell, folder, VOCABULARY, token=os.urandom(16).hex(), tokens=str(tokens), devices=(("lo",),) * cell.nodes
    )


def start(hosts: list[Host], all_jobs: tuple[PlaceJob, ...]) -> None:
    for host, job, sockets in zip(hosts, all_jobs, make_sockets(len(all_jobs)), strict=False):
        host.start(job, sockets)


def finish(hosts: list[Host]) -> list[list[Any]]:
    """Every host's messages, up to and with its last word."""
    heard: list[list[Any]] = [[] for _ in hosts]
    deadline = time.monotonic() + SOON_S
    while open_ := [
        h for h, said in zip(hosts, heard, strict=True) if not said or not isinstance(said[-1], JobDone | JobFailed)
    ]:
        ready = select.select(open_, [], [], max(0.0, deadline - time.monotonic()))[0]
        assert ready, f"silence from {[host.name for host in open_]}; heard {heard}"
        for host in ready:
            heard[hosts.index(host)].extend(host.messages())
    return heard


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_step(host: Host) -> None:
    """Until the last stage has said that a step is done."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        select.select([host], [], [], 1)
        for message in host.messages():
            if isinstance(message, StepDone):
                return
            assert isinstance(message, EvaluationDone), message
    raise AssertionError("no step was done")


# ------------------------------------------------------------------ training
def train_unsplit(tokens: Path) -> list[tuple[float, float]]:
    """Train transformers' own GPT2LMHeadModel in a plain loop; (loss, gradient norm) of each step."""
    import torch
    from transformers import GPT2LMHeadModel

    from testbed.workloads.data import Data
    from testbed.workloads.gpt2 import Gpt2Stage
    from testbed.workloads.models import SIZES

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(3)
    model = GPT2LMHeadModel(Gpt2Stage.config(SIZES["gpt2-nano"]))
    adamw = torch.optim.AdamW(model.parameters(), lr=0.001, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    data = Data(np.load(tokens), a_cell(1).workload, 3)
    steps = []
    for step in range(STEPS):
        losses = []
        for m in range(2):
            batch = data.train(step, m, 2)
            logits = model(input_ids=batch.inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), batch.targets.view(-1))
            losses.append(loss.item())
            (loss / 2).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(math.fsum(torch.linalg.vector_norm(gradient).item() ** 2 for gradient in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, 1.0 / (norm + 1e-6)))
        adamw.step()
        adamw.zero_grad()
        steps.append((math.fsum(losses) / 2, norm))
    return steps


@pytest.fixture(scope="module")
def unsplit(tokens: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step without stages, computed in a process of its own."""
    return [(loss, norm) for loss, norm in in_child(partial(train_unsplit, tokens), seconds=SOON_S)]


def check_counters(records: list[list[StepRecord]]) -> None:
    """Sockets count what was sent. Over loopback nothing is lost, but what a busy machine answers late may be sent
    twice.
    """
    for stage, own in enumerate(records):
        neighbours = (stage > 0) + (stage < len(records) - 1)
        assert all(record.counters is not None and len(record.sockets) == neighbours for record in own)
        sent = [sum(socket.bytes_sent for socket in record.sockets) for record in own]
        assert sent == sorted(sent)
        frames = sum(frame.frame_bytes for record in own for frame in record.sent)
        assert sent[-1] - frames == sum(socket.bytes_retransmitted for socket in own[-1].sockets)


def test_every_cut_and_schedule_is_the_unsplit_model(
    shared: list[Host], tokens: Path, tmp_path: Path, unsplit: list[tuple[float, float]]
) -> None:
    started = shared[:3]
    evaluations = []
    for number, (stages, schedule, in_flight) in enumerate(
        [(1, "gpipe", 1), (2, "1f1b", 2), (3, "1f1b", 5), (3, "gpipe", 1)]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        start(started, jobs_of(a_cell(stages, schedule, in_flight), folder, tokens))
        heard = finish(started[:stages])
        assert [said[-1] for said in heard] == [JobDone()] * stages
        kinds = [type(message) for message in heard[-1]]
        assert kinds == [StepDone, StepDone, EvaluationDone, StepDone, StepDone, EvaluationDone, JobDone]
        records = [read_steps(folder, stage) for stage in range(stages)]
        check_counters(records)
        last = records[-1]
        assert [(r.loss, r.gradient_norm) for r in last if r.phase == "train"] == unsplit
        evaluations.append([r.loss for r in last if r.phase == "evaluation"])
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            [f"stage-{s}.log" for s in range(stages)] + [f"steps-{s}.jsonl" for s in range(stages)]
        )
    assert all(losses == evaluations[0] for losses in evaluations)


DILATION = 2
PACED_NS = {"F": 3_000_000, "B": 5_000_000}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_paced_step_is_no_shorter_than_the_schedule_s_closed_form_and_who_paces_says_how(
    shared: list[Host], tokens: Path, tmp_path: Path, schedule: str
) -> None:
    """By how much it is longer, on the real clock, says how busy this machine is; each action says it of itself."""
    compute = Paced(
        forward_ns=(PACED_NS["F"],), backward_ns=(PACED_NS["B"],), update_ns=0, source="stated", dilation=DILATION
    )
    cell = a_cell(3, schedule, steps=3, evaluate_every=0).model_copy(update={"compute": compute})
    start(shared, jobs_of(cell, tmp_path, tokens))
    assert [said[-1] for said in finish(shared)] == [JobDone()] * 3
    steps = align([read_steps(tmp_path, stage) for stage in range(3)])
    for action in (action for step in steps for record in step.records for action in record.actions):
        assert action.due_ns is not None
        assert action.due_ns <= action.decoded_ns + DILATION * PACED_NS[action.kind]  # less where overruns are made up
        assert action.computed_ns == max(action.due_ns, action.maths_ns or 0)
    ideal_s = unshaped_step_s(cell.pipeline, forward_s=PACED_NS["F"] / 1e9, backward_s=PACED_NS["B"] / 1e9)
    trained = [step for step in steps if step.phase == "train"]
    assert trained[-1].end_ns - trained[0].begin_ns >= len(trained) * DILATION * ideal_s * 1e9 - 1
    for stage, host in enumerate(shared):
        assert re.match(f"stage {stage} runs with SCHED_(RR|OTHER)", (tmp_path / f"stage-{stage}.log").read_text())
        (tmp_path / host.name).mkdir()
        start([host], jobs_of(a_cell(1), tmp_path / host.name, tokens))
        assert os.sched_getscheduler(host.process.pid) == os.SCHED_OTHER, "what is not paced runs as usual again"
        assert finish([host])[0][-1] == JobDone()


# ------------------------------------------------------------------ failures
def test_a_job_that_cannot_be_done_says_why_and_the_host_goes_on(
    shared: list[Host], tokens: Path, tmp_path: Path
) -> None:
    started = shared[:1]
    start(started, jobs_of(a_cell(1), tmp_path, tmp_path / "missing.npy"))
    (said,) = finish(started)
    assert said[-1].error == "FileNotFoundError"
    assert "missing.npy" in said[-1].message
    assert "np.load" in said[-1].traceback
    assert "Traceback" in (tmp_path / "stage-0.log").read_text()
    start(started, jobs_of(a_cell(1), tmp_path, tokens))
    assert finish(started)[0][-1] == JobDone()


def test_a_killed_stage_is_reported_and_its_neighbours_stop_at_once(
    shared: list[Host], tokens: Path, tmp_path: Path
) -> None:
    started = shared[:3]
    start(started, jobs_of(a_cell(3, steps=100_000, evaluate_every=0), tmp_path, tokens))
    wait_for_step(started[2])
    (victim,) = children(started[1].process.pid)
    os.kill(victim, signal.SIGKILL)
    heard = finish(started)
    assert heard[1][-1].error == "StageError"
    assert re.fullmatch(r"the process of stage 1 was killed by SIGKILL after \d+ recorded steps", heard[1][-1].message)
    assert [heard[stage][-1].error for stage in (0, 2)] == ["TransportError"] * 2
    (tmp_path / "again").mkdir()
    start(started, jobs_of(a_cell(3), tmp_path / "again", tokens))
    assert [said[-1] for said in finish(started)] == [JobDone()] * 3


def test_stated_faults_stop_and_kill_a_stage_and_who_reports_it_says_so(
    shared: list[Host], tokens: Path, tmp_path: Path
) -> None:
    stop, kill = NodeFault(node=1, at_ns=S, for_ns=3 * S), NodeFault(node=1, at_ns=6 * S, for_ns=1, kill=True)
    of_all = jobs_of(a_cell(2, steps=100_000, evaluate_every=0), tmp_path, tokens)
    faults = {"faults": (stop, kill), "played_at_ns": time.monotonic_ns()}
    start(shared[:2], (of_all[0], of_all[1].model_copy(update=faults)))
    state, deadline = "", time.monotonic() + SOON_S
    while state != "T" and time.monotonic() < deadline:
        for child in children(shared[1].process.pid):
            state = Path(f"/proc/{child}/stat").read_text().split()[2]
        time.sleep(0.01)
    assert state == "T"
    first, second = (said[-1] for said in finish(shared[:2]))
    assert re.match(
        "the process of stage 1 was killed by SIGKILL after \\d+ recorded steps, as stated: node 1: killed at 6 s",
        second.message,
    )
    assert (first.error, second.error, second.traceback) == ("TransportError", "StageError", "")


def test_finish_ends_every_stage_after_the_same_step(shared: list[Host], tokens: Path, tmp_path: Path) -> None:
    started = shared[:3]
    started[0].finish()  # no job runs: nothing happens
    start(started, jobs_of(a_cell(3, steps=100_000, evaluate_every=0), tmp_path, tokens))
    wait_for_step(started[2])
    started[1].finish()
    heard = finish(started)
    assert [said[-1] for said in heard] == [JobDone(ended="asked")] * 3
    written = [[(record.phase, record.step) for record in read_steps(tmp_path, stage)] for stage in range(3)]
    assert written[0] == written[1] == written[2] == [("train", step) for step in range(len(written[0]))]
    assert 0 < len(written[0]) < 100_000


def test_ctrl_c_is_the_controller_s_business_and_privileges_are_gone(
    shared: list[Host], tokens: Path, tmp_path: Path
) -> None:
    host = shared[0]
    os.kill(host.process.pid, signal.SIGINT)
    start([host], jobs_of(a_cell(1), tmp_path, tokens))
    assert finish([host])[0][-1] == JobDone()
    status = Path(f"/proc/{host.process.pid}/status").read_text()
    fields = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("Cap", "NoNew", "Threads")))
    assert {int(value, 16) for name, value in fields.items() if name in ("CapPrm", "CapEff", "CapBnd", "CapInh")} == {0}
    assert fields["NoNewPrivs"] == "1"
    assert fields["Threads"] == "1", "a host that forks must have one thread"


def test_a_host_that_cannot_load_says_why() -> None:
    def broken(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([command[0], "-c", "raise SystemExit('no torch on this machine')"], env=env, **options)

    with (
        Host(broken, "stage 3") as host,
        pytest.raises(StageError, match=r"stage 3: .*status 1; its output: no torch on this machine"),
    ):
        host.wait_ready(SOON_S)


def test_one_thread_is_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with pytest.raises(StageError, match=r"OMP_NUM_THREADS=1"):
        in_child(set_up_torch, seconds=SOON_S)


def test_a_job_is_told_no_profile() -> None:
    assert not {"profile", "profiles", "network", "topology"} & set(PlaceJob.model_fields)
    assert set(Start.model_fields) == {"kind", "job"}


# ------------------------------------------------------------------ the hosts' ends
def test_a_stage_without_memory_says_what_to_try(last: Host, tmp_path: Path) -> None:
    status = Path(f"/proc/{last.process.pid}/status").read_text()
    has = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmSize"))
    resource.prlimit(last.process.pid, resource.RLIMIT_AS, (has + (300 << 20), has + (300 << 20)))
    workload = a_cell(1).workload.model_copy(update={"sequence_length": 128, "batch_size": 64})
    np.save(tmp_path / "long.npy", np.zeros(400_000, np.uint16))
    start([last], jobs_of(a_cell(1).model_copy(update={"workload": workload}), tmp_path, tmp_path / "long.npy"))
    failed = finish([last])[0][-1]
    assert failed.error == "StageError"
    assert failed.message.startswith("stage 0: out of memory at train step 0 (")
    for advice in ("smaller micro-batches", "pipeline.recompute = true", "fewer stages on this machine"):
        assert advice in failed.message
    assert children(last.process.pid) == []


@pytest.mark.parametrize("killed", [True, False])
def test_a_host_that_is_killed_or_closed_takes_its_job_along(
    last: Host, killed: bool, tokens: Path, tmp_path: Path
) -> None:
    start([last], jobs_of(a_cell(1, steps=100_000, evaluate_every=0), tmp_path, tokens))
    wait_for_step(last)
    (child,) = children(last.process.pid)
    if killed:
        last.process.kill()
    else:
        last.close()
        assert last.process.returncode == 0
    assert is_gone(child)
    if killed:
        with pytest.raises(StageError, match=f"{last.name}: the stage host is gone; it ended with status -9"):
            list(itertools.chain.from_iterable(last.messages() for _ in itertools.count()))
    last.close()
