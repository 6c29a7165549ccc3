"""Breaks played times down by step: durations of steps, each node's work and waits, and traffic on its links."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Final

from testbed.metrics.steps import over_cycles
from testbed.player.steady import Repetition
from testbed.trace.format import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.trace.played import Played, PlayedLane
from testbed.trace.simulate import step_ends

LONGEST_CYCLE: Final = 8
_EXPLAINED = 0.9


def repeated(trace: Trace, times: int) -> Trace:
    """Return a trace that repeats this one `times` times, with separate messages and events each time."""
    tags, events = (
        1 + max((tag for lane in trace.lanes for tag in _tags(lane, of)), default=0) for of in (False, True)
    )
    lanes = []
    for lane in trace.lanes:
        longer = Lane(lane.node, lane.name)
        for time in range(times):
            first = len(longer)
            for name in ("kind", "label", "peer", "value"):
                getattr(longer, name).extend(getattr(lane, name))
            moves = {WORK: 0, SIGNAL: events * time, WAIT: events * time}
            moved = (tag + moves.get(kind, tags * time) for kind, tag in zip(lane.kind, lane.tag, strict=True))
            longer.tag.extend(array("I", moved))
            longer.starts.extend(first + start for start in lane.starts[1:])
        lanes.append(longer)
    return Trace(trace.nodes, trace.labels, tuple(lanes), {**trace.about, "repeated": times})


def _tags(lane: Lane, events: bool) -> list[int]:
    return [tag for kind, tag in zip(lane.kind, lane.tag, strict=True) if (kind in (SIGNAL, WAIT)) == events]


@dataclass(frozen=True)
class NodeSplit:
    """Averages of a node per step. Times are those of its busiest lane."""

    works_ns: float
    waits_for_messages_ns: float
    waits_for_events_ns: float
    sent_bytes: float
    """Size of its IP packets."""
    received_bytes: float


@dataclass(frozen=True)
class StepSplit:
    """The measured steps of one play."""

    first: int
    """First measured step."""
    steps_ns: tuple[int, ...]
    nodes: tuple[NodeSplit, ...]
    cycle: int
    """Number of steps after which step times repeat."""

    @property
    def step_ns(self) -> float:
        """The step time: the mean over a cycle, and the median over several cycles."""
        return float(median(over_cycles(self.steps_ns, self.cycle)))

    @property
    def sent_bytes(self) -> float:
        """Bytes of IP packets sent per step by all nodes."""
        return sum(node.sent_bytes for node in self.nodes)


def step_split(trace: Trace, played: Played, period: int = 1) -> StepSplit:
    """Break down a play. `period`: number of steps after which the trace repeats.

    If steps provably repeat, the repeating ones are measured, in whole periods; otherwise all but the first, in which
    TCP's windows are small. If there is a whole period of the trace after the first step, only whole periods are
    measured, so that every step of a period is included.
    """
    ends = step_ends(trace, played.lanes, played.steps)
    count = max(1, played.steps - 1)
    if played.steady is not None:  # possibly of equal steps at the end of a longer period
        count = min(count, math.lcm(played.steady[1], period))
    first = played.steps - (count // period * period or count)
    steps = range(first, played.steps)
    spans = [ends[step] - (ends[step - 1] if step else 0) for step in steps]
    nodes = []
    for node in range(len(trace.nodes)):
        lanes = [(lane, times) for lane, times in zip(trace.lanes, played.lanes, strict=True) if lane.node == node]
        busiest = max((_times(lane, times, steps) for lane, times in lanes), default=(0, 0, 0))
        counted = [step[node] for step in played.counters]
        before = counted[first - 1] if first else None
        works, messages, events = (ns / len(steps) for ns in busiest)
        nodes.append(
            NodeSplit(
                works_ns=works,
                waits_for_messages_ns=messages,
                waits_for_events_ns=events,
                sent_bytes=(counted[-1].sent_bytes - (before.sent_bytes if before else 0)) / len(steps),
                received_bytes=(counted[-1].received_bytes - (before.received_bytes if before else 0)) / len(steps),
            )
        )
    proved = len(spans) if played.steady is not None else 0
    cycle = proved or (period if period > 1 else find_cycle(spans))
    return StepSplit(first, tuple(spans), tuple(nodes), cycle)


def find_cycle(steps_ns: Sequence[int]) -> int:
    """Return the number of steps after which durations repeat: the shortest cycle that explains nine tenths of their
    variance and occurred three times; 1 if there is none.

    The last step is ignored, because it often receives messages still in flight.
    """
    seen = steps_ns[:-1]
    for cycle in range(2, min(LONGEST_CYCLE, len(seen) // 3) + 1):
        places = [seen[place::cycle] for place in range(cycle)]
        apart = math.fsum(_scatter(place) for place in places)
        if apart < (1 - _EXPLAINED) * _scatter(seen):
            return cycle
    return 1


def _scatter(values: Sequence[int]) -> float:
    """Return the sum of squared deviations from the mean."""
    middle = fmean(values)
    return math.fsum((value - middle) ** 2 for value in values)


def seen_to_repeat(trace: Trace, played: Played) -> int | None:
    """Return the number of steps after which all played times repeat to the nanosecond, and TCP's windows too; None if
    they do not.

    For traces whose steps overlap: they end with messages in flight, so a player cannot prove that they repeat. The
    trace's last step, which receives these messages, is ignored, as are steps that were not played.
    """
    steps = min(played.steps, trace.steps - 1)
    shorter = replace(trace, lanes=tuple(replace(lane, starts=lane.starts[: steps + 1]) for lane in trace.lanes))
    repetition, repeated = Repetition(shorter, played.lanes), None
    for step in range(steps):
        repeated = repetition.add(step, tuple(state.cwnd_packets for state in played.sockets[step]))
    return None if repeated is None else repeated[1]


def drift(trace: Trace, played: Played, cycle: int) -> float:
    """Return the drift of overlapping steps, as a share of a step.

    Compares the last two windows of whole cycles, each a quarter of the steps or one cycle: returns the relative
    difference of their mean steps or, if larger, the increase of message times per step as a share of a step. The
    latter shows a growing queue, which slows steps only once workers are as far ahead as allowed. The last step is
    ignored.
    """
    stop = trace.steps - 1
    count = max(1, stop // 4 // cycle) * cycle
    ends = step_ends(trace, played.lanes, stop)
    before, window = range(stop - 2 * count, stop - count), range(stop - count, stop)
    before_ns, step_ns = ((ends[each[-1]] - ends[each[0] - 1]) / count for each in (before, window))
    slower_ns = _message_ns(trace, played, window) - _message_ns(trace, played, before)
    return max(abs(step_ns - before_ns), slower_ns / count) / step_ns


def _message_ns(trace: Trace, played: Played, steps: range) -> float:
    """Return the mean duration of the messages of these steps, from their hand-over to the arrival of the last byte."""
    sent: dict[tuple[int, int, int], int] = {}
    came: dict[tuple[int, int, int], int] = {}
    for lane, times in zip(trace.lanes, played.lanes, strict=True):
        for at in range(lane.starts[steps.start], len(times.begin_ns)):
            if lane.kind[at] == SEND and at < lane.starts[steps.stop]:
                sent[lane.node, lane.peer[at], lane.tag[at]] = times.begin_ns[at]
            elif lane.kind[at] == RECEIVE:
                came[lane.peer[at], lane.node, lane.tag[at]] = times.last_byte_ns[at]
    return fmean(came[message] - sent[message] for message in sent) if sent else 0.0


def _times(lane: Lane, times: PlayedLane, steps: Sequence[int]) -> tuple[int, int, int]:
    """Sum a lane's time at work, waiting for messages and waiting for events."""
    sums = {WORK: 0, RECEIVE: 0, WAIT: 0}
    for at in range(lane.starts[steps[0]], lane.starts[steps[-1] + 1]):
        if lane.kind[at] in sums:
            sums[lane.kind[at]] += times.end_ns[at] - times.begin_ns[at]
    return sums[WORK], sums[RECEIVE], sums[WAIT]
