"""Train one place of a recipe over links; called by a stage host."""

from __future__ import annotations

import contextlib
import functools
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from testbed.errors import TransportError
from testbed.jobs.actions import Action, Work
from testbed.jobs.draws import drawn
from testbed.jobs.kind import Setting
from testbed.jobs.pipeline import Ended
from testbed.runtime.control_plane import EvaluationDone, StepDone
from testbed.runtime.ending import Announced
from testbed.runtime.live import Live
from testbed.runtime.pacing import Line, Takes
from testbed.runtime.place_job import PlaceJob
from testbed.runtime.step_log import StepLog
from testbed.runtime.wiring import Wiring
from testbed.spec import Measured
from testbed.training.accelerator import device_of, trained_on
from testbed.training.checkpoints import PlaceCheckpoints
from testbed.training.device_copies import copies_of
from testbed.training.kinds import Training, explain_memory, set_up_torch, training_of


def run_place(
    job: PlaceJob,
    sockets: Sequence[socket.socket],
    report: Callable[[StepDone | EvaluationDone], None],
    asked: Callable[[], bool],
    make: Callable[[Setting], Training] = training_of,
) -> Ended:
    """Build the place's node, connect it, run its program, and close connections in order; returns why training ended.

    `sockets` are those of the job's `Gather`; they are closed at the end. `asked` returns whether the user has asked to
    stop early. StageError, with advice, when memory runs out.
    """
    set_up_torch()
    training, node, place = make(Setting(job.recipe, job.vocabulary, job.tokens)), None, job.place
    training.device = device_of(job.recipe, place)
    copies = copies_of(training.device)
    if (on := trained_on(job.recipe, training.device)) is not None:
        alone = ", ".join(on.copied) or "none"
        sys.stdout.write(f"{job.name} computes on {training.device}, {on.device}; codecs that get copies: {alone}\n")
    try:
        with Wiring(
            job,
            sockets,
            names=training.names,
            max_payload_bytes=training.most_bytes,
            max_frames=training.most_frames,
        ) as wiring:
            loaded = training.load(place)
            wiring.connect()
            spoiled = _spoiling(job) if any(fault.frame for fault in job.faults) else None
            for connection in wiring.connections.values():
                connection.copies, connection.spoiled = copies, spoiled or connection.spoiled
            node = training.node(place, loaded, lambda peer: wiring.connections[peer].measure())
            ending = training.ending(job, wiring.gather, asked)
            kept = PlaceCheckpoints(job, node) if job.checkpoints is not None else None
            resting = kept.resume() if kept is not None else None
            with (Path(job.folder) / f"steps-{place}.jsonl").open("x", encoding="utf8") as steps:
                log = StepLog(
                    node,
                    steps,
                    named=training.named,
                    warmup_steps=job.resumes_at + job.recipe.training.warmup_steps,
                    connections=wiring.connections,
                    side=lambda peer: training.side(place, peer),
                    counters=wiring.counters,
                    report=report,
                    says_loss=training.says_loss(place),
                )
                if resting is not None:
                    log.resume(place, [key for key, _ in resting.results])
                live = Live(
                    place,
                    node,
                    wiring.connections,
                    gather=wiring.gather,
                    ending=ending,
                    line=lambda: Line(
                        takes(job, training), job.compute.dilation, faults=job.faults, faults_from_ns=job.played_at_ns
                    ),
                    timeout_s=job.limits.message_s,
                    observers=[log],
                    pause=kept,
                    resting=resting,
                    computed=copies.computed,
                )
                ended = live.run(training.job_of(job).program(place, job.resumes_at))
                log.finish(job.limits.message_s)
            with contextlib.suppress(*([TransportError] if training.misses_nobody(place) else [])):
                wiring.leave()
    except (MemoryError, RuntimeError, OSError) as error:
        explain_memory(job.name, node, error)
        raise
    return ended or ("asked" if isinstance(ending, Announced) and ending.early else "steps")


def _spoiling(job: PlaceJob) -> Callable[[int], str | None]:
    """Return what tells the place's connections, each in its own thread, what becomes of a message that leaves at a
    time: a fault of the place's frames is that of the next one, to whomever.
    """
    due = deque((job.played_at_ns + fault.at_ns, fault.frame) for fault in job.faults if fault.frame is not None)
    turn = threading.Lock()

    def spoiled(now_ns: int) -> str | None:
        with turn:
            return due.popleft()[1] if due and due[0][0] <= now_ns else None

    return spoiled


def takes(job: PlaceJob, training: Training) -> Takes | None:
    """Return a place's durations of actions, for `Line`."""
    if isinstance(job.compute, Measured):
        return None
    work_ns, codec_ns = training.work_ns(job), training.codec_ns(job)

    def stated_ns(place: int, action: Action) -> int | None:
        return work_ns(action.what) if isinstance(action, Work) else codec_ns(action)

    return functools.partial(drawn(stated_ns, job.compute), job.place)
