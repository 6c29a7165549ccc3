"""Builds the player's job of a cell of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from testbed.errors import UserError
from testbed.jobs.actions import Action, Decode, Encode, Work
from testbed.jobs.draws import drawn
from testbed.jobs.kind import RecordedNode, kind_of
from testbed.jobs.loop import Cost
from testbed.metrics.ideal import trained_steps
from testbed.records import Calibration, PlaceCosts, StepRecord
from testbed.replay import pipelines, workers
from testbed.spec import Cell, DataParallelSpec, PipelineSpec, Stated, recipe_of
from testbed.trace.tracing import TracedJob


def played_job(cell: Cell, training: Sequence[Sequence[StepRecord]], costs: Calibration) -> TracedJob:
    """Return a played cell's job. `training`: the records of its recipe's training, by place; `costs`: its durations,
    if `pipelines.needs_calibration`. ResultsError if the records lack a message.
    """
    recipe = recipe_of(cell).id
    job = _job(cell, training, costs, recipe)
    measured = costs.recipes.get(recipe) or costs.replicas.get(recipe) or costs.jobs.get(recipe)
    return replace(job, cost=drawn(job.cost, cell.compute, measured))


def _job(cell: Cell, training: Sequence[Sequence[StepRecord]], costs: Calibration, recipe: str) -> TracedJob:
    """Return the job with the stated durations."""
    match cell.parallelism:
        case PipelineSpec():
            return pipelines.job_of(cell, training, costs.recipes.get(recipe))
        case DataParallelSpec():
            return workers.job_of(cell, training, workers.node_times(cell, costs.replicas.get(recipe)))
    kind, trained = kind_of(cell), trained_steps(training)
    return TracedJob(
        kind.played,
        [RecordedNode(name, records, kind.named) for name, records in zip(kind.places, trained, strict=True)],
        _cost(cell, costs.jobs.get(recipe)),
        about={"codec": cell.codec, "kind": kind.kind},
        named=kind.named,
        goes_on=lambda place, step: step + 1 < len(trained[0]),
    )


def _cost(cell: Cell, costs: Sequence[PlaceCosts] | None) -> Cost:
    """Return the duration of work, stated by the cell or timed here; codecs take their timed duration, or none."""
    stated, factor = cell.compute if isinstance(cell.compute, Stated) else None, cell.compute.dilation
    coding = costs if cell.codec_cost == "host" else None

    def cost(place: int, action: Action) -> int | None:
        match action:
            case Work(what) if stated is not None:
                return stated.takes_ns(what, cell.node_names[place])
            case Work(what) if costs is not None:
                return costs[place].work[what].ns * factor
            case Encode(key) if coding is not None:
                return coding[place].encode[key.what].ns * factor
            case Decode(messages) if coding is not None:
                return coding[place].decode[messages[0].key.what].ns * factor
        return None

    def known_cost(place: int, action: Action) -> int | None:
        try:
            return cost(place, action)
        except KeyError as error:
            name = cell.node_names[place]
            raise UserError(
                f"the calibration has no duration of {error} at {name}; measure it: --recalibrate"
            ) from None

    return known_cost
