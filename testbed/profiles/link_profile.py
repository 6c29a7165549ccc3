"""The records of a link profile: all numbers resolved and in base units, without defaults that affect measurements."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, model_validator

from testbed import units
from testbed.directions import LinkDirection
from testbed.frozen import Frozen, is_none, validated
from testbed.profiles.background import BackgroundFlow
from testbed.profiles.faults import PipeFault
from testbed.profiles.loss import Loss
from testbed.profiles.ranges import (
    LONGEST_NS,
    BufferBytes,
    BurstBytes,
    CongestionControl,
    Count,
    DelayNs,
    MomentNs,
    Mtu,
    PeriodNs,
    RateBps,
    Seed,
    Share,
    WaitNs,
)

Queue = Literal["fifo", "fq_codel", "cake", "red"]
"""fifo: drop-tail, of bytes. fq_codel: RFC 8290. cake: Hoiland-Jorgensen et al., Piece of CAKE, LANMAN 2018. red: Floyd
and Jacobson, ToN 1993."""
TCP_HEADER_BYTES = 52
"""IPv4 (20) and TCP with timestamps (32), on every packet."""


def _jitter_within(jitter_ns: int, delay_ns: int) -> None:
    if jitter_ns > delay_ns:
        jitter, delay = units.write_time(jitter_ns), units.write_time(delay_ns)
        raise ValueError(
            f"jitter {jitter} exceeds delay {delay}, so packets would arrive before they are sent; reduce the jitter"
        )


def _dilated(content: Any, factor: int, name: str = "") -> Any:
    """Dilate a record's content; the suffixes of its fields' names identify times and rates."""
    if isinstance(content, dict):
        return {key: _dilated(value, factor, key) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_dilated(value, factor) for value in content]
    if content is None:
        return None
    if name.endswith("_ns") or name == "stretch":
        return content * factor
    if name.endswith("_bps"):
        return (content + 4 * factor) // (8 * factor) * 8
    return content


class Slot(Frozen):
    """Packets leave in bursts, as from a medium with intermittent access: netem's `slot`. Engine netem only."""

    wait_ns: WaitNs
    """Shortest interval between bursts."""
    wait_max_ns: WaitNs
    """Longest interval; uniform between the two."""
    packets: Count
    """Maximum packets per burst; 0: unlimited."""
    max_bytes: BurstBytes
    """Maximum bytes per burst; 0: unlimited."""

    @model_validator(mode="after")
    def _ordered(self) -> Slot:
        if self.wait_max_ns < self.wait_ns:
            longest, shortest = units.write_time(self.wait_max_ns), units.write_time(self.wait_ns)
            raise ValueError(f"wait_max {longest} is less than wait {shortest}; increase it")
        return self


class Change(Frozen):
    """Values that apply from `at_ns` on, all of them: those that a file omits are carried over."""

    at_ns: MomentNs
    """Time after the start of the run."""
    rate_bps: RateBps
    delay_ns: DelayNs
    jitter_ns: DelayNs
    loss: Loss | None

    @model_validator(mode="after")
    def _jitter_fits(self) -> Change:
        _jitter_within(self.jitter_ns, self.delay_ns)
        return self


class Schedule(Frozen):
    """A pipe that changes at stated times. Before the first change the pipe's own values apply."""

    changes: tuple[Change, ...] = Field(min_length=1)
    repeat_ns: PeriodNs | None
    """Period of repetition; None: the last change stays in force."""

    @model_validator(mode="after")
    def _in_order(self) -> Schedule:
        times = [change.at_ns for change in self.changes]
        for number, (earlier, later) in enumerate(pairwise(times), start=1):
            if later <= earlier:
                raise ValueError(
                    f"change [{number}] is at {units.write_time(later)}, change [{number - 1}] at "
                    f"{units.write_time(earlier)}; a schedule's times must increase"
                )
        if self.repeat_ns is not None and self.repeat_ns <= times[-1]:
            last = f"its last change is at {units.write_time(times[-1])}"
            raise ValueError(f"it repeats after {units.write_time(self.repeat_ns)}, but {last}; set a longer repeat")
        return self


class RateTrace(Frozen):
    """Delivery opportunities in mahimahi's format: each line is a time in milliseconds, worth one packet (Netravali et
    al., Mahimahi, ATC 2015). While it plays it replaces the pipe's rate; the last line is its length.
    """

    file: str
    """Path as in the profile, relative to the profile's folder."""
    digest: str = Field(pattern=r"^[0-9a-f]{20}$")
    """Digest of the file's content, which makes it part of a cell's id. See `rate_trace.load_trace`."""
    length_ms: int = Field(ge=1)
    opportunities: int = Field(ge=1)
    loop: bool
    """Whether it repeats; if not, the pipe's rate applies after its end."""
    offset_ms: int = Field(ge=0)
    """Position in the trace at the start of the run."""
    stretch: int = Field(default=1, ge=1)
    """Dilation: milliseconds that pass per millisecond of the trace; see `Pipe.dilated`. Files have no key for it."""

    @model_validator(mode="after")
    def _offset_inside(self) -> RateTrace:
        if self.offset_ms >= self.length_ms:
            raise ValueError(
                f"offset {self.offset_ms}ms is not before the trace's end at {self.length_ms}ms; reduce it"
            )
        if self.length_ms * self.stretch > LONGEST_NS // 1_000_000:
            raise ValueError(
                f"it would play for {self.length_ms * self.stretch / 3_600_000:.1f} hours; at most 24 are accepted"
            )
        return self


class Pipe(Frozen):
    """One direction of an access link.

        start = max(now + jitter, free)     jitter: uniform in [-jitter, +jitter], drawn per packet; order is kept
        free = start + bytes * 8 / rate
        due = free + delay

    A packet is dropped when the buffer is full, or by the loss model. This is the formula of the kernel's netem with a
    rate; jitter applies before the wire, so a busy link shows only its upper end.
    """

    rate_bps: RateBps
    """Bits per second of the profile's layer."""
    delay_ns: DelayNs
    """One way, without serialisation."""
    jitter_ns: DelayNs
    """Largest deviation of the delay."""
    buffer_bytes: BufferBytes
    """Capacity of the drop-tail queue, without packets in flight. cake and fq_codel have limits of their own."""
    queue: Queue | None = Field(default=None, exclude_if=is_none)
    """Queue discipline. None: netem's, which holds a number of packets, but bytes where the pipe varies. Engine relay
    has fifo only."""
    loss: Loss | None
    reorder: Share
    """Share of packets that overtake the queue (netem's `reorder`)."""
    jitter_reorders: bool
    """Jitter applies after the wire, and packets leave when due, in any order. Engine relay only."""
    duplicate: Share
    """Share of packets sent twice."""
    slot: Slot | None
    seed: Seed
    """The same seed loses the same packets, counted from the link's first packet."""
    schedule: Schedule | None
    trace: RateTrace | None
    faults: tuple[PipeFault, ...] | None = Field(default=None, min_length=1, exclude_if=is_none)
    """By their begin. A cell adds them (`testbed.faults`); files have no key for them."""

    @classmethod
    def plain(
        cls, *, rate_bps: int, delay_ns: int, buffer_bytes: int, loss: Loss | None = None, seed: int = 1, **effects: Any
    ) -> Pipe:
        """Make a pipe of constant rate and delay, with only the given effects."""
        nothing: dict[str, Any] = {
            "jitter_ns": 0,
            "reorder": 0.0,
            "jitter_reorders": False,
            "duplicate": 0.0,
            "slot": None,
            "schedule": None,
            "trace": None,
        }
        stated = {"rate_bps": rate_bps, "delay_ns": delay_ns, "buffer_bytes": buffer_bytes, "loss": loss, "seed": seed}
        return cls(**{**nothing, **stated, **effects})

    @property
    def buffer_ns(self) -> int:
        """Time to drain a full buffer."""
        return round(self.buffer_bytes * 8e9 / self.rate_bps)

    @property
    def mean_loss(self) -> float:
        """Long-run share of lost packets."""
        return self.loss.mean if self.loss else 0.0

    @property
    def by_chance(self) -> bool:
        """Whether it has random draws, also in a fault, or a schedule or trace."""
        drawn = self.jitter_ns or self.loss or self.reorder or self.duplicate or self.slot
        return bool(drawn) or self.scheduled or any(fault.drawn for fault in self.faults or ())

    @property
    def varies(self) -> bool:
        """Whether it changes over time."""
        return self.scheduled or self.faults is not None

    @property
    def scheduled(self) -> bool:
        """Whether it changes over time without any fault."""
        return self.schedule is not None or self.trace is not None

    def dilated(self, factor: int) -> Pipe:
        """Return the same pipe with time dilated by `factor`.

        Times are multiplied, rates divided, to the nearest multiple of 8 bits per second, which is the kernel's unit;
        bytes, shares and the seed stay the same, so the same packets are lost. SpecError for a result out of a pipe's
        range.
        """
        if factor == 1:
            return self
        where = f"a dilation of {factor} is too large for a pipe of {units.write_rate(self.rate_bps)}"
        return validated(Pipe, _dilated(self.model_dump(), factor), where)

    @model_validator(mode="after")
    def _makes_sense(self) -> Pipe:
        _jitter_within(self.jitter_ns, self.delay_ns)
        if self.jitter_reorders and not self.jitter_ns:
            raise ValueError("reorder is 'by-jitter' without a jitter; set one")
        if self.jitter_reorders and self.reorder:
            raise ValueError("reorder must be a share or 'by-jitter'")
        if self.schedule is not None and self.trace is not None:
            raise ValueError("it has both a schedule and a trace; remove one")
        return self


class LinkProfile(Frozen):
    """An access link: a pipe away from the stage (`up`) and one towards it (`down`); None is an unshaped direction."""

    name: str
    summary: str = Field(min_length=1)
    """One-line description."""
    source: str = Field(min_length=1)
    """Sources of the numbers."""
    layer: Literal["ip", "ethernet"]
    """What the rate counts: IP packets, or Ethernet frames (14 bytes more each)."""
    mtu: Mtu
    """Largest IP packet, in bytes."""
    congestion_control: CongestionControl
    slow_start_after_idle: bool = Field(strict=True)
    """net.ipv4.tcp_slow_start_after_idle at both ends, which determines the cost of a small message after a pause."""
    up: Pipe | None
    down: Pipe | None
    background: tuple[BackgroundFlow, ...] | None = Field(default=None, min_length=1, exclude_if=is_none)
    """Flows of another machine behind the same link, while the lab is played."""

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """The shaped directions."""
        return tuple(pipe for pipe in (self.up, self.down) if pipe is not None)

    @property
    def shaped(self) -> bool:
        return bool(self.pipes)

    @property
    def varies(self) -> bool:
        """Whether either direction changes over time."""
        return any(pipe.varies for pipe in self.pipes)

    @property
    def by_chance(self) -> bool:
        """Whether it has random draws, changes over time, or carries background flows, which start at random times."""
        return self.background is not None or any(pipe.by_chance for pipe in self.pipes)

    @property
    def round_trip_ns(self) -> int:
        """Sum of both delays, without serialisation."""
        return sum(pipe.delay_ns for pipe in self.pipes)

    @property
    def overhead_bytes(self) -> int:
        """Bytes that the rate counts in addition to each IP packet."""
        return 14 if self.layer == "ethernet" else 0

    @property
    def payload_share(self) -> float:
        """Share of a direction's rate available to TCP payload in full packets, under equal traffic in the other
        direction: headers and acknowledgements of every second packet take the rest.
        """
        full, acknowledgement = self.mtu + self.overhead_bytes, TCP_HEADER_BYTES + self.overhead_bytes
        return (self.mtu - TCP_HEADER_BYTES) / (full + acknowledgement / 2)

    def pipe(self, direction: LinkDirection) -> Pipe | None:
        """Return the pipe in that direction; None: unshaped."""
        return self.up if direction == "up" else self.down

    def dilated(self, factor: int) -> LinkProfile:
        """Return the same link with time dilated by `factor`: see `Pipe.dilated`."""
        if factor == 1:
            return self
        changed: dict[str, Any] = {
            side: pipe and pipe.dilated(factor) for side, pipe in (("up", self.up), ("down", self.down))
        }
        if self.background is not None:
            flows = _dilated([flow.model_dump() for flow in self.background], factor)
            changed["background"] = tuple(BackgroundFlow.model_validate(flow) for flow in flows)
        return self.model_copy(update=changed)

    @model_validator(mode="after")
    def _background_is_shaped(self) -> LinkProfile:
        for flow in self.background or ():
            if self.pipe(flow.way) is None:
                raise ValueError(
                    f"background {flow.text!r}: {flow.way} is unshaped, so nothing limits the flow; remove it"
                )
        return self

    @model_validator(mode="after")
    def _buffer_holds_a_packet(self) -> LinkProfile:
        for side, pipe in (("up", self.up), ("down", self.down)):
            if pipe is not None and pipe.buffer_bytes < self.mtu:
                raise ValueError(
                    f"{side}.buffer holds {pipe.buffer_bytes} bytes, less than one packet of {self.mtu}; enlarge it"
                )
        return self
