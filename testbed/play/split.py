"""What was played, by step: how long steps took, what each node did meanwhile, and what crossed its links."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Final

from testbed.metrics.steps import over_cycles
from testbed.play.played import Played, PlayedLane
from testbed.play.steady import Repetition
from testbed.play.trace import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.play.unlinked import step_ends

LONGEST_CYCLE: Final = 8
_EXPLAINED = 0.9


def repeated(trace: Trace, times: int) -> Trace:
    """Return a trace that does this one `times` times in a row, with messages and events of its own each time."""
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
    """What a node does in a step, on average. Times are those of its busiest lane."""

    works_ns: float
    waits_for_messages_ns: float
    waits_for_events_ns: float
    sent_bytes: float
    """IP packets."""
    received_bytes: float


@dataclass(frozen=True)
class StepSplit:
    """The steps of one play, without the first ones."""

    first: int
    """The first step that counts."""
    steps_ns: tuple[int, ...]
    nodes: tuple[NodeSplit, ...]
    cycle: int
    """Of so many steps each has a time of its own."""

    @property
    def step_ns(self) -> float:
        """The time of a step: its mean over a whole cycle, and of several cycles the median."""
        return float(median(over_cycles(self.steps_ns, self.cycle)))

    @property
    def sent_bytes(self) -> float:
        """What all nodes send in a step, in IP packets."""
        return sum(node.sent_bytes for node in self.nodes)


def step_split(trace: Trace, played: Played, period: int = 1) -> StepSplit:
    """Take apart what was played. `period`: after how many steps the trace asks for the same again.

    Where steps were proved to repeat, those that do count, by whole periods; else all but the first, in which TCP's
    windows are small. So that none of a period's steps is left out, whole periods of the trace count where there is one
    after the first step.
    """
    ends = step_ends(trace, played.lanes, played.steps)
    count = max(1, played.steps - 1)
    if played.steady is not None:  # perhaps of alike steps at the end of a longer period
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
    """Return after how many steps their durations come again: the shortest cycle that explains nine tenths of their
    variance and was seen three times; 1 where none does.

    The last step has no say, for what is still under way is often received in it.
    """
    seen = steps_ns[:-1]
    for cycle in range(2, min(LONGEST_CYCLE, len(seen) // 3) + 1):
        places = [seen[place::cycle] for place in range(cycle)]
        apart = math.fsum(_scatter(place) for place in places)
        if apart < (1 - _EXPLAINED) * _scatter(seen):
            return cycle
    return 1


def _scatter(values: Sequence[int]) -> float:
    """Return the sum of the squares of what values differ by from their mean."""
    middle = fmean(values)
    return math.fsum((value - middle) ** 2 for value in values)


def seen_to_repeat(trace: Trace, played: Played) -> int | None:
    """Return after how many steps all times of what was played repeat to the nanosecond, and TCP's windows; None where
    they do not.

    It is for traces whose steps overlap: they end with messages under way, so a player cannot prove that they repeat.
    The trace's last step, which receives what is still under way, is left out, and so are steps that were not played.
    """
    steps = min(played.steps, trace.steps - 1)
    shorter = replace(trace, lanes=tuple(replace(lane, starts=lane.starts[: steps + 1]) for lane in trace.lanes))
    repetition, found = Repetition(shorter, played.lanes), None
    for step in range(steps):
        found = repetition.add(step, tuple(state.cwnd_packets for state in played.sockets[step]))
    return None if found is None else found[1]


def drift(trace: Trace, played: Played, cycle: int) -> float:
    """Return how far from settled the steps of a trace are whose steps overlap, as a share of a step.

    Of the last two windows of whole cycles, each of a quarter of the steps or of one cycle: by what share their mean
    steps differ, or, if that is more, by what share of a step messages take longer from step to step. That shows a
    queue that grows, which steps do not feel before workers are as far ahead as they may be. The last step is left out.
    """
    stop = trace.steps - 1
    count = max(1, stop // 4 // cycle) * cycle
    ends = step_ends(trace, played.lanes, stop)
    before, window = range(stop - 2 * count, stop - count), range(stop - count, stop)
    before_ns, step_ns = ((ends[each[-1]] - ends[each[0] - 1]) / count for each in (before, window))
    slower_ns = _message_ns(trace, played, window) - _message_ns(trace, played, before)
    return max(abs(step_ns - before_ns), slower_ns / count) / step_ns


def _message_ns(trace: Trace, played: Played, steps: range) -> float:
    """Return how long messages of these steps took on average, from when their sender had them to their last byte."""
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
