"""One place of a job of a table `job` over links. `pipeline.host` starts it, and `pipeline.live` runs its program."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from testbed.devices import flops
from testbed.jobs.actions import Action, Work
from testbed.jobs.kind import Setting, kind_of
from testbed.message_key import Phase
from testbed.pipeline.control import Ended, EvaluationDone, StepDone
from testbed.pipeline.ending import Ending
from testbed.pipeline.job import KindJob
from testbed.pipeline.live import run_place
from testbed.pipeline.pacing import Takes
from testbed.pipeline.train import set_up_torch
from testbed.pipeline.wiring import Wiring
from testbed.spec import Stated

_FRAMES = 1 << 16
"""Messages that may wait unsent, or untaken, on one connection: how many a step has only its program knows."""
_LEAST_BYTES, _MOST = 1 << 28, 4
"""A payload may have so many bytes, or so many times those of the whole model in fp32."""


class _Steps(Ending):
    """Ends the programs, which know no last step."""

    def goes_on(self, number: int, phase: Phase, end_ns: int) -> bool:
        """Return what an `EndStep` returns."""
        return super().goes_on(number, phase, end_ns) and (phase != "train" or number + 1 < self.steps)


def run_node(
    job: KindJob,
    sockets: Sequence[socket.socket],
    report: Callable[[StepDone | EvaluationDone], None],
    asked: Callable[[], bool],
) -> Ended:
    """Make what the place has, connect it, run its program, and take leave; returns why the job ended.

    `asked` says whether a person wants it to end before its last step. Of places that wait for each other in each step
    none is ahead of another by more steps than there are places.
    """
    set_up_torch()
    recipe, kind = job.recipe, kind_of(job.recipe)
    with Wiring(
        job,
        sockets,
        places=kind.places,
        peers=job.peers,
        max_payload_bytes=max(_LEAST_BYTES, _MOST * 4 * flops.whole_model(job.workload)),
        max_frames=_FRAMES,
    ) as wiring:
        node = kind.node(job.stage, Setting(recipe, job.vocabulary, job.tokens))
        wiring.connect()
        steps = job.training.steps
        ending = _Steps(wiring.gather, asked, decides=job.stage == 0, steps=steps, furthest=len(kind.places))
        run_place(
            job,
            node,
            kind.program(job.stage),
            connections=wiring.connections,
            gather=wiring.gather,
            counters=wiring.counters,
            ending=ending,
            takes=_takes(job),
            named=kind.named,
            sides={peer: peer for peer in wiring.connections},
            report=report,
        )
        wiring.leave()
    return "asked" if ending.early else "steps"


def _takes(job: KindJob) -> Takes | None:
    """Return how long a place takes for what."""
    if not isinstance(stated := job.compute, Stated):
        return None
    codec_ns = None if job.codec_cost == "host" else 0

    def takes(action: Action) -> int | None:
        return stated.takes_ns(action.what, job.name) if isinstance(action, Work) else codec_ns

    return takes
