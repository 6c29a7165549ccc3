"""Detects during play that steps repeat, and computes exactly what the remaining steps would have been.

The signature of a step is everything observed in it, relative to its beginning: the times of all operations and
messages, the counters of every node's devices, and the kernel's state of every connection at its end (windows,
thresholds, round-trip times, timeouts). On a clock that depends only on the lab, a step that has the same work and
messages as the previous one, and begins in the same state, is identical. The state includes the phase of the kernel's
ticks, so the player begins every step at the same phase.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Final

from testbed.trace.format import RECEIVE, SEND, SIGNAL, WAIT, Lane, Trace
from testbed.trace.played import NodeCounters, Played, PlayedLane, SocketState

LONGEST_PERIOD: Final = 8
REPEATS: Final = 3
"""Number of whole periods that must be observed."""

_TOTALS = ("bytes_sent", "bytes_retransmitted", "segments_out", "segments_in", "retransmits")


class Repetition:
    """Detects steps that repeat."""

    def __init__(self, trace: Trace, times: Sequence[PlayedLane]) -> None:
        """`times`: by lane, growing during play."""
        self._trace, self._times = trace, times
        self._signatures: list[Any] = []
        self._begin_ns = 0
        self._since_ns: list[int] = []  # from the step before
        self._same_from: dict[int, int] = {}  # by period: first step from which the trace itself repeats

    def add(self, step: int, seen: object | None) -> tuple[int, int] | None:
        """Add a step that has ended. Returns (first, period) once steps provably repeat.

        `seen`: further hashable state that must repeat; None: this step cannot be compared.
        """
        begin_ns = _begins(self._trace.lanes, self._times, step)
        times = tuple(_relative(*each, step, begin_ns) for each in zip(self._trace.lanes, self._times, strict=True))
        self._since_ns.append(begin_ns - self._begin_ns)
        self._begin_ns = begin_ns
        self._signatures.append(hash((times, seen)) if seen is not None else object())
        return self._proved(step)

    def _proved(self, step: int) -> tuple[int, int] | None:
        for period in range(1, LONGEST_PERIOD + 1):
            first = step + 1 - period * REPEATS
            if first < 0:
                return None
            if all(self._alike(s, period, s > first) for s in range(first, step + 1 - period)):
                if period not in self._same_from:
                    self._same_from[period] = trace_repeats_from(self._trace, period)
                earliest = self._same_from[period]
                if first >= earliest:
                    while (
                        first > earliest and self._alike(first - 1, period, False) and self._alike(first, period, True)
                    ):
                        first -= 1
                    return first, period
        return None

    def _alike(self, step: int, period: int, since: bool) -> bool:
        """Return whether a step and the one a period later are identical; with `since`, also the gaps between each and
        its previous step.
        """
        same = bool(self._signatures[step] == self._signatures[step + period])
        return same and (not since or self._since_ns[step] == self._since_ns[step + period])


def _relative(lane: Lane, times: PlayedLane, step: int, begin_ns: int) -> bytes:
    part = slice(lane.starts[step], lane.starts[step + 1])
    moments = [ns - begin_ns for column in (times.begin_ns, times.end_ns) for ns in column[part]]
    bytes_ns = [ns for column in (times.first_byte_ns, times.last_byte_ns) for ns in column[part]]
    return array("q", moments + [ns - begin_ns if ns else -1 for ns in bytes_ns]).tobytes()


def trace_repeats_from(trace: Trace, period: int) -> int:
    """Return the first step from which the operations of the trace repeat with `period`, up to its end; the number of
    steps if there is none.
    """
    shapes = _StepShapes(trace)
    step = trace.steps - 1
    later: dict[int, Any] = {}
    while step >= 0:
        shape = shapes.of(step)
        if step + period < trace.steps and later.pop(step + period) != shape:
            return step + 1
        later[step] = shape
        step -= 1
    return 0


class _StepShapes:
    """Normal forms of the operations of steps, in which identical steps compare equal: tags are numbered by their first
    occurrence, counts are relative to those before the step.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._born: dict[tuple[int, ...], tuple[int, int]] = {}  # message: the step, and its number there
        self._signalled: list[dict[int, int]] = [{}]
        for step in range(trace.steps):
            counts = dict(self._signalled[-1])
            number = 0
            for lane in trace.lanes:
                for i in range(lane.starts[step], lane.starts[step + 1]):
                    kind = lane.kind[i]
                    if kind == SEND:
                        self._born[lane.node, lane.peer[i], lane.tag[i]] = (step, number)
                        number += 1
                    elif kind == SIGNAL:
                        counts[lane.tag[i]] = counts.get(lane.tag[i], 0) + 1
            self._signalled.append(counts)

    def of(self, step: int) -> Any:
        """Return the shape of a step."""
        before, events = self._signalled[step], dict[int, int]()
        columns: list[Any] = []
        for lane in self._trace.lanes:
            start, stop = lane.starts[step], lane.starts[step + 1]
            columns += [lane.kind[start:stop].tobytes(), lane.peer[start:stop].tobytes()]
            values, tags = lane.value[start:stop], array("q", bytes(8 * (stop - start)))
            for place, i in enumerate(range(start, stop)):
                kind = lane.kind[i]
                if kind in (SEND, RECEIVE):
                    ends = (lane.node, lane.peer[i]) if kind == SEND else (lane.peer[i], lane.node)
                    born, number = self._born.get((*ends, lane.tag[i]), (step, -1))
                    tags[place] = (step - born) << 32 | (number & 0xFFFFFFFF)
                elif kind in (SIGNAL, WAIT):
                    tags[place] = events.setdefault(lane.tag[i], len(events))
                    if kind == WAIT:
                        values[place] -= before.get(lane.tag[i], 0)
            columns += [values.tobytes(), tags.tobytes()]
        return hash(tuple(columns))


def extended(played: Played, trace: Trace, steps: int | None = None) -> Played:
    """Return the result of playing `steps` steps of the trace (None: all), extrapolated from steps that provably
    repeat.

    The result has `steps` steps with exact times and totals. A play that is long enough is returned unchanged;
    AssertionError if steps are missing without a proof.
    """
    steps = trace.steps if steps is None else steps
    if steps <= played.steps:
        return played
    assert played.steady is not None, "steps that do not repeat cannot be extended"
    _, period = played.steady
    last = played.steps - period  # the last fully played period begins here
    length_ns = _begins(trace.lanes, played.lanes, last) - _begins(trace.lanes, played.lanes, last - period)
    sources = [(last + (step - last) % period, (step - last) // period) for step in range(played.steps, steps)]
    lanes = []
    for lane, times in zip(trace.lanes, played.lanes, strict=True):
        longer = copy.deepcopy(times)
        for source, turns in sources:
            part = slice(lane.starts[source], lane.starts[source + 1])
            kinds = lane.kind[part]
            for name in ("begin_ns", "end_ns"):
                getattr(longer, name).extend(ns + turns * length_ns for ns in getattr(times, name)[part])
            for name in ("first_byte_ns", "last_byte_ns"):
                moved = (
                    ns + turns * length_ns if kind in (SEND, RECEIVE) else 0
                    for ns, kind in zip(getattr(times, name)[part], kinds, strict=True)
                )
                getattr(longer, name).extend(moved)
        lanes.append(longer)
    counters, sockets = list(played.counters), list(played.sockets)
    for source, turns in sources:
        gained = difference(counters[last - 1 + period], counters[last - 1])
        counters.append(_sum(played.counters[source], gained, turns))
        sockets.append(
            tuple(
                _later(at, end, begin, turns)
                for at, end, begin in zip(
                    played.sockets[source], sockets[last - 1 + period], sockets[last - 1], strict=True
                )
            )
        )
    return replace(played, steps=steps, lanes=tuple(lanes), counters=counters, sockets=sockets)


def _begins(lanes: Sequence[Lane], played: Sequence[PlayedLane], step: int) -> int:
    """Return the beginning of a step: when the first lane with operations in it reaches them."""
    starts = ((lane.starts[step], lane.starts[step + 1], times) for lane, times in zip(lanes, played, strict=True))
    return min((times.begin_ns[begin] for begin, end, times in starts if end > begin), default=0)


def difference(later: Sequence[NodeCounters], earlier: Sequence[NodeCounters]) -> tuple[NodeCounters, ...]:
    """Return the difference of two readings of counters."""
    return _sum(later, earlier, -1)


def _sum(first: Sequence[NodeCounters], second: Sequence[NodeCounters], times: int) -> tuple[NodeCounters, ...]:
    names = [field.name for field in fields(NodeCounters)]
    return tuple(
        NodeCounters(**{name: getattr(a, name) + times * getattr(b, name) for name in names})
        for a, b in zip(first, second, strict=True)
    )


def _later(state: SocketState, end: SocketState, begin: SocketState, turns: int) -> SocketState:
    """Extrapolate a socket's totals by `turns` times their increase in a period."""
    return replace(
        state, **{name: getattr(state, name) + turns * (getattr(end, name) - getattr(begin, name)) for name in _TOTALS}
    )
