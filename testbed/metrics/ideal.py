"""The ideal duration of a step: how long it would take if the links did exactly what the profile says.

`ideal_step_s` simulates the events of one recorded step. From the records come the order and the durations of every
stage's actions (decode, compute, encode, update), the bytes of every frame, and the time at which the step was made,
which matters where links vary. Where stages are paced, compute and update last as long as the emulated device takes,
whatever they took here. All waiting for input is replaced by the profile's pipe formula. Losses, jitter, TCP's windows
and queues inside the machine are left out. All times are the lab's own, dilation included.

A wire sends one frame after the other, in the order in which the stage made them. In a line that is all. In a star the
frame then crosses the receiver's downlink, a fluid queue, because the frames of two neighbours arrive there
interleaved: the last bit of a frame leaves when what was queued on its arrival has drained. Between the links, the
first packet is stored and forwarded.

`unshaped_step_s` is the closed form for links that take no time and equally fast stages: the law for both a paced
pipeline on unshaped links and the simulation.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from testbed.errors import ResultsError
from testbed.message_key import Direction
from testbed.metrics.wires import Wire, Wires
from testbed.records import ActionKind, ActionRecord, StepRecord
from testbed.spec import Compute, Measured, Paced, PipelineSpec

MEASURED = Measured()


class _SimulatedFrame(NamedTuple):
    target: int
    """The receiving stage."""
    direction: Direction
    microbatch: int
    frame_bytes: int


class _Action(NamedTuple):
    needs: tuple[Direction, int] | None
    duration_ns: int
    sends: _SimulatedFrame | None


def _asked_ns(paced: Paced, stage: int, kind: ActionKind) -> int:
    """Return how long the maths of an action lasts in the lab."""
    durations = paced.forward_ns if kind == "F" else paced.backward_ns
    return (durations[stage] if len(durations) > 1 else durations[0]) * paced.dilation


def _duration_ns(action: ActionRecord, stage: int, compute: Compute) -> int:
    if not isinstance(compute, Paced):
        return action.encoded_ns - action.input_ns
    codec_ns = action.decoded_ns - action.input_ns + action.encoded_ns - action.computed_ns
    return _asked_ns(compute, stage, action.kind) + codec_ns


def _actions(step: Sequence[StepRecord], compute: Compute) -> list[list[_Action]]:
    """Return the recorded actions of each stage with what they need and send."""
    inside = range(len(step))
    by_stage: list[list[_Action]] = []
    for stage, record in enumerate(step):
        frames = {(sent.direction, sent.microbatch): sent.frame_bytes for sent in record.sent}
        by_stage.append([])
        for action in record.actions:
            way: Direction = "forward" if action.kind == "F" else "backward"
            key = (way, action.microbatch)
            source, target = (stage - 1, stage + 1) if action.kind == "F" else (stage + 1, stage - 1)
            if target in inside and key not in frames:
                raise ResultsError(
                    f"stage {stage}, {record.phase} step {record.step}: there is no record of the {way} frame of "
                    f"micro-batch {action.microbatch}, so the step's ideal duration cannot be computed"
                )
            sends = _SimulatedFrame(target, *key, frames[key]) if target in inside else None
            by_stage[-1].append(_Action(key if source in inside else None, _duration_ns(action, stage, compute), sends))
    return by_stage


class _Downlink:
    """A fluid queue that drains at the wire's rate."""

    def __init__(self, wire: Wire, now: float) -> None:
        self.wire = wire
        self._now = now
        self._bits = 0.0
        self._inflow_bps = 0.0

    def change(self, now: float, *, inflow_bps: float = 0.0, bits: int = 0) -> float:
        """Begin or (negative) end an inflow, or add bits at once; return when all that is queued now will have left."""
        for begin, end, rate_bps, _ in self.wire.stretches(self._now, now):
            self._bits = max(0.0, self._bits + (self._inflow_bps - rate_bps) * (end - begin) / 1e9)
        self._now = now
        self._inflow_bps += inflow_bps
        self._bits += bits
        return self.wire.carried_at(now, self._bits)


_Kind = Literal["free", "done", "flow", "ends", "arrives"]


class _Simulation:
    """Events are (time, number, kind, stage, frame, change of the inflow); the number keeps simultaneous events in
    order.

    Times are nanoseconds since the links were played, as those of the wires.
    """

    def __init__(self, wires: Wires, actions: list[list[_Action]], starts: Sequence[float]) -> None:
        inside = range(len(actions))
        neighbours = [(stage, other) for stage in inside for other in (stage - 1, stage + 1) if other in inside]
        self.paths = {pair: wires.path(*pair) for pair in neighbours}
        self.actions = actions
        self.free: dict[tuple[int, str], float] = {}
        self.reached: dict[tuple[int, str], float] = {}
        """When the last bit that was sent will reach the wire's end."""
        self.downlinks: dict[tuple[int, str], _Downlink] = {}
        self.arrived: list[set[tuple[Direction, int]]] = [set() for _ in actions]
        self.done = [0] * len(actions)
        self.idle = [False] * len(actions)
        self.finished = list(starts)
        self.events: list[tuple[float, int, _Kind, int, _SimulatedFrame | None, float]] = []
        self._number = 0
        self._start = min(starts, default=0.0)
        for stage, start in enumerate(starts):
            self._at(start, "free", stage, None)

    def _at(self, time: float, kind: _Kind, stage: int, frame: _SimulatedFrame | None, change_bps: float = 0.0) -> None:
        self._number += 1
        heapq.heappush(self.events, (time, self._number, kind, stage, frame, change_bps))

    def run(self) -> list[float]:
        """Return when each stage has done its last action."""
        while self.events:
            now, _, kind, stage, frame, change_bps = heapq.heappop(self.events)
            if kind in ("free", "done"):
                self.idle[stage], self.finished[stage] = True, now
                self.done[stage] += kind == "done"
                if frame is not None:
                    self._send(now, stage, frame)
            elif frame is not None and kind == "arrives":
                self.arrived[frame.target].add((frame.direction, frame.microbatch))
                self._work(now, frame.target)
                continue
            elif frame is not None:
                self._forward(now, kind, stage, frame, change_bps)
                continue
            self._work(now, stage)
        for stage, actions in enumerate(self.actions):
            if self.done[stage] < len(actions):
                raise ResultsError(
                    f"the recorded actions of stage {stage} cannot be done in their order: an input never comes"
                )
        return self.finished

    def _work(self, now: float, stage: int) -> None:
        if not self.idle[stage] or self.done[stage] == len(self.actions[stage]):
            return
        action = self.actions[stage][self.done[stage]]
        if action.needs is None or action.needs in self.arrived[stage]:
            self.idle[stage] = False
            self._at(now + action.duration_ns, "done", stage, action.sends)

    def _send(self, now: float, stage: int, frame: _SimulatedFrame) -> None:
        """Let a frame enter the first link of its path."""
        wire, *others = self.paths[stage, frame.target]
        if wire is None:
            return self._at(now, "ends", stage, frame)
        begin = max(now, self.free.get(wire.key, now))
        bits = wire.bits(frame.frame_bytes)
        free = self.free[wire.key] = wire.carried_at(begin, bits)
        stretches = list(wire.stretches(begin, free))
        # Order is kept even while the delay falls, inside a frame too.
        under_way = max(
            self.reached.get(wire.key, -math.inf) - free,
            *(stretch.end_ns - free + stretch.delay_ns for stretch in stretches),
        )
        under_way += wire.late_ns(frame.frame_bytes, free - now)
        end = self.reached[wire.key] = free + under_way
        inflow_bps = 0.0
        if others and others[0] is not None:
            # In bits of the downlink: the two links may count different layers.
            weight = others[0].bits(frame.frame_bytes) / bits
            for stretch in stretches:
                self._at(stretch.begin_ns + under_way, "flow", stage, frame, stretch.rate_bps * weight - inflow_bps)
                inflow_bps = stretch.rate_bps * weight
        return self._at(end, "ends", stage, frame, -inflow_bps)

    def _forward(self, now: float, kind: _Kind, stage: int, frame: _SimulatedFrame, change_bps: float) -> None:
        """Handle the far end of the first link: the frame's flow changes there, or its last bit has arrived."""
        first, *others = self.paths[stage, frame.target]
        second = others[0] if others else None
        if second is None:
            return self._at(now, "arrives", stage, frame)
        downlink = self.downlinks.setdefault(second.key, _Downlink(second, self._start))
        if kind == "flow":
            downlink.change(now, inflow_bps=change_bps)
            return None
        bits = second.bits(frame.frame_bytes)
        if first is None:
            served = downlink.change(now, bits=bits)
        else:
            served = downlink.change(now, inflow_bps=change_bps)
            served += min(second.packet_bits, bits) * 1e9 / max(first.rate_at(now), second.rate_at(served))
        due = served + second.delay_at(served) + second.late_ns(frame.frame_bytes, served - now)
        end = self.reached[second.key] = max(due, self.reached.get(second.key, -math.inf))
        return self._at(end, "arrives", stage, frame)


def ideal_step_s(
    wires: Wires,
    step: Sequence[StepRecord],
    free_ns: Sequence[int] | None = None,
    compute: Compute = MEASURED,
) -> float:
    """Simulate one recorded step and return its ideal duration, in seconds of the lab.

    `step` holds one record per stage, first stage first. `free_ns` says when each stage could begin; the duration
    counts from the latest of these moments (a stage that is free earlier has a head start, as it had in the run). None:
    all begin together, which paced stages do in any case. `compute` is the cell's.

    After the actions comes the moment at which all stages know the gradient norm, as long after the last stage's
    actions as in the run, then each stage's own update; where stages are paced, both together last as long as the
    update that was asked for. ResultsError when the records are inconsistent.
    """
    if free_ns is None or isinstance(compute, Paced):
        free_ns = [min(record.start_ns for record in step) if free_ns is None else max(free_ns)] * len(step)
    # Numbers are kept small, so that floats are exact to a fraction of a nanosecond; varying links count from their
    # start.
    zero = max(free_ns) if wires.played_at_ns is None else wires.played_at_ns
    origin = float(max(free_ns) - zero)
    finished = _Simulation(wires, _actions(step, compute), [float(start_ns - zero) for start_ns in free_ns]).run()
    last = max(finished) - origin
    actions_end = [record.optimiser_start_ns for record in step if record.optimiser_start_ns is not None]
    norm_known = [record.synchronised_ns for record in step if record.synchronised_ns is not None]
    if len(actions_end) < len(step) or len(norm_known) < len(step):
        return last / 1e9
    if isinstance(compute, Paced):
        return (last + compute.update_ns * compute.dilation) / 1e9
    update_begins = last + max(0, min(norm_known) - max(actions_end))
    return max(update_begins + record.end_ns - known for record, known in zip(step, norm_known, strict=True)) / 1e9


def unshaped_step_s(pipeline: PipelineSpec, *, forward_s: float, backward_s: float, update_s: float = 0.0) -> float:
    """Return a step's seconds: `accumulation * (microbatches + stages - 1) * (forward_s + backward_s) + update_s`.

    It is the same for gpipe (Huang et al. 2019, section 2.3) and 1f1b (Narayanan et al. 2021, section 2.2), which
    differ in what they hold in memory. Passes do not overlap: the first stage, with which a pass begins, is the last to
    end it. With fewer micro-batches in flight than stages 1f1b may also wait within a pass, and this is only a lower
    bound.
    """
    rounds = pipeline.accumulation * (pipeline.microbatches + pipeline.stages - 1)
    return rounds * (forward_s + backward_s) + update_s
