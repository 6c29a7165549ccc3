"""How long does a step of a trace take where links do exactly what they are asked to, without a transport?"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from testbed.jobs.loop import Links
from testbed.play.trace import Trace
from testbed.play.unlinked import replay

Duplex = Literal["full", "inbound"]


def ideal_steps_ns(trace: Trace, links: Links | None, steps: int = 3) -> list[int]:
    """Return how long each of the first `steps` steps takes over these links; None: where messages take no time.

    SpecError as from `unlinked.replay`.
    """
    return [after - before for before, after in pairwise([0, *replay(trace, steps, links)])]


def ideal_step_ns(trace: Trace, links: Links | None, steps: int = 3) -> int:
    """Return how long the last of the first `steps` steps takes, see `ideal_steps_ns`."""
    return ideal_steps_ns(trace, links, steps)[-1]
