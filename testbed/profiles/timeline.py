"""What a varying pipe is at each moment, as steps of constant numbers, to drive netem and for the ideal step time."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from testbed.profiles import trace
from testbed.profiles.link_profile import Pipe, RateTrace
from testbed.profiles.loss import Loss

TRACE_STEP_MS = 100
"""How finely a trace is cut where it cannot be followed packet by packet, in the trace's own time."""
_SLOWEST_BPS = trace.OPPORTUNITY_BYTES * 8 * 1000 // TRACE_STEP_MS
"""The rate where a trace stands still: one packet per step. To the kernel a rate of 0 would mean no limit, and a lower
one would still hold packets when the trace has gone on, because the kernel times a packet when it enters."""


class TimelineStep(NamedTuple):
    """What holds from `at_ns` on."""

    at_ns: int
    rate_bps: int
    delay_ns: int
    jitter_ns: int
    loss: Loss | None


class Timeline(NamedTuple):
    """A pipe over time, counted from the moment at which it is played."""

    steps: tuple[TimelineStep, ...]
    """The first is at 0."""
    repeat_ns: int | None
    """After this long it begins again."""

    def at(self, elapsed_ns: int) -> TimelineStep:
        """Return the step that holds then; its `at_ns` is that of the first round."""
        if self.repeat_ns is not None:
            elapsed_ns %= self.repeat_ns
        return self.steps[max(0, bisect_right(self.steps, elapsed_ns, key=lambda step: step.at_ns) - 1)]

    def next_after(self, elapsed_ns: int) -> int | None:
        """Return when the pipe changes next; None: never again."""
        base = 0 if self.repeat_ns is None else elapsed_ns - elapsed_ns % self.repeat_ns
        place = bisect_right(self.steps, elapsed_ns - base, key=lambda step: step.at_ns)
        if place < len(self.steps):
            return base + self.steps[place].at_ns
        return None if self.repeat_ns is None else base + self.repeat_ns

    def bits_between(self, begin_ns: int, end_ns: int) -> float:
        """Return how many bits the rate carries in that time."""
        bits, now = 0.0, begin_ns
        while now < end_ns:
            following = self.next_after(now)
            until = end_ns if following is None else min(end_ns, following)
            bits += self.at(now).rate_bps * (until - now) / 1e9
            now = until
        return bits

    def carried_at(self, begin_ns: float, bits: float) -> float:
        """Return when `bits` whose first leaves at `begin_ns` have all left."""
        now = float(begin_ns)
        while True:
            rate, following = self.at(int(now)).rate_bps, self.next_after(int(now))
            end = now + bits * 1e9 / rate
            if following is None or end <= following:
                return end
            bits -= rate * (following - now) / 1e9
            now = float(following)


def timeline(pipe: Pipe) -> Timeline:
    """Return the pipe's schedule, or its trace in steps of TRACE_STEP_MS; a pipe that does not vary has one endless
    step.
    """
    base = TimelineStep(0, pipe.rate_bps, pipe.delay_ns, pipe.jitter_ns, pipe.loss)
    if pipe.schedule is not None:
        changes = [TimelineStep(c.at_ns, c.rate_bps, c.delay_ns, c.jitter_ns, c.loss) for c in pipe.schedule.changes]
        return Timeline(tuple(changes if changes[0].at_ns == 0 else [base, *changes]), pipe.schedule.repeat_ns)
    if pipe.trace is not None:
        return _of_trace(base, pipe.trace)
    return Timeline((base,), None)


def _of_trace(base: TimelineStep, asked: RateTrace) -> Timeline:
    ms = 1_000_000 * asked.stretch
    grain = TRACE_STEP_MS * ms
    in_file = trace.bin_rates(trace.load_trace(asked), TRACE_STEP_MS)
    rates = [max(_SLOWEST_BPS, int(rate)) // asked.stretch // 8 * 8 for rate in in_file]
    edges = [i * grain for i in range(len(rates))]
    length, offset = asked.length_ms * ms, asked.offset_ms * ms
    # It is played from the offset: the bin that holds it comes first, what lies before it at the end of the round.
    first = offset // grain
    steps = [base._replace(at_ns=max(0, edges[i] - offset), rate_bps=rates[i]) for i in range(first, len(rates))]
    if not asked.loop:
        return Timeline((*steps, base._replace(at_ns=length - offset)), None)
    steps += [
        base._replace(at_ns=length - offset + edges[i], rate_bps=rates[i]) for i in range(first + bool(offset % grain))
    ]
    return Timeline(tuple(steps), length)
