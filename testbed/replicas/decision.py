"""What a recipe of data parallel training begins with."""

from __future__ import annotations

from testbed.codecs.catalogue.placement import parse_placement
from testbed.jobs.decision import Decision
from testbed.spec import Recipe


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
