"""One direction of a link as arithmetic on departures and drops. In whole nanoseconds, no sockets.

    start = max(now + jitter, free)     the wire is free, or becomes so
    dropped if it had to wait for more than the buffer holds (drop-tail)
    dropped if the loss model says so   after the buffer, so a packet dropped by the queue never counts as lost
    free = start + bytes * 8 / rate     a lost packet takes no time; with a trace: the last opportunity used
    due = free + delay

Three classes with one interface, `offer`: Unshaped only counts; Plain has a constant rate, a delay, a buffer and a loss
model, and is fast; Shaper (shaper.py) implements everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.net.relay.loss import LossModel, loss_model

NEVER = 1 << 63
COUNTERS = (
    "packets_in",
    "bytes_in",
    "packets_out",
    "bytes_out",
    "dropped_buffer",
    "dropped_loss",
    "duplicated",
    "reordered",
    "backlog_bytes",
)
"""`out` counts packets accepted by the pipe, including copies: departed or in flight. in + duplicated = out +
dropped."""


_COUNTED = (*COUNTERS[:2], "bytes_dropped", "bytes_duplicated", *COUNTERS[4:8])


class RelayPipe:
    """The counters of every pipe, in packets and bytes of IP."""

    packets_in = bytes_in = bytes_dropped = dropped_buffer = dropped_loss = 0
    duplicated = bytes_duplicated = reordered = 0
    _pipe: Mapping[str, Any] | None = None
    _overhead_bytes = 0
    least_delay_ns = 0
    """Minimum delay of any packet."""

    def __init__(self, before: RelayPipe | None = None) -> None:
        """`before`: the pipe that it replaces, whose counters it continues."""
        if before is not None:
            for name in _COUNTED:
                setattr(self, name, getattr(before, name))

    def offer(self, now_ns: int, length: int) -> tuple[int, ...]:
        """Offer an IP packet of `length` bytes at `now_ns`, which never decreases by much.

        Returns the departure times of the packet and its copy; empty if dropped.
        """
        self.packets_in += 1
        self.bytes_in += length
        return (now_ns,)

    def play(self, start_ns: int) -> None:
        """Start the schedule or the trace at `start_ns`; no effect without either."""

    def hold(self) -> None:
        """Return to the pipe's constant values."""

    def settings(self) -> dict[str, Any] | None:
        """Return the requested pipe and its overhead; None if unshaped."""
        return None if self._pipe is None else {**self._pipe, "overhead_bytes": self._overhead_bytes}

    def backlog_bytes(self, now_ns: int) -> int:
        """Return the bytes waiting for or entering the wire, without packets in their `delay`."""
        return 0

    def counters(self, now_ns: int) -> tuple[int, ...]:
        """Return the counters, in the order of COUNTERS."""
        return (
            self.packets_in,
            self.bytes_in,
            self.packets_in + self.duplicated - self.dropped_buffer - self.dropped_loss,
            self.bytes_in + self.bytes_duplicated - self.bytes_dropped,
            self.dropped_buffer,
            self.dropped_loss,
            self.duplicated,
            self.reordered,
            self.backlog_bytes(now_ns),
        )


class Unshaped(RelayPipe):
    """Every packet leaves on arrival."""


class Plain(RelayPipe):
    """A constant rate, a delay, a buffer and a loss model."""

    def __init__(self, pipe: Mapping[str, Any], overhead_bytes: int, stream: int) -> None:
        """`pipe` as `testbed.net.relay.client.pipe_table` makes it.

        `overhead_bytes` are counted in addition to every packet.
        """
        super().__init__()
        self._pipe, self._overhead_bytes = pipe, overhead_bytes
        self._rate_bps: int = pipe["rate_bps"]
        self.least_delay_ns = self.delay_ns = int(pipe["delay_ns"])
        self._buffer_ns = pipe["buffer_bytes"] * 8_000_000_000 // self._rate_bps
        self.loss: LossModel | None = loss_model(pipe["loss"], pipe["seed"], stream)
        self.free_ns = 0

    def offer(self, now_ns: int, length: int) -> tuple[int, ...]:
        """Apply the formula to one packet."""
        self.packets_in += 1
        self.bytes_in += length
        lost = self.loss is not None and self.loss.lost(self.packets_in)
        start = self.free_ns
        if start <= now_ns:
            start = now_ns
        elif start - now_ns > self._buffer_ns:
            self.dropped_buffer += 1
            self.bytes_dropped += length
            return ()
        if lost:
            self.dropped_loss += 1
            self.bytes_dropped += length
            return ()
        rate = self._rate_bps
        self.free_ns = free = start + ((length + self._overhead_bytes) * 8_000_000_000 + rate - 1) // rate
        return (free + self.delay_ns,)

    def backlog_bytes(self, now_ns: int) -> int:
        """Return the backlog, computed from the time for which the wire is busy."""
        return max(0, self.free_ns - now_ns) * self._rate_bps // 8_000_000_000
