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

from testbed import faults, forks, paths
from testbed.closing import Closing
from testbed.devices import flops
from testbed.errors import CapabilityError, SpecError, StageError, UnknownNameError
from testbed.net.lab import Lab, LabSpec
from testbed.net.sampler import Sampler
from testbed.player.play_job import seeded_lab
from testbed.profiles import Pipe
from testbed.profiles.timeline import timeline
from testbed.records import DuringRecord, LabRecord, Sample
from testbed.runtime.control_plane import Ended, EvaluationDone, Host, JobDone, JobFailed, StepDone
from testbed.runtime.gather import make_sockets
from testbed.runtime.pacing import Coding
from testbed.runtime.place_job import Endpoint, Limits, PlaceJob, jobs
from testbed.spec import Cell, Paced, text_of
from testbed.sweep.interrupt import Interrupt
from testbed.workloads import models as workloads

_DATA_PORT = 29500
_USERS = {kind.__name__ for kind in (SpecError, UnknownNameError, CapabilityError)}
"""Stage errors that count as user errors, for example a codec class missing from its module."""
_LOADING_S = 120.0
"""Time allowed to import torch on a slow, busy machine."""
_PATIENCE_S = 60.0
"""Time that a stage may be silent, in addition to what its links and compute explain."""
_UNKNOWN_S = 3600.0
"""The same for a job of a table `job`, whose step time is unknown."""
_MOMENTS = 1000
"""Number of moments of a varying link that are searched for its lowest rate."""
_GRACE_S = 2.0
"""Time for the other stages to report after the first failure: a lost neighbour is often reported before its cause."""


class SessionObserver(Protocol):
    """Observer of a live training. Times are the lab's."""

    def step(self, message: StepDone) -> None:
        """Handle the end of a training step."""

    def evaluated(self, message: EvaluationDone) -> None:
        """Handle the end of an evaluation."""

    def carried(self, sample: Sample) -> None:
        """Handle a sample of the links' counters."""


class Tokens(NamedTuple):
    """Prepared data of a workload."""

    path: Path
    """File of the token ids of a text; for images, the folder of the data set."""
    vocabulary: int
    """Size of the tokenizer's vocabulary; for images, the number of classes."""


class Session(Closing):
    """Namespaces, links and stage hosts for one network; a context manager."""

    during: DuringRecord | None = None
    """Lateness of the links in the last successful run."""

    def __init__(self, cell: Cell, engine_reason: str, *, link_seed: int = 0) -> None:
        """`link_seed` is added to the seed of every pipe."""
        self.network = network_of(cell)
        self.lost: dict[str, JobFailed] = {}
        """Workers that failed in the last run, and that it continued without, by name."""
        self.hosts: list[Host] = []
        with ExitStack() as stack:
            spec = seeded_lab(LabSpec(**cell.lab, engine=cell.engine, engine_reason=engine_reason), link_seed)
            self.lab = stack.enter_context(Lab(spec))
            for node, name in zip(self.lab.nodes, cell.node_names, strict=True):
                start = functools.partial(forks.popen, namespaces=[node.namespace.fd], **paths.as_invoking_user())
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
        resumes_at: int = 0,
    ) -> Ended:
        """Run one cell's jobs to their end; return why they ended. StageError names the failed stage and its message.

        Varying links start with the jobs: `played` is then called with the lab's record, which has that time.
        Afterwards they return to their nominal values. Counters of the links go to counters.jsonl in the folder. An
        interrupt ends the jobs after their current step. After an error the session's state is undefined: close it.
        `coding`, `resumes_at`: see `PlaceJob`; checkpoints lie beside the folder.
        """
        patience_s = _UNKNOWN_S if cell.job else _PATIENCE_S + 10 * (_transfer_s(cell) + _computing_s(cell))
        patience_s += faults.patience_s(cell.fault or ()) * cell.compute.dilation
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
        told: dict[str, object] = {"played_at_ns": self.lab.play(), "resumes_at": resumes_at}
        if (every := cell.training.checkpoint_every) is not None:
            told |= {"checkpoints": str(folder.resolve().parent), "checkpoint_every": every}
        played(self.lab.record)
        with Sampler(self.lab, folder / "counters.jsonl") as sampler:
            for host, job, sockets in zip(self.hosts, work, make_sockets(len(work)), strict=True):
                host.start(job.model_copy(update=told), sockets)
            survives = cell.data is not None and cell.data.arrivals is not None
            ended = self._follow(work, sampler, observer, interrupt, patience_s, survives=survives)
        self.during = sampler.during
        self.lab.hold()
        if self.lab.record.background is not None or self.lab.record.faults is not None:
            played(self.lab.record)
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
        """Process the stages' messages until all have reported their end. `survives`: the last one, a server, continues
        without failed workers.
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
                                # With a server, only the server knows why training ended.
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
            raise StageError(f"{silent} reported nothing for {patience_s:.0f} s and were stopped")
        return ended

    def close(self) -> None:
        """End the stage hosts, then take down the links."""
        self._stack.close()


def network_of(cell: Cell) -> tuple[object, ...]:
    """Return the key that cells must share to share a session."""
    links = cell.topology, cell.links, cell.sites, cell.tcp_rto_max_ms
    return (*links, cell.engine, cell.clock, cell.node_names, cell.timing)


def _transfer_s(cell: Cell) -> float:
    """Return the time of all fp32 tensors of one step on the slowest link direction at its lowest rate, including
    delays.
    """
    if cell.data is not None:
        values = cell.data.workers * flops.whole_model(cell.workload)
    else:
        values = cell.workload.batch_tokens * workloads.hidden_width(text_of(cell))

    def seconds(pipe: Pipe) -> float:
        line = timeline(pipe)
        starts = [step.at_ns for step in line.steps[:: 1 + len(line.steps) // _MOMENTS]]
        starts += [fault.at_ns for fault in line.faults]
        wire_ns = max(line.carried_at(start, 2 * 4 * values * 8) - start for start in starts)
        return (wire_ns + max(step.delay_ns for step in [*line.steps, *map(line.at, starts)]) * cell.nodes) / 1e9

    pipes = {pipe for profile in cell.links for pipe in (profile.up, profile.down) if pipe is not None}
    return max(map(seconds, pipes), default=0.0)


def _computing_s(cell: Cell) -> float:
    """Return the time of the actions of one step in the lab if none overlap, plus a server's period or grace; 0 if the
    actions are not paced.
    """
    if not isinstance(cell.compute, Paced):
        return 0.0
    parts, stages = cell.pipeline.microbatches * cell.pipeline.accumulation, cell.pipeline.stages
    if cell.data is not None:
        parts *= max(cell.data.parts) * max(cell.data.local_steps)
    action_ns = max(cell.compute.forward_ns) + max(cell.compute.backward_ns)
    arrivals = None if cell.data is None else cell.data.arrivals
    waits_ns = 0 if arrivals is None else arrivals.period_ns or arrivals.grace_ns
    return (parts * stages * action_ns * cell.compute.longest + waits_ns) * cell.compute.dilation / 1e9


def _cause(failures: dict[str, JobFailed]) -> StageError | SpecError:
    """Return the root failure: the first that is not a lost neighbour, otherwise the first reported."""
    name, failed = min(failures.items(), key=lambda each: each[1].error == "TransportError")
    named = failed.message if name in failed.message else f"{name}: {failed.message}"
    return (SpecError if failed.error in _USERS else StageError)(named)
