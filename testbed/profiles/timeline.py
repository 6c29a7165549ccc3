"""The state of a varying pipe over time, as steps of constant values, for netem and for the ideal step time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from testbed.profiles import rate_trace
from testbed.profiles.faults import PipeFault
from testbed.profiles.link_profile import Pipe, RateTrace
from testbed.profiles.loss import Bernoulli, Loss

TRACE_STEP_MS = 100
"""Resolution of a trace where it cannot be followed packet by packet, in the trace's own time."""
_SLOWEST_BPS = rate_trace.OPPORTUNITY_BYTES * 8 * 1000 // TRACE_STEP_MS
"""The rate in pauses of a trace: one packet per step. To the kernel a rate of 0 means unlimited, and a lower one would
delay the next packet beyond the pause."""


class TimelineStep(NamedTuple):
    """The values that apply from `at_ns` on."""

    at_ns: int
    rate_bps: int
    delay_ns: int
    jitter_ns: int
    loss: Loss | None
    reorder: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    begun: int = 0
    """Number of the pipe's faults that have begun, over or not."""

    def under(self, faults: Iterable[PipeFault]) -> TimelineStep:
        """Return the values under these faults."""
        now = self
        for fault in faults:
            shares = {name: max(getattr(now, name), getattr(fault, name) or 0.0) for name in _SHARES}
            now = now._replace(
                rate_bps=min(now.rate_bps, fault.rate_bps or now.rate_bps),
                delay_ns=max(now.delay_ns, fault.delay_ns or 0),
                **shares,
            )
            if (fault.loss or 0.0) > (now.loss.mean if now.loss else 0.0):
                now = now._replace(loss=Bernoulli(probability=fault.loss or 0.0))
        return now

    @property
    def lost(self) -> float:
        """Share of packets that do not arrive whole."""
        return 1 - (1 - (self.loss.mean if self.loss else 0.0)) * (1 - self.corrupt)


_SHARES = ("reorder", "duplicate", "corrupt")


class Timeline(NamedTuple):
    """A pipe over time, counted from when it is played."""

    steps: tuple[TimelineStep, ...]
    """Steps without faults; the first is at 0."""
    repeat_ns: int | None
    """Period of repetition."""
    faults: tuple[PipeFault, ...] = ()
    """By their begin. They do not repeat."""

    def at(self, elapsed_ns: int) -> TimelineStep:
        """Return the step in force at that time; its `at_ns` is that of the first repetition."""
        in_turn_ns = elapsed_ns if self.repeat_ns is None else elapsed_ns % self.repeat_ns
        step = self.steps[max(0, bisect_right(self.steps, in_turn_ns, key=lambda step: step.at_ns) - 1)]
        if not self.faults:
            return step
        begun = bisect_right(self.faults, elapsed_ns, key=lambda fault: fault.at_ns)
        return step.under(f for f in self.faults[:begun] if elapsed_ns < f.end_ns)._replace(begun=begun)

    def next_after(self, elapsed_ns: int) -> int | None:
        """Return the time of the pipe's next change; None: never."""
        base = 0 if self.repeat_ns is None else elapsed_ns - elapsed_ns % self.repeat_ns
        place = bisect_right(self.steps, elapsed_ns - base, key=lambda step: step.at_ns)
        edges = [edge for fault in self.faults for edge in (fault.at_ns, fault.end_ns) if edge > elapsed_ns]
        if place < len(self.steps):
            edges.append(base + self.steps[place].at_ns)
        elif self.repeat_ns is not None:
            edges.append(base + self.repeat_ns)
        return min(edges, default=None)

    def between(self, begin_ns: int, end_ns: int) -> Iterator[tuple[TimelineStep, int]]:
        """Yield the steps in force from one time to another, each with its duration in that interval."""
        now = begin_ns
        while now < end_ns:
            following = self.next_after(now)
            until = end_ns if following is None else min(end_ns, following)
            yield self.at(now), until - now
            now = until

    def bits_between(self, begin_ns: int, end_ns: int) -> float:
        """Return the bits that the rate carries in an interval; none while all packets are lost."""
        return sum(0.0 if step.lost == 1 else step.rate_bps * ns / 1e9 for step, ns in self.between(begin_ns, end_ns))

    def carried_at(self, begin_ns: float, bits: float) -> float:
        """Return the time at which `bits`, the first of which leaves at `begin_ns`, have all left."""
        now = float(begin_ns)
        while True:
            rate, following = self.at(int(now)).rate_bps, self.next_after(int(now))
            end = now + bits * 1e9 / rate
            if following is None or end <= following:
                return end
            bits -= rate * (following - now) / 1e9
            now = float(following)


_CHANGED = ("at_ns", "rate_bps", "delay_ns", "jitter_ns", "loss")


def timeline(pipe: Pipe) -> Timeline:
    """Return the pipe's schedule, or its trace in steps of TRACE_STEP_MS, and its faults; a constant pipe has one
    endless step.
    """
    base = constant_step(pipe)
    line = Timeline((base,), None)
    if pipe.schedule is not None:
        changes = [base._replace(**{name: getattr(c, name) for name in _CHANGED}) for c in pipe.schedule.changes]
        line = Timeline(tuple(changes if changes[0].at_ns == 0 else [base, *changes]), pipe.schedule.repeat_ns)
    if pipe.trace is not None:
        line = _of_trace(base, pipe.trace)
    return line._replace(faults=pipe.faults or ())


def constant_step(pipe: Pipe) -> TimelineStep:
    """Return the pipe's constant values."""
    return TimelineStep(0, pipe.rate_bps, pipe.delay_ns, pipe.jitter_ns, pipe.loss, pipe.reorder, pipe.duplicate)


@lru_cache(maxsize=16)  # judging a run follows the same links again and again
def _of_trace(base: TimelineStep, asked: RateTrace) -> Timeline:
    ms = 1_000_000 * asked.stretch
    grain = TRACE_STEP_MS * ms
    in_file = rate_trace.bin_rates(rate_trace.load_trace(asked), TRACE_STEP_MS)
    rates = [max(_SLOWEST_BPS, int(rate)) // asked.stretch // 8 * 8 for rate in in_file]
    edges = [i * grain for i in range(len(rates))]
    length, offset = asked.length_ms * ms, asked.offset_ms * ms
    # Playback starts at the offset: its bin comes first, earlier bins at the end of the repetition.
    first = offset // grain
    steps = [base._replace(at_ns=max(0, edges[i] - offset), rate_bps=rates[i]) for i in range(first, len(rates))]
    if not asked.loop:
        return Timeline((*steps, base._replace(at_ns=length - offset)), None)
    steps += [
        base._replace(at_ns=length - offset + edges[i], rate_bps=rates[i]) for i in range(first + bool(offset % grain))
    ]
    return Timeline(tuple(steps), length)
