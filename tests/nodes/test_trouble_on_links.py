"""A worker that crashes, is slow, or has no link, in a guest: who goes on, who stops and says whose fault it was; and
rings without trouble, which share the guest.

Each node is a process in its own namespace. All times are the virtual clock's.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from testbed import profiles
from testbed.jobs.actions import Job
from testbed.metrics.wires import wire_bytes
from testbed.net.lab import Lab, LabSpec
from testbed.nodes.arrivals import training_of
from testbed.profiles import LinkProfile
from testbed.profiles.link_profile import Change, Pipe, Schedule
from testbed.profiles.loss import Bernoulli
from testbed.records import StepRecord
from testbed.runtime.gather import make_sockets
from testbed.runtime.place_job import Endpoint, Limits, PlaceJob
from testbed.spec import Exchange, Paced, Recipe
from testbed.studies.asynchronous_rounds import Formula, ServerStep, run_rounds
from testbed.training.place import run_place
from tests.over_loopback import become_node, jobs_over_loopback
from tests.small_replicas import SPARSE, Learner, SmallTraining, a_recipe, asynchronous_nodes, live_cell, same, trained

pytestmark = [pytest.mark.netem, pytest.mark.virtual_clock]

WORKERS, SERVER, PERIOD_S, STEPS = 3, 3, 0.25, 12
RATE_BPS, DELAY_NS, LOCAL_NS = 1_000_000, 10_000_000, 20_000_000
OUTER = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
DOWN_S, UP_S = 1, 11
ROUNDS = 5
"""Local steps in a round."""


def a_link(*, down: bool = False) -> LinkProfile:
    """Of a megabit each way; `down`: it carries nothing from one second to eleven."""
    link = profiles.load_profile("link(1Mbit, 10ms, buffer=256kB)")
    if not down:
        return link

    def schedule(pipe: Pipe | None) -> Pipe:
        carried = {"rate_bps": pipe.rate_bps, "delay_ns": pipe.delay_ns, "jitter_ns": 0}
        changes = (
            Change(at_ns=DOWN_S * 10**9, loss=Bernoulli(probability=1 - 1e-9), **carried),
            Change(at_ns=UP_S * 10**9, loss=None, **carried),
        )
        return pipe.model_copy(update={"schedule": Schedule(changes=changes, repeat_ns=None)})

    return link.model_copy(update={"up": schedule(link.up), "down": schedule(link.down)})


def asynchronous(steps: int = STEPS, staleness: int = 100, **applied: Any) -> Recipe:
    arrivals = applied or {"period_s": PERIOD_S}
    more: dict[str, Any] = {"outer": OUTER, "arrivals": arrivals, "local_steps": ROUNDS, "staleness": staleness}
    return a_recipe("star", SPARSE, workers=WORKERS, steps=steps, sgd=True, shares=(2, 1, 1), **more)


def synchronous(steps: int = 6, exchange: Exchange = "star", codec: str = SPARSE, staleness: int = 0) -> Recipe:
    shares = (2, 1, 1)
    return a_recipe(exchange, codec, workers=WORKERS, steps=steps, sgd=True, shares=shares, staleness=staleness)


def paces(slower: int = 1) -> Paced:
    """How long a local step takes; the last worker's, so many times as long."""
    half = LOCAL_NS // 2
    return Paced(
        forward_ns=(half // 2, half, half * slower),
        backward_ns=(half // 2, half, half * slower),
        update_ns=0,
        source="stated",
    )


class Ran(NamedTuple):
    records: list[list[StepRecord]]
    errors: list[str]
    weights: list[list[Tensor]]
    began_ns: int

    def ends_s(self, node: int = SERVER) -> list[float]:
        """When its steps ended, in seconds from the beginning."""
        return [(record.end_ns - self.began_ns) / 1e9 for record in self.records[node] if record.phase == "train"]

    def arrivals(self) -> list[tuple[int, int, int]]:
        """(step, worker, round) in the order in which the server applied them."""
        return [
            (record.step, worker, number)
            for record in self.records[SERVER]
            for worker, number in sorted((frame.peer, frame.microbatch) for frame in record.received)
        ]


class Waiting(SmallTraining):
    """All begin at a moment, when they are connected."""

    began_ns = 0

    def job_of(self, job: PlaceJob) -> Job:
        time.sleep(max(0, self.began_ns - time.monotonic_ns()) / 1e9)
        return super().job_of(job)


class Crashing(Learner):
    def loss(self, batch: int, part: int) -> Tensor:
        if batch == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(batch, part)


def run(
    recipe: Recipe, folder: Path, *, slower: int = 1, crashes: bool = False, down: bool = False, message_s: float = 60
) -> Ran:
    """Let all nodes run to their end, however that is; it is the last worker that has the trouble."""
    folder.mkdir()
    links = (a_link(), a_link(), a_link(down=down), profiles.load_profile("link(1Gbit, 10ms)"))[: recipe.nodes]
    with ExitStack() as stack:
        lab = stack.enter_context(
            Lab(LabSpec(topology="star", profiles=links, nodes=len(links), engine="netem", engine_reason="test"))
        )
        ends = [Endpoint(address=node.address, port=29500) for node in lab.nodes]
        jobs = jobs_over_loopback(
            live_cell(recipe, compute=paces(slower)),
            folder,
            endpoints=tuple(ends),
            limits=Limits(connect_s=60, message_s=message_s),
        )
        sockets = make_sockets(len(jobs))
        began_ns = (time.monotonic_ns() // 10**9 + 5) * 10**9  # reading the clock again and again moves it, too
        children = []
        for job, own, node in zip(jobs, sockets, lab.nodes, strict=True):
            if (pid := os.fork()) == 0:
                _be_node(job, own, sockets, node.namespace.fd, began_ns, crashes=crashes and job.place == WORKERS - 1)
            children.append(pid)
        for sock in (each for own in sockets for each in own):
            sock.close()
        time.sleep((began_ns - time.monotonic_ns()) / 1e9)
        lab.play(began_ns)
        for pid in children:
            os.waitpid(pid, 0)
    assert not [thread for thread in threading.enumerate() if "<->" in thread.name]
    records, errors, weights = [], [], []
    for node_number in range(len(jobs)):
        lines = (folder / f"steps-{node_number}.jsonl").read_text().splitlines()
        records.append([StepRecord.model_validate_json(line) for line in lines])
        said, kept = folder / f"error-{node_number}", folder / f"weights-{node_number}"
        errors.append(said.read_text() if said.exists() else "")
        weights.append(torch.load(kept) if kept.exists() else [])
    # All begin at once, when the last of them is ready.
    return Ran(records, errors, weights, records[-1][0].start_ns if records[-1] else began_ns)


def _be_node(job: PlaceJob, own: Any, sockets: Any, space: int, began_ns: int, *, crashes: bool) -> None:
    """Be a node in this process, and end with it."""
    try:
        become_node(space, own, sockets)
        folder = Path(job.folder)
        try:
            training = Waiting(job.recipe, kinds={WORKERS - 1: Crashing} if crashes else {})
            training.began_ns = began_ns
            run_place(job, own, lambda message: None, lambda: False, lambda setting: training)
            torch.save(training.weights(min(job.place, WORKERS - 1)), folder / f"weights-{job.place}")
        except Exception as error:
            (folder / f"error-{job.place}").write_text(str(error))
    finally:
        os._exit(0)


def by_formula(recipe: Recipe, slower: int = 1) -> tuple[list[tuple[int, int, int]], list[Tensor]]:
    """The same in one process: arrivals, and the server's weights."""
    parts, link = recipe.data.parts, a_link()
    server, workers = asynchronous_nodes(recipe)

    def sent(sender: int, receiver: int, size: int, at_ns: int) -> int:
        return at_ns + 2 * DELAY_NS + wire_bytes(size, link) * 8 * 10**9 // RATE_BPS

    pace = paces(slower)
    local_ns = [
        part * (forward + backward)
        for part, forward, backward in zip(parts, pace.forward_ns, pace.backward_ns, strict=True)
    ]
    found, counts = [], [0] * WORKERS

    def watch(step: ServerStep) -> bool:
        for worker in step.applied.answered:
            found.append((step.applied.step, worker, counts[worker]))
            counts[worker] += 1
        return step.applied.step + 1 < recipe.training.steps

    run_rounds(training_of(recipe).job(), server, workers, Formula(sent), watch, local_ns=local_ns)
    return found, [parameter.detach() for parameter in server.replica.parameters]


def on_the_grid(ran: Ran) -> bool:
    """Whether every step of the server's was made when its period was over."""
    return ran.ends_s() == [pytest.approx(PERIOD_S * (step + 1), abs=1e-3) for step in range(len(ran.ends_s()))]


def twice_the_same(first: Ran, again: Ran) -> bool:
    """Whether losses are, and messages came at the same times but for a microsecond.

    From boot to boot they do to the nanosecond (tests/sweep/test_data_runs.py). In one boot the second run begins at
    another time, and where a packet's time is rounded differs.
    """
    shift = again.began_ns - first.began_ns
    losses = [[[(r.step, r.loss) for r in node] for node in ran.records] for ran in (first, again)]
    came = [[f.last_byte_ns for node in ran.records for r in node for f in r.received] for ran in (first, again)]
    return losses[0] == losses[1] and all(abs(a + shift - b) < 1000 for a, b in zip(*came, strict=True))


def test_asynchronous_rounds_are_twice_the_same_and_as_formulas_say(tmp_path: Path) -> None:
    recipe = asynchronous()
    first, again = (run(recipe, tmp_path / name, slower=5) for name in ("first", "again"))
    assert first.errors == [""] * 4
    assert on_the_grid(first)
    assert twice_the_same(first, again)
    arrivals, weights = by_formula(recipe, slower=5)
    assert first.arrivals() == arrivals
    assert same(first.weights[SERVER], weights)
    assert same(again.weights[SERVER], weights)


def test_a_quorum_with_grace_is_as_formulas_say(tmp_path: Path) -> None:
    recipe = asynchronous(buffer=1, grace_s=0.15)
    ran = run(recipe, tmp_path / "it", slower=5)
    assert ran.errors == [""] * 4
    arrivals, weights = by_formula(recipe, slower=5)
    assert ran.arrivals() == arrivals
    assert same(ran.weights[SERVER], weights)
    # The straggler's message opens a window that ends with those of the two others; theirs opens one that runs out.
    waited = dict[int, list[int]]()
    for record in ran.records[SERVER][:STEPS]:
        (action,) = record.actions
        came = sorted(frame.last_byte_ns for frame in record.received)
        waited.setdefault(len(came), []).append(action.input_ns - came[0 if len(came) < WORKERS else -1])
    assert waited == {2: [150_000_000] * (STEPS // 2), 3: [0] * (STEPS // 2)}


def test_asynchronous_rounds_go_on_without_a_worker_that_crashed(tmp_path: Path) -> None:
    ran = run(asynchronous(), tmp_path / "it", crashes=True)
    assert ran.errors == [""] * 4
    assert (len(ran.ends_s()), on_the_grid(ran)) == (STEPS, True)
    assert {worker for _, worker, _ in ran.arrivals()} == {0, 1}
    assert not ran.weights[WORKERS - 1]


def test_a_straggler_is_staler_and_beyond_the_bound_refused(tmp_path: Path) -> None:
    ran = run(asynchronous(staleness=1), tmp_path / "it", slower=5)
    assert ran.errors == [""] * 4
    assert on_the_grid(ran)
    assert 2 in {worker for _, worker, _ in ran.arrivals()}
    _, weights = by_formula(asynchronous(staleness=1), slower=5)
    assert same(ran.weights[SERVER], weights)  # those without the straggler's updates, see test_arrivals.py


def test_asynchronous_rounds_go_on_while_a_link_is_down(tmp_path: Path) -> None:
    steps = round((UP_S + 12) / PERIOD_S)  # TCP's last pause can be as long as the outage
    ran = run(asynchronous(steps), tmp_path / "it", down=True)
    assert ran.errors == [""] * 4
    assert (len(ran.ends_s()), on_the_grid(ran)) == (steps, True)
    by_worker = [[PERIOD_S * (step + 1) for step, each, _ in ran.arrivals() if each == worker] for worker in range(3)]
    meanwhile = [sum(DOWN_S + 1 < at_s < UP_S for at_s in times) for times in by_worker]
    assert meanwhile[2] == 0 < min(meanwhile[:2])
    assert max(by_worker[2]) > UP_S


@pytest.mark.parametrize(("exchange", "codec", "staleness"), [("all-reduce", "bf16", 0), ("all-gather", SPARSE, 2)])
def test_a_ring_is_twice_the_same_and_as_in_one_process(
    exchange: Exchange, codec: str, staleness: int, tmp_path: Path
) -> None:
    recipe = synchronous(exchange=exchange, codec=codec, staleness=staleness)
    first, again = (run(recipe, tmp_path / name) for name in ("first", "again"))
    alone = trained(recipe)
    assert first.errors == [""] * WORKERS
    assert all(same(first.weights[worker], alone.weights(worker)) for worker in range(WORKERS))
    assert twice_the_same(first, again)


def test_synchronous_steps_take_as_long_as_the_slowest_worker(tmp_path: Path) -> None:
    """One gradient of its own takes the straggler 4 local steps' time longer."""
    ends = {slower: run(synchronous(), tmp_path / f"{slower}", slower=slower).ends_s() for slower in (1, 5)}
    longer = (ends[5][-1] - ends[1][-1]) / len(ends[1])
    assert longer == pytest.approx(4 * LOCAL_NS / 1e9, rel=0.01)


@pytest.mark.parametrize("message_s", [5, 60])
def test_synchronous_steps_wait_for_a_link_as_long_as_a_message_may_take(message_s: float, tmp_path: Path) -> None:
    ran = run(synchronous(16), tmp_path / "it", down=True, message_s=message_s)
    if message_s < UP_S - DOWN_S:
        assert "server <-> worker 2" in ran.errors[SERVER]
        assert f"{message_s:g} s" in ran.errors[SERVER]
        assert ran.ends_s()[-1] < UP_S
    else:
        assert ran.errors == [""] * 4
        assert max(b - a for a, b in zip(ran.ends_s(), ran.ends_s()[1:], strict=False)) > UP_S - DOWN_S
