"""The job that is played of a cell, of whichever kind: a row for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from testbed.jobs.actions import Action, Decode, Encode, Work
from testbed.jobs.kind import JobKind, RecordedNode, kind_of
from testbed.jobs.loop import Cost
from testbed.play import pipelines, replica_times, replicas
from testbed.play.tracing import TracedJob
from testbed.records import Calibration, PlaceCosts, StepRecord
from testbed.spec import Cell, DataParallelSpec, Parallelism, PipelineSpec, Stated, recipe_of

Training = Sequence[Sequence[StepRecord]]


def played_job(cell: Cell, training: Training, costs: Calibration) -> TracedJob:
    """Return a played cell's job: `training` holds the records of its recipe's training, by place, and `costs` its
    durations, where `pipelines.needs_calibration`. ResultsError where a message is not in the records.
    """
    return next(job(cell, training, costs) for kind, job in _JOBS.items() if isinstance(cell.parallelism, kind))


def _pipeline(cell: Cell, training: Training, costs: Calibration) -> TracedJob:
    return pipelines.job_of(cell, training, costs.recipes.get(recipe_of(cell).id))


def _replicas(cell: Cell, training: Training, costs: Calibration) -> TracedJob:
    return replicas.job_of(cell, training, replica_times.worked_times(cell, costs))


def _other(cell: Cell, training: Training, costs: Calibration) -> TracedJob:
    kind = kind_of(cell)
    trained = [[record for record in records if record.phase == "train"] for records in training]
    return TracedJob(
        kind.played,
        [RecordedNode(kind, place, records) for place, records in enumerate(trained)],
        _cost(cell, costs.jobs.get(recipe_of(cell).id)),
        about={"codec": cell.codec, "kind": kind.kind},
        named=kind.named,
        goes_on=lambda place, step: step + 1 < len(trained[0]),
    )


_JOBS: Mapping[type[Parallelism], Callable[[Cell, Training, Calibration], TracedJob]] = {
    PipelineSpec: _pipeline,
    DataParallelSpec: _replicas,
    JobKind: _other,
}


def _cost(cell: Cell, costs: Sequence[PlaceCosts] | None) -> Cost:
    """Return how long work takes, as the cell states it or as it was timed here; codecs as timed, or no time."""
    stated, factor = cell.compute if isinstance(cell.compute, Stated) else None, cell.compute.dilation

    def cost(place: int, action: Action) -> int | None:
        match action:
            case Work(what) if stated is not None:
                return stated.takes_ns(what, cell.node_names[place])
            case Work(what) if costs is not None:
                return costs[place].work[what].ns * factor
            case Encode(key) if costs is not None and cell.codec_cost == "host":
                return costs[place].encode[key.what].ns * factor
            case Decode(messages) if costs is not None and cell.codec_cost == "host":
                return costs[place].decode[messages[0].key.what].ns * factor
        return None

    return cost
