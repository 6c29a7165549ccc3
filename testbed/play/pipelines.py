"""The training of a pipeline as a job that is played: its order, the bytes that were counted, and how long it works.

Evaluations are not played: they keep their losses and take no time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from testbed.codecs.catalogue import placement
from testbed.devices.codec_cost import DeviceRates, device_codec_ns
from testbed.errors import ResultsError, UserError
from testbed.jobs.actions import Action, Decode, Encode, Key, Receive, Sizes, Work
from testbed.jobs.loop import Cost
from testbed.jobs.pipeline import MATHS, MESSAGES, PipelineJob, orders_of
from testbed.jobs.recorder import Named
from testbed.message_key import Direction
from testbed.play.trace import Trace
from testbed.play.tracing import TracedJob
from testbed.records import ActionKind, StageCosts, StepRecord
from testbed.spec import Cell, Paced, Stated, text_of
from testbed.workloads import models

_WAYS: tuple[Direction, ...] = ("forward", "backward")
LABELS = ("decode", "forward", "backward", "encode", "clip", "update", "activation", "gradient", "barrier")
_MESSAGE: dict[Direction, str] = {"forward": MESSAGES["F"], "backward": MESSAGES["B"]}
_WAY: dict[str, Direction] = {what: way for way, what in _MESSAGE.items()}


class StageTimes(NamedTuple):
    """How long one stage works on what, in nanoseconds of the lab."""

    maths_ns: dict[ActionKind, int]
    clip_ns: int
    update_ns: int
    encode_ns: dict[Direction, int]
    """By the direction in which it sends."""
    decode_ns: dict[Direction, int]
    """By the direction from which it came."""
    waking_ns: dict[Direction, int]
    """How much longer decoding takes by a stage that has waited long, by the direction from which it came."""


def needs_calibration(cell: Cell) -> bool:
    """Say whether any of a played cell's durations is this machine's."""
    return not isinstance(cell.compute, Paced | Stated) or cell.codec_cost == "host"


def stage_times(cell: Cell, costs: Sequence[StageCosts] | None) -> list[StageTimes]:
    """Return the durations of a played cell, by stage. `costs` are its recipe's, where `needs_calibration`."""
    if needs_calibration(cell) and costs is None:
        raise UserError(f"cell {cell.id} needs the durations of its recipe, and the calibration has none of it")
    return [_stage_times(cell, stage, None if costs is None else costs[stage]) for stage in range(cell.pipeline.stages)]


def _stage_times(cell: Cell, stage: int, costs: StageCosts | None) -> StageTimes:
    factor = cell.compute.dilation
    if isinstance(cell.compute, Paced):
        forward, backward = ((ns * (stage + 1))[stage] for ns in (cell.compute.forward_ns, cell.compute.backward_ns))
        clip, update = 0, cell.compute.update_ns
    else:
        assert costs is not None
        forward, backward, clip, update = (d.ns for d in (costs.forward, costs.backward, costs.clip, costs.update))

    encode, decode, waking = _codec_ns(cell, stage, costs)
    return StageTimes(
        maths_ns={"F": forward * factor, "B": backward * factor},
        clip_ns=clip * factor,
        update_ns=update * factor,
        encode_ns={way: ns * factor for way, ns in encode.items()},
        decode_ns={way: ns * factor for way, ns in decode.items()},
        waking_ns={way: ns * factor for way, ns in waking.items()},
    )


def _codec_ns(cell: Cell, stage: int, costs: StageCosts | None) -> tuple[dict[Direction, int], ...]:
    """Return how long one stage encodes and decodes a message, and how much longer it decodes when it was woken, by
    direction and by the cell's rule.
    """
    if cell.codec_cost == "host":
        assert costs is not None
        encode, decode = ({way: one.ns for way, one in side.items()} for side in (costs.encode, costs.decode))
        return encode, decode, {way: costs.waking_ns(way) for way in costs.decode}
    encode, decode = dict.fromkeys(_WAYS, 0), dict.fromkeys(_WAYS, 0)
    if cell.codec_rates is not None:
        rates = DeviceRates(cell.codec_rates.bandwidth_bytes_per_s, cell.codec_rates.operations_per_s)
        workload, parts = text_of(cell), cell.pipeline.microbatches * cell.pipeline.accumulation
        shape = (workload.batch_size // parts, workload.sequence_length, models.hidden_width(workload))
        for way in _WAYS:
            ahead, behind = (stage, stage - 1) if way == "forward" else (stage - 1, stage)
            if 0 <= ahead < cell.pipeline.stages - 1:
                encode[way] = _device_ns(cell.codec, ahead, way, shape, rates)[0]
            if 0 <= behind < cell.pipeline.stages - 1:
                decode[way] = _device_ns(cell.codec, behind, way, shape, rates)[1]
    return encode, decode, dict.fromkeys(_WAYS, 0)


@functools.cache
def _device_ns(
    codec: str, boundary: int, way: Direction, shape: tuple[int, ...], rates: DeviceRates
) -> tuple[int, int]:
    # The cells of a sweep ask for the same few over and over.
    return device_codec_ns(placement.parse_placement(codec).at(boundary, way), way, shape, rates)


def steps_to_play(cell: Cell, training: Sequence[Sequence[StepRecord]]) -> list[list[StepRecord]]:
    """Return what is played of a recipe's training, by stage: all of it, or so many steps as the cell says.

    Where that is more than were trained, training steps follow again in turn, numbered on and without a loss.
    """
    if cell.played_steps is None:
        return [list(records) for records in training]
    wanted, warmup = cell.played_steps, cell.training.warmup_steps
    stages = []
    for records in training:
        trained = _trained(records)
        kept = [
            record for record in records if record.step < wanted or (record.phase != "train" and record.step == wanted)
        ]
        again = {"loss": None, "gradient_norm": None, "learning_rate": None}
        more = [
            trained[step % len(trained)].model_copy(update={"step": step, "warmup": step < warmup, **again})
            for step in range(len(trained), wanted)
        ]
        stages.append(kept + more)
    return stages


def job_of(cell: Cell, training: Sequence[Sequence[StepRecord]], costs: Sequence[StageCosts] | None) -> TracedJob:
    """Return a played cell's job: `training` holds the records of its recipe's training, first stage first.

    ResultsError where a frame of the schedule is not in the records, as soon as it is sent.
    """
    pipe, trained = cell.pipeline, [_trained(records) for records in training]
    return TracedJob(
        PipelineJob(orders_of(pipe), len(trained[0])),
        [Sizes(_sizes(stage, records)) for stage, records in enumerate(trained)],
        _cost(stage_times(cell, costs)),
        LABELS,
        {"codec": cell.codec, "model": cell.workload.model, "schedule": pipe.schedule},
        named=lambda key: Named(_WAY[key.what], key.part, with_peer=False),
    )


def trace_of(cell: Cell, training: Sequence[Sequence[StepRecord]], costs: Sequence[StageCosts] | None) -> Trace:
    """Return the trace of a played cell; arguments and errors as in `job_of`."""
    return job_of(cell, training, costs).trace()


def _sizes(stage: int, records: Sequence[StepRecord]) -> Callable[[Key], int]:
    """Return what looks up how large a stage's messages were."""
    frames = [{(_MESSAGE[frame.direction], frame.microbatch): frame.frame_bytes for frame in r.sent} for r in records]

    def size(key: Key) -> int:
        if (found := frames[key.step].get((key.what, key.part))) is None:
            raise ResultsError(
                f"stage {stage}: the training has no {_WAY[key.what]} frame of micro-batch {key.part} in step "
                f"{records[key.step].step}; remove its folder, and the sweep trains it again"
            )
        return found

    return size


def _cost(times: Sequence[StageTimes]) -> Cost:
    works = [
        {**{MATHS[kind]: ns for kind, ns in own.maths_ns.items()}, "clip": own.clip_ns, "update": own.update_ns}
        for own in times
    ]
    encode, decode, waking = (
        [{_MESSAGE[way]: ns for way, ns in own.items()} for own in each]
        for each in ([t.encode_ns for t in times], [t.decode_ns for t in times], [t.waking_ns for t in times])
    )

    def cost(stage: int, action: Action) -> int | None:
        # Not by `match`, which takes three times as long: traces are made of millions of these.
        if isinstance(action, Work):
            return works[stage].get(action.what)
        if isinstance(action, Encode):
            return encode[stage][action.key.what]
        if isinstance(action, Decode):
            return decode[stage][action.messages[0].key.what]
        return waking[stage][action.key.what] if isinstance(action, Receive) else None

    return cost


def _trained(records: Sequence[StepRecord]) -> list[StepRecord]:
    return [record for record in records if record.phase == "train"]
