"""Turns the training of a pipeline into a job for the player: its schedule, the recorded bytes, and the durations of
stages.

Evaluations are not played: they keep their losses and take no time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from testbed.codecs.catalogue import placement
from testbed.devices.codec_cost import DeviceRates, device_codec_ns
from testbed.errors import UserError
from testbed.jobs.actions import Action, Decode, Encode, Receive, Work
from testbed.jobs.kind import RecordedNode
from testbed.jobs.loop import Cost
from testbed.jobs.pipeline import MESSAGES, PipelineJob, orders_of
from testbed.message_key import Direction
from testbed.metrics.ideal import trained_steps
from testbed.records import StageCosts, StepRecord
from testbed.spec import Cell, Paced, Stated, text_of
from testbed.trace.tracing import TracedJob
from testbed.workloads import models

LABELS = ("decode", "forward", "backward", "encode", "clip", "update", "activation", "gradient", "barrier")
_MESSAGE: Mapping[Direction, str] = {"forward": MESSAGES["F"], "backward": MESSAGES["B"]}


def needs_calibration(cell: Cell) -> bool:
    """Return whether any duration of a played cell is measured on this machine."""
    return not isinstance(cell.compute, Paced | Stated) or cell.codec_cost == "host"


def check_costs(cell: Cell, costs: object | None) -> None:
    """Raise UserError if a cell needs the durations of its recipe, but there are none."""
    if needs_calibration(cell) and costs is None:
        raise UserError(f"cell {cell.id} needs the durations of its recipe, but the calibration lacks them")


def stage_cost(cell: Cell, costs: Sequence[StageCosts] | None) -> Cost:
    """Return the durations of a played cell's stages. `costs`: those of its recipe, if `needs_calibration`."""
    check_costs(cell, costs)
    each = [_stage_ns(cell, stage, None if costs is None else costs[stage]) for stage in range(cell.pipeline.stages)]
    works, encode, decode, waking = ([one[part] for one in each] for part in range(4))

    def cost(stage: int, action: Action) -> int | None:
        # Not `match`, which is three times slower: traces consist of millions of these.
        if isinstance(action, Work):
            return works[stage].get(action.what)
        if isinstance(action, Encode):
            return encode[stage][action.key.what]
        if isinstance(action, Decode):
            return decode[stage][action.messages[0].key.what]
        return waking[stage][action.key.what] if isinstance(action, Receive) else None

    return cost


def _stage_ns(cell: Cell, stage: int, costs: StageCosts | None) -> tuple[dict[str, int], ...]:
    """Return the durations of a stage's work, encodes and decodes, and the extra time of a decode after a sleep, in
    nanoseconds of the lab, by the name of the work or message.
    """
    factor = cell.compute.dilation
    if isinstance(cell.compute, Paced):
        works = {**cell.compute.takes_ns(stage), "clip": 0}
    else:
        assert costs is not None
        works = {what: getattr(costs, what).ns * factor for what in ("forward", "backward", "clip", "update")}
    return works, *({_MESSAGE[way]: ns * factor for way, ns in of.items()} for of in _codec_ns(cell, stage, costs))


def _codec_ns(cell: Cell, stage: int, costs: StageCosts | None) -> Sequence[Mapping[Direction, int]]:
    """Return the codec durations of one stage by direction, under the cell's rule, as above."""
    if cell.codec_cost == "host":
        assert costs is not None
        encode, decode = ({way: one.ns for way, one in side.items()} for side in (costs.encode, costs.decode))
        return encode, decode, {way: costs.waking_ns(way) for way in costs.decode}
    encode, decode = dict.fromkeys(_MESSAGE, 0), dict.fromkeys(_MESSAGE, 0)
    if cell.codec_rates is not None:
        rates = DeviceRates(cell.codec_rates.bandwidth_bytes_per_s, cell.codec_rates.operations_per_s)
        workload, parts = text_of(cell), cell.pipeline.microbatches * cell.pipeline.accumulation
        shape = (workload.batch_size // parts, workload.sequence_length, models.hidden_width(workload))
        for way in _MESSAGE:
            ahead, behind = (stage, stage - 1) if way == "forward" else (stage - 1, stage)
            if 0 <= ahead < cell.pipeline.stages - 1:
                encode[way] = _device_ns(cell.codec, ahead, way, shape, rates)[0]
            if 0 <= behind < cell.pipeline.stages - 1:
                decode[way] = _device_ns(cell.codec, behind, way, shape, rates)[1]
    return encode, decode, dict.fromkeys(_MESSAGE, 0)


@functools.cache
def _device_ns(
    codec: str, boundary: int, way: Direction, shape: tuple[int, ...], rates: DeviceRates
) -> tuple[int, int]:
    # The cells of a sweep request the same few again and again.
    return device_codec_ns(placement.parse_placement(codec).at(boundary, way), way, shape, rates)


def steps_to_play(cell: Cell, training: Sequence[Sequence[StepRecord]]) -> list[list[StepRecord]]:
    """Return the steps of a recipe's training to play, by stage: all of them, or the cell's number of steps.

    Beyond the trained steps, these repeat in turn, with continued numbers and without a loss.
    """
    if cell.played_steps is None:
        return [list(records) for records in training]
    wanted, warmup = cell.played_steps, cell.training.warmup_steps
    again = {"loss": None, "gradient_norm": None, "learning_rate": None}
    stages = []
    for records, trained in zip(training, trained_steps(training), strict=True):
        kept = [record for record in records if record.step < wanted + (record.phase != "train")]
        more = [
            trained[step % len(trained)].model_copy(update={"step": step, "warmup": step < warmup, **again})
            for step in range(len(trained), wanted)
        ]
        stages.append(kept + more)
    return stages


def job_of(cell: Cell, training: Sequence[Sequence[StepRecord]], costs: Sequence[StageCosts] | None) -> TracedJob:
    """Return a played cell's job. `training`: the records of its recipe's training, first stage first.

    ResultsError, when the frame is sent, if the records lack a frame of the schedule.
    """
    trained = trained_steps(training)
    job = PipelineJob(orders_of(cell.pipeline), len(trained[0]))
    return TracedJob(
        job,
        [RecordedNode(name, records, job.named) for name, records in zip(job.places, trained, strict=True)],
        stage_cost(cell, costs),
        LABELS,
        {"codec": cell.codec, "model": cell.workload.model, "schedule": cell.pipeline.schedule},
        named=job.named,
    )
