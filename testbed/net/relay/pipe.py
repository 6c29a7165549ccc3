"""One direction of a link as arithmetic: when does a packet leave, or is it dropped? Whole nanoseconds; knows no sockets.

    start = max(now, free)              the wire is free, or becomes so
    dropped if start - now > buffer     the queue is full (drop-tail, in time, that is in bytes)
    dropped if the loss draw says so    after the buffer: a packet that the queue refused is not drawn as lost as well
    free = start + bytes * 8 / rate     a lost packet takes no time on the wire
    due = free + delay

The loss draw of packet number n depends on (seed, stream, n) alone, where n counts every packet offered: neither timing
nor other links change which packets are lost.
"""

from __future__ import annotations

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
DROPPED = -1


def mix(value: int) -> int:
    """64 well-mixed bits of a 64-bit number: splitmix64's finaliser (Steele, Lea, Flood: Fast splittable generators, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


class Shaper:
    """The state of one shaped direction; `admit` is the formula."""

    __slots__ = (
        "_buffer_ns",
        "_delay_ns",
        "_free_ns",
        "_key",
        "_overhead_bytes",
        "_rate_bps",
        "_threshold",
        "bytes_dropped",
        "bytes_in",
        "dropped_buffer",
        "dropped_loss",
        "packets_in",
    )

    def __init__(
        self, *, rate_bps: int, delay_ns: int, buffer_ns: int, loss: float, seed: int, overhead_bytes: int, stream: int
    ) -> None:
        """`overhead_bytes` are counted on top of every packet. `stream` tells directions that share a seed apart."""
        self._rate_bps, self._delay_ns, self._buffer_ns = rate_bps, delay_ns, buffer_ns
        self._overhead_bytes = overhead_bytes
        self._threshold = round(loss * 2**64)
        self._key = mix(mix(seed & _MASK) + stream * _GOLDEN & _MASK)
        self._free_ns = 0
        self.packets_in = self.bytes_in = self.dropped_buffer = self.dropped_loss = self.bytes_dropped = 0

    @property
    def delay_ns(self) -> int:
        return self._delay_ns

    def settings(self) -> dict[str, int | float]:
        """The numbers that `admit` computes with."""
        return {
            "rate_bps": self._rate_bps,
            "delay_ns": self._delay_ns,
            "buffer_ns": self._buffer_ns,
            "loss": self._threshold / 2**64,
            "overhead_bytes": self._overhead_bytes,
        }

    def admit(self, now_ns: int, length: int) -> int:
        """Offer an IP packet of `length` bytes at `now_ns`, which never decreases by much: when it leaves, or DROPPED."""
        self.packets_in += 1
        self.bytes_in += length
        start = self._free_ns
        if start <= now_ns:
            start = now_ns
        elif start - now_ns > self._buffer_ns:
            self.dropped_buffer += 1
            self.bytes_dropped += length
            return DROPPED
        if self._threshold and mix(self._key + self.packets_in * _GOLDEN & _MASK) < self._threshold:
            self.dropped_loss += 1
            self.bytes_dropped += length
            return DROPPED
        rate = self._rate_bps
        # Rounded up: the wire may be a nanosecond slow, never fast.
        self._free_ns = free = start + ((length + self._overhead_bytes) * 8_000_000_000 + rate - 1) // rate
        return free + self._delay_ns

    def backlog_bytes(self, now_ns: int) -> int:
        """What waits for the wire or is on its way onto it; packets under way for `delay` are not in it."""
        return max(0, self._free_ns - now_ns) * self._rate_bps // 8_000_000_000


class Unshaped:
    """A direction that only counts: every packet leaves as it comes."""

    __slots__ = ("bytes_in", "packets_in")

    delay_ns = dropped_buffer = dropped_loss = bytes_dropped = 0

    def __init__(self) -> None:
        self.packets_in = self.bytes_in = 0

    def settings(self) -> None:
        """Nothing is set."""

    def admit(self, now_ns: int, length: int) -> int:
        """`now_ns`."""
        self.packets_in += 1
        self.bytes_in += length
        return now_ns

    def backlog_bytes(self, now_ns: int) -> int:
        """Nothing waits."""
        return 0


def counters(pipe: Shaper | Unshaped, now_ns: int) -> dict[str, int]:
    """A direction's counters in packets and bytes of IP. `out` is what the pipe accepted: it has left, or is under way."""
    return {
        "packets_in": pipe.packets_in,
        "bytes_in": pipe.bytes_in,
        "packets_out": pipe.packets_in - pipe.dropped_buffer - pipe.dropped_loss,
        "bytes_out": pipe.bytes_in - pipe.bytes_dropped,
        "dropped_buffer": pipe.dropped_buffer,
        "dropped_loss": pipe.dropped_loss,
        "backlog_bytes": pipe.backlog_bytes(now_ns),
    }
