"""The job that is played of a cell, of whichever kind."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.jobs.actions import Action, Decode, Encode, Work
from testbed.jobs.kind import RecordedNode, kind_of
from testbed.jobs.loop import Cost
from testbed.metrics.ideal import trained_steps
from testbed.play import pipelines, replicas
from testbed.play.tracing import TracedJob
from testbed.records import Calibration, PlaceCosts, StepRecord
from testbed.spec import Cell, DataParallelSpec, PipelineSpec, Stated, recipe_of


def played_job(cell: Cell, training: Sequence[Sequence[StepRecord]], costs: Calibration) -> TracedJob:
    """Return a played cell's job: `training` holds the records of its recipe's training, by place, and `costs` its
    durations, where `pipelines.needs_calibration`. ResultsError where a message is not in the records.
    """
    recipe = recipe_of(cell).id
    match cell.parallelism:
        case PipelineSpec():
            return pipelines.job_of(cell, training, costs.recipes.get(recipe))
        case DataParallelSpec():
            return replicas.job_of(cell, training, replicas.node_times(cell, costs.replicas.get(recipe)))
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
    """Return how long work takes, as the cell states it or as it was timed here; codecs as timed, or no time."""
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

    return cost
