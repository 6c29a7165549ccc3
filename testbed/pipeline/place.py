"""Train one place of a recipe over links: what a stage host calls with its job."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from testbed.errors import TransportError
from testbed.jobs.actions import Work
from testbed.jobs.kind import Setting
from testbed.jobs.pipeline import Ended
from testbed.pipeline.control import EvaluationDone, StepDone
from testbed.pipeline.ending import Announced
from testbed.pipeline.job import PlaceJob
from testbed.pipeline.live import Live
from testbed.pipeline.pacing import Line, Takes
from testbed.pipeline.step_log import StepLog
from testbed.pipeline.training import Training, explain_memory, set_up_torch, training_of
from testbed.pipeline.wiring import Wiring
from testbed.spec import Measured


def run_place(
    job: PlaceJob,
    sockets: Sequence[socket.socket],
    report: Callable[[StepDone | EvaluationDone], None],
    asked: Callable[[], bool],
    make: Callable[[Setting], Training] = training_of,
) -> Ended:
    """Make what the place has, connect it, run its program, and take leave in order; returns why training ended.

    `sockets` are those of the job's `Gather`; they are closed at the end. `asked` says whether a person wants the job
    to end before its time. StageError, with advice, where memory does not suffice.
    """
    set_up_torch()
    training, node, place = make(Setting(job.recipe, job.vocabulary, job.tokens)), None, job.place
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
            node = training.node(place, loaded, lambda peer: wiring.connections[peer].measure())
            ending = training.ending(job, wiring.gather, asked)
            with (Path(job.folder) / f"steps-{place}.jsonl").open("x", encoding="utf8") as steps:
                log = StepLog(
                    node,
                    steps,
                    named=training.named,
                    warmup_steps=job.recipe.training.warmup_steps,
                    connections=wiring.connections,
                    side=lambda peer: training.side(place, peer),
                    counters=wiring.counters,
                    report=report,
                    says_loss=training.says_loss(place),
                )
                live = Live(
                    place,
                    node,
                    wiring.connections,
                    gather=wiring.gather,
                    ending=ending,
                    line=lambda: Line(takes(job, training), job.compute.dilation),
                    timeout_s=job.limits.message_s,
                    observers=[log],
                )
                ended = live.run(training.job_of(job).program(place))
                log.finish(job.limits.message_s)
            with contextlib.suppress(*([TransportError] if training.misses_nobody(place) else [])):
                wiring.leave()
    except (MemoryError, RuntimeError, OSError) as error:
        explain_memory(job.name, node, error)
        raise
    return ended or ("asked" if isinstance(ending, Announced) and ending.early else "steps")


def takes(job: PlaceJob, training: Training) -> Takes | None:
    """Return how long a place takes for what, as a `Line` has it."""
    if isinstance(job.compute, Measured):
        return None
    work_ns, codec_ns = training.work_ns(job), training.codec_ns(job)
    return lambda action: work_ns(action.what) if isinstance(action, Work) else codec_ns(action)
