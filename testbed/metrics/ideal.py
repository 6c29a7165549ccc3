"""How long a step would take if the links did exactly what the profile says: an event simulation of one step.

Taken from the records: the order and the durations of every stage's actions (decode, compute, encode, update) and the bytes
of every frame. Replaced by the profile's pipe formula: all waiting for input. Left out: losses, TCP's windows, queues inside
the machine.

A frame crosses the sender's uplink and then the receiver's downlink. The uplink sends one frame after the other, in the order
in which the stage made them. The downlink is a fluid queue, because the frames of two neighbours arrive there interleaved: the
last bit of a frame leaves when what was queued on its arrival has drained. Between the two links, the first packet is stored
and forwarded.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple

from testbed.errors import ResultsError
from testbed.records import StepRecord
from testbed.spec import Direction, LinkProfile, Pipe

HEADER_BYTES = 52
"""IPv4 (20) and TCP with timestamps (32), on every packet."""
ETHERNET_BYTES = 14
"""What a profile whose layer is `ethernet` counts on top of each packet."""


def wire_bytes(frame_bytes: int, profile: LinkProfile) -> int:
    """What a frame weighs on the profile's layer: the frame and the headers of its packets."""
    packets = -(-frame_bytes // (profile.mtu - HEADER_BYTES))
    return frame_bytes + packets * (HEADER_BYTES + (ETHERNET_BYTES if profile.layer == "ethernet" else 0))


class _Frame(NamedTuple):
    target: int
    """The receiving stage."""
    direction: Direction
    microbatch: int
    bits: int


class _Action(NamedTuple):
    needs: tuple[Direction, int] | None
    duration_ns: int
    sends: _Frame | None


def _actions(step: Sequence[StepRecord], profile: LinkProfile) -> list[list[_Action]]:
    """The recorded actions of each stage with what they need and send."""
    inside = range(len(step))
    found: list[list[_Action]] = []
    for stage, record in enumerate(step):
        frames = {(sent.direction, sent.microbatch): sent.frame_bytes for sent in record.sent}
        found.append([])
        for action in record.actions:
            way: Direction = "forward" if action.kind == "F" else "backward"
            key = (way, action.microbatch)
            source, target = (stage - 1, stage + 1) if action.kind == "F" else (stage + 1, stage - 1)
            if target in inside and key not in frames:
                raise ResultsError(
                    f"stage {stage}, {record.phase} step {record.step}: there is no record of the {way} frame of micro-batch "
                    f"{action.microbatch}, so the step's ideal duration cannot be computed"
                )
            sends = _Frame(target, *key, 8 * wire_bytes(frames[key], profile)) if target in inside else None
            found[-1].append(_Action(key if source in inside else None, action.encoded_ns - action.input_ns, sends))
    return found


class _Downlink:
    """A fluid queue that drains at the pipe's rate. Times in nanoseconds."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self._now = 0.0
        self._bits = 0.0
        self._inflow_bps = 0

    def _advance(self, now: float) -> None:
        gained = (self._inflow_bps - self.pipe.rate_bps) * (now - self._now) / 1e9
        self._bits, self._now = max(0.0, self._bits + gained), now

    def change(self, now: float, *, inflow_bps: int = 0, bits: int = 0) -> float:
        """An inflow begins or (negative) ends, or bits arrive at once. Returns when all that is queued now will have left."""
        self._advance(now)
        self._inflow_bps += inflow_bps
        self._bits += bits
        return now + self._bits * 1e9 / self.pipe.rate_bps


class _Simulation:
    """Events are (time, number, kind, stage, frame); the number keeps simultaneous events in the order of their making."""

    def __init__(self, profile: LinkProfile, actions: list[list[_Action]], starts: Sequence[float]) -> None:
        self.up = profile.up
        self.packet_bits = 8 * (profile.mtu + (ETHERNET_BYTES if profile.layer == "ethernet" else 0))
        self.actions = actions
        self.uplink_free = list(starts)
        self.downlinks = [None if profile.down is None else _Downlink(profile.down) for _ in actions]
        self.arrived: list[set[tuple[Direction, int]]] = [set() for _ in actions]
        self.done = [0] * len(actions)
        self.idle = [False] * len(actions)
        self.finished = list(starts)
        self.events: list[tuple[float, int, Literal["free", "done", "begins", "ends", "arrives"], int, _Frame | None]] = []
        self._number = 0
        for stage, start in enumerate(starts):
            self._at(start, "free", stage, None)

    def _at(
        self, time: float, kind: Literal["free", "done", "begins", "ends", "arrives"], stage: int, frame: _Frame | None
    ) -> None:
        self._number += 1
        heapq.heappush(self.events, (time, self._number, kind, stage, frame))

    def run(self) -> list[float]:
        """When each stage has done its last action."""
        while self.events:
            now, _, kind, stage, frame = heapq.heappop(self.events)
            if kind in ("free", "done"):
                self.idle[stage], self.finished[stage] = True, now
                self.done[stage] += kind == "done"
                if frame is not None:
                    self._send(now, stage, frame)
            elif frame is not None:
                self._receive(now, kind, stage, frame)
            self._work(now, stage)
        for stage, actions in enumerate(self.actions):
            if self.done[stage] < len(actions):
                raise ResultsError(f"the recorded actions of stage {stage} cannot be done in their order: an input never comes")
        return self.finished

    def _work(self, now: float, stage: int) -> None:
        if not self.idle[stage] or self.done[stage] == len(self.actions[stage]):
            return
        action = self.actions[stage][self.done[stage]]
        if action.needs is None or action.needs in self.arrived[stage]:
            self.idle[stage] = False
            self._at(now + action.duration_ns, "done", stage, action.sends)

    def _send(self, now: float, stage: int, frame: _Frame) -> None:
        if self.up is None:
            self._at(now, "ends", frame.target, frame)
            return
        begin = max(now, self.uplink_free[stage])
        self.uplink_free[stage] = begin + frame.bits * 1e9 / self.up.rate_bps
        self._at(begin + self.up.delay_ns, "begins", frame.target, frame)
        self._at(self.uplink_free[stage] + self.up.delay_ns, "ends", frame.target, frame)

    def _receive(self, now: float, kind: str, stage: int, frame: _Frame) -> None:
        """The frame's first or last bit reaches the receiver's downlink, or the frame is there."""
        downlink, up = self.downlinks[stage], self.up
        if kind == "arrives":
            self.arrived[stage].add((frame.direction, frame.microbatch))
        elif kind == "begins":
            if downlink is not None and up is not None:
                downlink.change(now, inflow_bps=up.rate_bps)
        elif downlink is None:
            self._at(now, "arrives", stage, frame)
        elif up is None:
            self._at(downlink.change(now, bits=frame.bits) + downlink.pipe.delay_ns, "arrives", stage, frame)
        else:
            served = downlink.change(now, inflow_bps=-up.rate_bps)
            forwarded = served + min(self.packet_bits, frame.bits) * 1e9 / max(up.rate_bps, downlink.pipe.rate_bps)
            self._at(forwarded + downlink.pipe.delay_ns, "arrives", stage, frame)


def ideal_step_s(profile: LinkProfile, step: Sequence[StepRecord], free_ns: Sequence[int] | None = None) -> float:
    """The ideal duration of one recorded step, in seconds.

    `step` holds one record per stage, first stage first. `free_ns` says when each stage could begin; the duration counts from
    the latest of them (a stage that is free earlier has a head start, as it had in the run); None: all begin together.
    After the actions comes the moment at which all stages know the gradient norm, as long after the last stage's actions as it
    was in the run, then each stage's own update. ResultsError when the records do not hold together.
    """
    origin = 0 if free_ns is None else max(free_ns)
    starts = [0.0] * len(step) if free_ns is None else [float(free - origin) for free in free_ns]
    finished = _Simulation(profile, _actions(step, profile), starts).run()
    actions_end = [record.optimiser_start_ns for record in step if record.optimiser_start_ns is not None]
    norm_known = [record.synchronised_ns for record in step if record.synchronised_ns is not None]
    if len(actions_end) < len(step) or len(norm_known) < len(step):
        return max(finished) / 1e9
    update_begins = max(finished) + max(0, min(norm_known) - max(actions_end))
    return max(update_begins + record.end_ns - known for record, known in zip(step, norm_known, strict=True)) / 1e9
