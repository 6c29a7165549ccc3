"""A lab with a stage host in every node. Live cells that share a network share a session."""

from __future__ import annotations

import functools
import secrets
import selectors
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

from testbed import forks, paths
from testbed.closing import Closing
from testbed.devices import flops
from testbed.errors import CapabilityError, SpecError, StageError, UnknownNameError
from testbed.net.lab import Lab, LabSpec
from testbed.net.sampler import Sampler
from testbed.pipeline.control import Ended, EvaluationDone, Host, JobDone, JobFailed, StepDone
from testbed.pipeline.gather import make_sockets
from testbed.pipeline.job import Endpoint, Limits, PlaceJob, jobs
from testbed.pipeline.pacing import Coding
from testbed.play.job import seeded
from testbed.profiles import Pipe
from testbed.profiles.timeline import timeline
from testbed.records import DuringRecord, LabRecord, Sample
from testbed.spec import Cell, Paced, text_of
from testbed.sweep.interrupt import Interrupt
from testbed.workloads import models as workloads

_DATA_PORT = 29500
_USERS = {kind.__name__ for kind in (SpecError, UnknownNameError, CapabilityError)}
"""Errors of a stage that the user can mend, for example a codec's class that is not in its module."""
_LOADING_S = 120.0
"""For importing torch on a slow, busy machine."""
_PATIENCE_S = 60.0
"""How long a stage may be silent beyond what its link explains."""
_UNKNOWN_S = 3600.0
"""The same of a job of a table `job`: how long its steps are nobody here knows."""
_MOMENTS = 1000
"""How many of a varying link's moments are tried when its worst is looked for."""
_GRACE_S = 2.0
"""After the first failure the other stages get this long to say theirs: a lost neighbour is often heard of before its
cause."""


class SessionObserver(Protocol):
    """Who is told what happens while a cell trains. Times are the lab's."""

    def step(self, message: StepDone) -> None:
        """A training step has ended."""

    def evaluated(self, message: EvaluationDone) -> None:
        """An evaluation has ended."""

    def carried(self, sample: Sample) -> None:
        """What the links have carried by now."""


class Tokens(NamedTuple):
    """What was prepared for a workload."""

    path: Path
    """The token ids of a text; of images, the folder that keeps what was fetched."""
    vocabulary: int
    """Tokens that a text's tokenizer has; of images, their classes."""


class Session(Closing):
    """Namespaces, links and stage hosts for one network; a context manager."""

    during: DuringRecord | None = None
    """How late the machine made the links in the last run that ended well."""

    def __init__(self, cell: Cell, engine_reason: str, *, link_seed: int = 0) -> None:
        """`link_seed` is added to the seed of every pipe."""
        self.network = network_of(cell)
        self.lost: dict[str, JobFailed] = {}
        """Workers that ended badly in the last run, and that it went on without: by name."""
        self.hosts: list[Host] = []
        with ExitStack() as stack:
            spec = LabSpec(
                topology=cell.topology,
                profiles=tuple(seeded(profile, link_seed) for profile in cell.links),
                nodes=cell.nodes,
                engine=cell.engine,
                engine_reason=engine_reason,
            )
            self.lab = stack.enter_context(Lab(spec))
            for node, name in zip(self.lab.nodes, cell.node_names, strict=True):
                start = functools.partial(forks.popen, namespace=node.namespace.fd, **paths.as_invoking_user())
                self.hosts.append(stack.enter_context(Host(start, name=name)))
            for host in self.hosts:
                host.wait_ready(_LOADING_S)
            self._stack = stack.pop_all()

    def train(
        self,
        cell: Cell,
        tokens: Tokens,
        folder: Path,
        observer: SessionObserver,
        interrupt: Interrupt,
        played: Callable[[LabRecord], None],
        coding: Coding | None = None,
    ) -> Ended:
        """Run one cell's jobs to their end; why they ended. StageError names the stage at fault and says what it said.

        Links that vary begin to when the jobs do: `played` is then called with the lab's record, which says when.
        Afterwards they are held at their own numbers again. What the links carry meanwhile goes to counters.jsonl in
        the folder. An interrupt ends the jobs after their running step. After an error the session's state is unknown:
        close it. `coding`: see `PlaceJob`.
        """
        patience_s = _UNKNOWN_S if cell.job else _PATIENCE_S + 10 * (_transfer_s(cell) + _computing_s(cell))
        work = jobs(
            cell,
            endpoints=tuple(Endpoint(address=node.address, port=_DATA_PORT) for node in self.lab.nodes),
            token=secrets.token_hex(16),
            vocabulary=tokens.vocabulary,
            tokens=str(tokens.path),
            folder=str(folder.resolve()),
            devices=tuple(node.devices for node in self.lab.nodes),
            overhead_bytes=self.lab.record.overhead_bytes,
            limits=Limits(connect_s=_LOADING_S, message_s=patience_s),
            coding=coding,
        )
        self.lab.play()
        played(self.lab.record)
        with Sampler(self.lab, folder / "counters.jsonl") as sampler:
            for host, job, sockets in zip(self.hosts, work, make_sockets(len(work)), strict=True):
                host.start(job, sockets)
            survives = cell.data is not None and cell.data.arrivals is not None
            ended = self._follow(work, sampler, observer, interrupt, patience_s, survives=survives)
        self.during = sampler.during
        self.lab.hold()
        return ended

    def _follow(
        self,
        work: tuple[PlaceJob, ...],
        sampler: Sampler,
        observer: SessionObserver,
        interrupt: Interrupt,
        patience_s: float,
        *,
        survives: bool,
    ) -> Ended:
        """Read what the stages say until each has said that it is done. `survives`: the last of them, a server, goes on
        without those that fail.
        """
        self.lost.clear()
        running = set(range(len(work)))
        told = False
        ended: Ended = "steps"
        failures: dict[int, JobFailed] = {}
        deadline = time.monotonic() + _LOADING_S + patience_s
        with selectors.DefaultSelector() as selector:
            for stage, host in enumerate(self.hosts):
                selector.register(host, selectors.EVENT_READ, stage)
            while running - failures.keys():
                ready = selector.select(0.5)
                sampler.check()
                if sampler.latest is not None:
                    observer.carried(sampler.latest)
                if interrupt.asked and not told:
                    told = True
                    for host in self.hosts:
                        host.finish()
                for key, _ in ready:
                    for message in self.hosts[key.data].messages():
                        match message:
                            case StepDone():
                                observer.step(message)
                                deadline = time.monotonic() + patience_s
                            case EvaluationDone():
                                observer.evaluated(message)
                                deadline = time.monotonic() + patience_s
                            case JobDone():
                                running.discard(key.data)
                                # Of nodes that follow a server only the server knows why it ended.
                                ended = message.ended if ended == "steps" else ended
                            case JobFailed() if survives and key.data < len(work) - 1:
                                running.discard(key.data)
                                self.lost[work[key.data].name] = message
                            case JobFailed():
                                failures[key.data] = message
                                deadline = min(deadline, time.monotonic() + _GRACE_S)
                if time.monotonic() > deadline:
                    break
        if failures:
            raise _cause({**self.lost, **{work[stage].name: failed for stage, failed in failures.items()}})
        if running:
            silent = ", ".join(work[stage].name for stage in sorted(running))
            raise StageError(f"{silent} said nothing for {patience_s:.0f} s and were stopped")
        return ended

    def close(self) -> None:
        """End the stage hosts, then take down the links."""
        self._stack.close()


def network_of(cell: Cell) -> tuple[object, ...]:
    """Return what cells must have in common to share a session."""
    return (cell.topology, cell.links, cell.engine, cell.clock, cell.node_names, cell.timing)


def _transfer_s(cell: Cell) -> float:
    """Return how long all fp32 tensors of one step need on the slowest direction of any link, at its worst moment,
    delays included.
    """
    if cell.data is not None:
        values = cell.data.workers * flops.whole_model(cell.workload)
    else:
        values = cell.workload.batch_tokens * workloads.hidden_width(text_of(cell))

    def seconds(pipe: Pipe) -> float:
        line = timeline(pipe)
        starts = [step.at_ns for step in line.steps[:: 1 + len(line.steps) // _MOMENTS]]
        wire_ns = max(line.carried_at(start, 2 * 4 * values * 8) - start for start in starts)
        return (wire_ns + max(step.delay_ns for step in line.steps) * cell.nodes) / 1e9

    pipes = {pipe for profile in cell.links for pipe in (profile.up, profile.down) if pipe is not None}
    return max(map(seconds, pipes), default=0.0)


def _computing_s(cell: Cell) -> float:
    """Return how long the actions of one step last in the lab if none overlap, and a server's period; 0 where nothing
    holds them to a duration.
    """
    if not isinstance(cell.compute, Paced):
        return 0.0
    parts, stages = cell.pipeline.microbatches * cell.pipeline.accumulation, cell.pipeline.stages
    if cell.data is not None:
        parts *= max(cell.data.parts) * max(cell.data.local_steps)
    action_ns = max(cell.compute.forward_ns) + max(cell.compute.backward_ns)
    waits_ns = 0 if cell.data is None or cell.data.arrivals is None else cell.data.arrivals.period_ns or 0
    return (parts * stages * action_ns + waits_ns) * cell.compute.dilation / 1e9


def _cause(failures: dict[str, JobFailed]) -> StageError | SpecError:
    """Return the failure that others followed from: one that is not a lost neighbour, else the first that was heard."""
    name, failed = next(
        ((s, f) for s, f in failures.items() if f.error != "TransportError"), next(iter(failures.items()))
    )
    named = failed.message if failed.message.startswith(name) else f"{name}: {failed.message}"
    return (SpecError if failed.error in _USERS else StageError)(named)
