"""One direction of a link with all effects of a profile. The formula is in pipe.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from testbed.net.relay.loss import Draws, LossModel, loss_model, threshold
from testbed.net.relay.pipe import NEVER, Plain, RelayPipe, Unshaped
from testbed.net.relay.wire import Opportunities, RunningTrace, serialisation_ns

_JITTER, _REORDER, _DUPLICATE = 2, 3, 4  # kinds of draws, after the two of loss.py
_STEP_KEYS = ("rate_bps", "delay_ns", "jitter_ns", "loss")
_USUAL_BYTES = 1500


class Shaper(RelayPipe):
    """All effects of a pipe, and changes while packets are in flight.

    A packet that waits while a schedule or trace changes the rate leaves at the rates of that time, which are known
    when it comes. When the delay shrinks, packets still leave in order and no faster than the rate, behind the last one
    in flight, as in netem. A pipe that replaces another changes nothing for admitted packets.
    """

    _pipe: Mapping[str, Any]

    def __init__(
        self,
        pipe: Mapping[str, Any],
        overhead_bytes: int,
        stream: int,
        trace: Opportunities | None = None,
        before: RelayPipe | None = None,
        now_ns: int = 0,
    ) -> None:
        """`pipe`, `overhead_bytes` and `stream` as in Plain. `trace`: the content of the pipe's trace. `before`: the
        pipe that it replaces at `now_ns`.
        """
        super().__init__(before)
        self._pipe, self._overhead_bytes, self._opportunities = pipe, overhead_bytes, trace
        seed = pipe["seed"]
        self._seeds = (seed, stream)
        self._buffer_bytes: int = pipe["buffer_bytes"]
        self._jitter = Draws(seed, stream, _JITTER)
        self._reorder = (Draws(seed, stream, _REORDER), threshold(pipe["reorder"])) if pipe["reorder"] else None
        self._duplicate = (Draws(seed, stream, _DUPLICATE), threshold(pipe["duplicate"])) if pipe["duplicate"] else None
        steps = [pipe, *(pipe["steps"] or ())]
        self.least_delay_ns = 0 if pipe["reorder"] else min(step["delay_ns"] - step["jitter_ns"] for step in steps)
        self._number = self.packets_in + self.duplicated
        self._free_ns = self._last_due_ns = self._held_bytes = 0
        self._waiting: deque[tuple[int, int]] = deque()
        self._loss: LossModel | None = None
        self._loss_asked: object = ...  # differs from any request
        if isinstance(before, Plain):
            self._take_over(before, now_ns)
        elif isinstance(before, Shaper):
            self._free_ns, self._last_due_ns, self._loss = before._free_ns, before._last_due_ns, before._loss
            self._waiting, self._held_bytes = before._waiting, before._held_bytes
        self.hold()

    def _take_over(self, before: Plain, now_ns: int) -> None:
        """Take over a queue, known only as a time, as packets of a typical size."""
        self._free_ns, self._last_due_ns = before.free_ns, before.free_ns + before.delay_ns
        self._loss = before.loss
        left, busy_ns = before.backlog_bytes(now_ns), before.free_ns - now_ns
        for begin, end in pairwise([*range(0, left, _USUAL_BYTES), left] if left else []):
            self._waiting.append((now_ns + busy_ns * end // left, end - begin))
        self._held_bytes = left

    def play(self, start_ns: int) -> None:
        """Start the schedule or trace with the first packet at `start_ns` or later."""
        self.hold()
        self._start_ns = start_ns
        if self._pipe["steps"] or self._opportunities is not None:
            self._until_ns = start_ns

    def hold(self) -> None:
        """Return to the constant values with the next packet."""
        self._start_ns = 0
        self._until_ns = NEVER
        self._trace: RunningTrace | None = None
        self._set(self._pipe)

    def _set(self, step: Mapping[str, Any]) -> None:
        self._rate_bps, self._delay_ns, self._jitter_ns, loss = (step[key] for key in _STEP_KEYS)
        if loss != self._loss_asked:
            self._loss, self._loss_asked = loss_model(loss, *self._seeds, before=self._loss), loss

    def _change(self, now_ns: int) -> None:
        """Change to the values in force at `now_ns`, and note their end."""
        if self._opportunities is not None:
            self._trace, self._until_ns = RunningTrace(self._opportunities, self._start_ns), NEVER
            return
        step, self._until_ns = self._in_force(now_ns)
        self._set(step)

    def _in_force(self, now_ns: int) -> tuple[Mapping[str, Any], int]:
        """Return the values at a time, and their end."""
        if now_ns < self._start_ns:
            return self._pipe, self._start_ns
        steps, repeat_ns = self._pipe["steps"], self._pipe["repeat_ns"]
        begin = self._start_ns
        if repeat_ns is not None:
            begin += (now_ns - begin) // repeat_ns * repeat_ns
        place = max(n for n, step in enumerate(steps) if begin + step["at_ns"] <= now_ns)  # the first is at 0
        if place + 1 < len(steps):
            return steps[place], begin + steps[place + 1]["at_ns"]
        return steps[place], NEVER if repeat_ns is None else begin + repeat_ns

    def offer(self, now_ns: int, length: int) -> tuple[int, ...]:
        """Apply the formula, once to the packet and once to its copy."""
        if now_ns >= self._until_ns:
            self._change(now_ns)
        self.packets_in += 1
        self.bytes_in += length
        due = self._admit(now_ns, length)
        if self._duplicate is None or self._duplicate[0].at(self._number) >= self._duplicate[1]:
            return due
        self.duplicated += 1
        self.bytes_duplicated += length
        return due + self._admit(now_ns, length)

    def _admit(self, now_ns: int, length: int) -> tuple[int, ...]:
        self._number += 1
        lost = self._loss is not None and self._loss.lost(self._number)
        counted, waiting = length + self._overhead_bytes, self._waiting
        while waiting and waiting[0][0] <= now_ns:
            self._held_bytes -= waiting.popleft()[1]
        # The first held packet is on the wire; the others, and this one, must fit into the buffer.
        if waiting and self._held_bytes - waiting[0][1] + counted > self._buffer_bytes:
            self.dropped_buffer += 1
            self.bytes_dropped += length
            return ()
        if lost:
            self.dropped_loss += 1
            self.bytes_dropped += length
            return ()
        if self._reorder is not None and self._reorder[0].at(self._number) < self._reorder[1]:
            self.reordered += 1
            return (now_ns,)
        jitter = self._jitter.at(self._number) % (2 * self._jitter_ns + 1) - self._jitter_ns if self._jitter_ns else 0
        if self._pipe["jitter_reorders"]:
            self._through(now_ns, counted)
            due = self._free_ns + self._delay_ns + jitter
            self.reordered += due < self._last_due_ns
            self._last_due_ns = max(due, self._last_due_ns)
        else:
            spacing_ns = self._through(now_ns + jitter, counted)
            due = self._last_due_ns = max(self._free_ns + self._delay_ns, self._last_due_ns + spacing_ns)
        waiting.append((self._free_ns, counted))
        self._held_bytes += counted
        return (due,)

    def _through(self, arrival_ns: int, counted: int) -> int:
        """Send a packet through the wire, until `_free_ns`.

        Returns the minimum gap to the previous packet at the far end.
        """
        start = max(arrival_ns, self._free_ns)
        if self._trace is not None:
            if (through := self._trace.through(start, counted)) is not None:
                self._free_ns = through
                return 0  # two packets may share an opportunity
            assert self._trace.end_ns is not None
            start, self._trace = max(start, self._trace.end_ns), None
        end = start + serialisation_ns(counted, self._rate_bps)
        if end > self._until_ns and self._pipe["steps"]:
            end = self._carried_at(start, counted)
        self._free_ns = end
        return end - start

    def _carried_at(self, start_ns: int, counted: int) -> int:
        """Return the time at which a packet that starts at `start_ns` has left, over changes of the rate."""
        left, now_ns = counted * 8_000_000_000, start_ns
        while True:
            step, until_ns = self._in_force(now_ns)
            if (end_ns := now_ns - -left // step["rate_bps"]) <= until_ns:
                return int(end_ns)
            left -= step["rate_bps"] * (until_ns - now_ns)
            now_ns = until_ns

    def backlog_bytes(self, now_ns: int) -> int:
        """Add up the packets that have not left."""
        return sum(length for leaves, length in self._waiting if leaves > now_ns)


def build_pipe(
    pipe: Mapping[str, Any] | None,
    overhead_bytes: int,
    stream: int,
    trace: Opportunities | None = None,
    before: RelayPipe | None = None,
    now_ns: int = 0,
) -> RelayPipe:
    """Make the fastest pipe class for the request; `pipe` None: unshaped."""
    if pipe is None:
        return Unshaped(before)
    if before is None and not any(pipe[key] for key in ("jitter_ns", "reorder", "duplicate", "steps", "trace")):
        return Plain(pipe, overhead_bytes, stream)
    return Shaper(pipe, overhead_bytes, stream, trace, before, now_ns)
