"""A training becomes a trace, and what a player wrote becomes the records of a run.

What a stage does in a step: for each action wait for its input, decode it, compute, encode the output and hand it over;
then clip, wait until every stage is there, and update. It is what `pipeline.train` does. Evaluations are not played:
they keep their losses and take no time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from testbed.codecs.catalogue import placement
from testbed.devices.codec_cost import DeviceRates, device_codec_ns
from testbed.errors import ResultsError, UserError
from testbed.message_key import Direction
from testbed.play.played import Played, PlayedLane, SocketState
from testbed.play.trace import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.records import (
    ActionKind,
    ActionRecord,
    CountersRecord,
    ReceivedRecord,
    SentRecord,
    SocketRecord,
    StageCosts,
    StepRecord,
)
from testbed.spec import Cell, Paced, text_of
from testbed.workloads import models

_WAYS: tuple[Direction, ...] = ("forward", "backward")
LABELS = ("decode", "forward", "backward", "encode", "clip", "update", "activation", "gradient")
_LABEL = {name: number for number, name in enumerate(LABELS)}
_MATHS: dict[ActionKind, int] = {"F": _LABEL["forward"], "B": _LABEL["backward"]}
_SENT = {"forward": _LABEL["activation"], "backward": _LABEL["gradient"]}


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


class _Ends(NamedTuple):
    """Where an action's input comes from and its output goes; None where there is none."""

    direction: Direction
    source: int | None
    target: int | None


def needs_calibration(cell: Cell) -> bool:
    """Say whether any of a played cell's durations is this machine's."""
    return not isinstance(cell.compute, Paced) or cell.codec_cost == "host"


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


def trace_of(cell: Cell, training: Sequence[Sequence[StepRecord]], costs: Sequence[StageCosts] | None) -> Trace:
    """Return the trace of a cell: `training` holds the records of its recipe's training, first stage first.

    ResultsError where a frame of the schedule is not in the records.
    """
    lanes = tuple(
        _lane(cell, stage, records, times)
        for stage, (records, times) in enumerate(zip(training, stage_times(cell, costs), strict=True))
    )
    return Trace(
        nodes=cell.node_names,
        labels=LABELS,
        lanes=lanes,
        about={"codec": cell.codec, "model": cell.workload.model, "schedule": cell.pipeline.schedule},
    )


def _lane(cell: Cell, stage: int, records: Sequence[StepRecord], times: StageTimes) -> Lane:
    lane, stages = Lane(stage, "compute"), cell.pipeline.stages
    parts = cell.pipeline.microbatches * cell.pipeline.accumulation
    for number, record in enumerate(_trained(records)):
        sent = {(frame.direction, frame.microbatch): frame for frame in record.sent}
        for action in record.actions:
            ends, tag = _ends(action.kind, stage, stages), number * parts + action.microbatch
            if ends.source is not None:
                waking_ns = times.waking_ns[ends.direction]
                lane.add(RECEIVE, label=_SENT[ends.direction], peer=ends.source, tag=tag, value=waking_ns)
                lane.add(WORK, label=_LABEL["decode"], value=times.decode_ns[ends.direction])
            lane.add(WORK, label=_MATHS[action.kind], value=times.maths_ns[action.kind])
            if ends.target is not None:
                frame = sent.get((ends.direction, action.microbatch))
                if frame is None:
                    raise ResultsError(
                        f"stage {stage}: the training has no {ends.direction} frame of micro-batch "
                        f"{action.microbatch} in step {record.step}; remove its folder, and the sweep trains it again"
                    )
                lane.add(WORK, label=_LABEL["encode"], value=times.encode_ns[ends.direction])
                lane.add(SEND, label=_SENT[ends.direction], peer=ends.target, tag=tag, value=frame.frame_bytes)
        lane.add(WORK, label=_LABEL["clip"], value=times.clip_ns)
        lane.add(SIGNAL, tag=number)
        lane.add(WAIT, tag=number, value=stages)
        lane.add(WORK, label=_LABEL["update"], value=times.update_ns)
        lane.end_step()
    return lane


def _ends(kind: ActionKind, stage: int, stages: int) -> _Ends:
    before = stage - 1 if stage > 0 else None
    after = stage + 1 if stage < stages - 1 else None
    return _Ends("forward", before, after) if kind == "F" else _Ends("backward", after, before)


def _trained(records: Sequence[StepRecord]) -> list[StepRecord]:
    return [record for record in records if record.phase == "train"]


# ---------------------------------------------------------------------- from what was played
def records_of(cell: Cell, played: Played, training: Sequence[Sequence[StepRecord]]) -> list[list[StepRecord]]:
    """Return the records of a played run, by stage: the training's, at the times of the player.

    `played` has every step of the training, or the first ones. Where the cell has a time budget, what follows the step
    that reaches it is left out, but for the evaluation that the training made there.
    """
    stages = [_stage_records(cell, stage, played, records) for stage, records in enumerate(training)]
    budget_s = cell.training.budget_s
    if budget_s is None:
        return stages
    budget_ns = budget_s * 1e9 * cell.compute.dilation
    kept, ended = 0, False
    for together in zip(*stages, strict=True):
        trains = together[0].phase == "train"
        if ended and trains:
            break
        kept += 1
        ended = ended or (trains and max(r.synchronised_ns or 0 for r in together) >= budget_ns)
    return [records[:kept] for records in stages]


def _stage_records(cell: Cell, stage: int, played: Played, training: Sequence[StepRecord]) -> list[StepRecord]:
    lane, at, number, now = played.lanes[stage], 0, 0, 0
    crossed: dict[str, Any] = {"counters": None, "sockets": ()}
    made: list[StepRecord] = []
    for record in training:
        if record.phase != "train":
            still = {"start_ns": now, "end_ns": now, "actions": (), "sent": (), "received": ()}
            made.append(record.model_copy(update=still | crossed))
            continue
        if number == played.steps:
            break
        one, at = _step(cell, stage, record, lane, at)
        now = one.end_ns
        crossed = {
            "counters": CountersRecord(**vars(played.counters[number][stage])),
            "sockets": tuple(_socket(state) for state in played.sockets[number] if state.node == stage),
        }
        made.append(one.model_copy(update=crossed))
        number += 1
    return made


def _step(cell: Cell, stage: int, record: StepRecord, lane: PlayedLane, at: int) -> tuple[StepRecord, int]:
    """Return one step's record with the player's times, and where the next step begins in the lane's columns."""
    frames = {(frame.direction, frame.microbatch): frame for frame in record.sent}
    came = {(frame.direction, frame.microbatch): frame for frame in record.received}
    begin_ns, end_ns, start_ns = lane.begin_ns, lane.end_ns, lane.begin_ns[at]
    actions: list[ActionRecord] = []
    sent: list[SentRecord] = []
    received: list[ReceivedRecord] = []
    for action in record.actions:
        ends, key = _ends(action.kind, stage, cell.pipeline.stages), action.microbatch
        asked_ns = input_ns = decoded_ns = begin_ns[at]
        if ends.source is not None:
            input_ns, decoded_ns = end_ns[at], end_ns[at + 1]
            frame = {"first_byte_ns": lane.first_byte_ns[at], "last_byte_ns": lane.last_byte_ns[at]}
            received.append(came[ends.direction, key].model_copy(update=frame))
            at += 2
        computed_ns = encoded_ns = end_ns[at]
        at += 1
        if ends.target is not None:
            encoded_ns = end_ns[at]
            at += 1
            times = {
                "queued_ns": begin_ns[at],
                "first_byte_ns": lane.first_byte_ns[at],
                "last_byte_ns": lane.last_byte_ns[at],
            }
            sent.append(frames[ends.direction, key].model_copy(update=times))
            at += 1
        actions.append(
            ActionRecord(
                kind=action.kind,
                microbatch=key,
                asked_ns=asked_ns,
                input_ns=input_ns,
                decoded_ns=decoded_ns,
                computed_ns=computed_ns,
                encoded_ns=encoded_ns,
            )
        )
    changes = {
        "start_ns": start_ns,
        "optimiser_start_ns": begin_ns[at],
        "synchronised_ns": end_ns[at + 2],
        "end_ns": end_ns[at + 3],
        "actions": tuple(actions),
        "sent": tuple(sent),
        "received": tuple(received),
    }
    return record.model_copy(update=changes), at + 4


def _socket(state: SocketState) -> SocketRecord:
    about = {name: value for name, value in vars(state).items() if name not in ("node", "peer")}
    return SocketRecord(peer="downstream" if state.peer > state.node else "upstream", **about)
