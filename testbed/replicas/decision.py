"""What a policy may change while data parallel training lasts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from testbed.codecs.catalogue.placement import parse_placement
from testbed.spec import Recipe


class Decision(NamedTuple):
    """Numbers that all workers go by from one step on. Tuples have one entry per worker."""

    effective_from: int
    """The first step for which it holds."""
    staleness: tuple[int, ...]
    local_steps: tuple[int, ...]
    codecs: tuple[str, ...]
    """Of each worker's messages, as a cell's `codec` writes one."""


Policy = Callable[[int], Decision | None]
"""Asked before each step, by its number, what changes from that step on; None: nothing."""


def as_stated(recipe: Recipe) -> Decision:
    """Return what a recipe begins with."""
    data = recipe.data
    assert data is not None
    placement, workers = parse_placement(recipe.codec), range(data.workers)
    return Decision(
        effective_from=0,
        staleness=tuple(map(data.staleness_of, workers)),
        local_steps=tuple(map(data.local_steps_of, workers)),
        codecs=tuple(placement.at(worker, "backward").text for worker in workers),
    )
