"""The records of a link profile: every number resolved, in base units, no default that changes a measured number."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from testbed import units
from testbed.directions import LinkDirection
from testbed.frozen import Frozen, explain
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

TCP_HEADER_BYTES = 52
"""IPv4 (20) and TCP with timestamps (32), on every packet."""


def _jitter_within(jitter_ns: int, delay_ns: int) -> None:
    if jitter_ns > delay_ns:
        jitter, delay = units.write_time(jitter_ns), units.write_time(delay_ns)
        raise ValueError(
            f"the jitter of {jitter} is more than the delay of {delay}; no packet arrives before it is sent"
        )


def _dilated(content: Any, factor: int, name: str = "") -> Any:
    """Dilate a record's content; the names of its fields tell which are times and which are rates."""
    if isinstance(content, dict):
        return {key: _dilated(value, factor, key) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_dilated(value, factor) for value in content]
    if content is not None and (name.endswith("_ns") or name == "stretch"):
        return content * factor
    if name.endswith("_bps"):
        return (content + 4 * factor) // (8 * factor) * 8
    return content


class Slot(Frozen):
    """Packets leave in bursts, as from a medium that is granted now and then: netem's `slot`. Engine netem only."""

    wait_ns: WaitNs
    """Shortest wait from one burst to the next."""
    wait_max_ns: WaitNs
    """Longest; uniform between the two."""
    packets: Count
    """At most in one burst; 0: no such limit."""
    max_bytes: BurstBytes
    """Most in one burst; 0: no such limit."""

    @model_validator(mode="after")
    def _ordered(self) -> Slot:
        if self.wait_max_ns < self.wait_ns:
            longest, shortest = units.write_time(self.wait_max_ns), units.write_time(self.wait_ns)
            raise ValueError(f"wait_max is {longest}, less than wait, which is {shortest}")
        return self


class Change(Frozen):
    """These numbers hold from `at_ns` on; all are stated here, because what a file leaves out is carried over."""

    at_ns: MomentNs
    """After the start of the run."""
    rate_bps: RateBps
    delay_ns: DelayNs
    jitter_ns: DelayNs
    loss: Loss | None

    @model_validator(mode="after")
    def _jitter_fits(self) -> Change:
        _jitter_within(self.jitter_ns, self.delay_ns)
        return self


class Schedule(Frozen):
    """A pipe that changes at stated times. Before the first change the pipe's own numbers hold."""

    changes: tuple[Change, ...] = Field(min_length=1)
    repeat_ns: PeriodNs | None
    """After this long all begins again; None: the last change stays."""

    @model_validator(mode="after")
    def _in_order(self) -> Schedule:
        times = [change.at_ns for change in self.changes]
        for number, (earlier, later) in enumerate(pairwise(times), start=1):
            if later <= earlier:
                raise ValueError(
                    f"change [{number}] is at {units.write_time(later)}, change [{number - 1}] at "
                    f"{units.write_time(earlier)}; the times of a schedule must increase"
                )
        if self.repeat_ns is not None and self.repeat_ns <= times[-1]:
            last = f"its last change is at {units.write_time(times[-1])}"
            raise ValueError(f"it repeats after {units.write_time(self.repeat_ns)}, and {last}; repeat later than that")
        return self


class RateTrace(Frozen):
    """Delivery opportunities in mahimahi's format: one line of milliseconds each, good for one packet (Netravali et
    al., Mahimahi, ATC 2015). While it plays it takes the place of the pipe's rate; the last line's time is its length.
    """

    file: str
    """As the profile names it, relative to the profile's folder."""
    digest: str = Field(pattern=r"^[0-9a-f]{20}$")
    """Of the file's content, so that a cell's id changes with it. See `trace.load_trace`."""
    length_ms: int = Field(ge=1)
    opportunities: int = Field(ge=1)
    loop: bool
    """Whether it begins again at its end; else the pipe's rate holds from there on."""
    offset_ms: int = Field(ge=0)
    """Where in the trace the run begins."""
    stretch: int = Field(default=1, ge=1)
    """How many milliseconds pass while it plays one of its own: see `Pipe.dilated`. A file has no word for it."""

    @model_validator(mode="after")
    def _offset_inside(self) -> RateTrace:
        if self.offset_ms >= self.length_ms:
            raise ValueError(f"the offset {self.offset_ms}ms does not lie before the trace's end at {self.length_ms}ms")
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

    A packet is dropped when it would wait longer than the buffer holds, or when the loss model says so. It is the
    formula of the kernel's netem with a rate; jitter stands before the wire, so a busy link shows its upper end only.
    """

    rate_bps: RateBps
    """Bits per second of the profile's layer."""
    delay_ns: DelayNs
    """One way, without serialisation."""
    jitter_ns: DelayNs
    """Largest deviation of the delay."""
    buffer_bytes: BufferBytes
    """How much may wait for the wire: drop-tail; packets in flight are not counted."""
    loss: Loss | None
    reorder: Share
    """Share of packets that leave at once, before all that wait (netem's `reorder`)."""
    jitter_reorders: bool
    """Jitter stands behind the wire, and packets leave when they are due, in whatever order. Engine relay only."""
    duplicate: Share
    """Share of packets that are offered twice."""
    slot: Slot | None
    seed: Seed
    """Same seed, same packets lost, counted from the link's first packet."""
    schedule: Schedule | None
    trace: RateTrace | None

    @classmethod
    def plain(
        cls, *, rate_bps: int, delay_ns: int, buffer_bytes: int, loss: Loss | None = None, seed: int = 1, **effects: Any
    ) -> Pipe:
        """Make a pipe of constant rate and delay, without any effect but those that are named."""
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
        """The time that a full buffer takes to drain."""
        return round(self.buffer_bytes * 8e9 / self.rate_bps)

    @property
    def mean_loss(self) -> float:
        """The share of packets that is lost in the long run."""
        return self.loss.mean if self.loss else 0.0

    @property
    def by_chance(self) -> bool:
        """Whether anything about it is drawn at random, or changes while it is played."""
        drawn = self.jitter_ns or self.loss or self.reorder or self.duplicate or self.slot
        return bool(drawn) or self.varies

    @property
    def varies(self) -> bool:
        """Whether it changes while it is played."""
        return self.schedule is not None or self.trace is not None

    def dilated(self, factor: int) -> Pipe:
        """Return the same pipe in a world in which everything takes `factor` times as long.

        Times are multiplied, rates divided, to the nearest multiple of 8 bits per second, which is the kernel's unit;
        bytes, shares and the seed stay, so the same packets are lost. SpecError when that leaves the range of what a
        pipe can be.
        """
        if factor == 1:
            return self
        try:
            return Pipe.model_validate(_dilated(self.model_dump(), factor))
        except ValidationError as error:
            where = f"a dilation of {factor} is too large for a pipe of {units.write_rate(self.rate_bps)}"
            raise explain(error, Pipe, where) from None

    @model_validator(mode="after")
    def _makes_sense(self) -> Pipe:
        _jitter_within(self.jitter_ns, self.delay_ns)
        if self.jitter_reorders and not self.jitter_ns:
            raise ValueError("reorder is 'by-jitter', and there is no jitter; state one")
        if self.jitter_reorders and self.reorder:
            raise ValueError("reorder is either a share or 'by-jitter'")
        if self.schedule is not None and self.trace is not None:
            raise ValueError("it has a schedule and a trace; choose one")
        return self


class LinkProfile(Frozen):
    """An access link: a pipe away from the stage (`up`) and one towards it (`down`); None is an unshaped direction."""

    name: str
    summary: str = Field(min_length=1)
    """What it is, in one line."""
    source: str = Field(min_length=1)
    """Where the numbers come from."""
    layer: Literal["ip", "ethernet"]
    """What the rate counts: IP packets, or Ethernet frames (14 bytes more each)."""
    mtu: Mtu
    """Largest IP packet, in bytes."""
    congestion_control: CongestionControl
    slow_start_after_idle: bool = Field(strict=True)
    """net.ipv4.tcp_slow_start_after_idle at both ends: it decides what a small message costs after a pause."""
    up: Pipe | None
    down: Pipe | None

    @property
    def pipes(self) -> tuple[Pipe, ...]:
        """The directions that are shaped."""
        return tuple(pipe for pipe in (self.up, self.down) if pipe is not None)

    @property
    def shaped(self) -> bool:
        return bool(self.pipes)

    @property
    def varies(self) -> bool:
        """Whether either direction changes while it is played."""
        return any(pipe.varies for pipe in self.pipes)

    @property
    def round_trip_ns(self) -> int:
        """Both delays, without serialisation."""
        return sum(pipe.delay_ns for pipe in self.pipes)

    @property
    def overhead_bytes(self) -> int:
        """What the rate counts on top of each IP packet."""
        return 14 if self.layer == "ethernet" else 0

    @property
    def payload_share(self) -> float:
        """The share of a direction's rate that is left for what TCP carries in full packets, while as much goes the
        other way: headers take the rest, and an acknowledgement of every second packet that comes.
        """
        full, acknowledgement = self.mtu + self.overhead_bytes, TCP_HEADER_BYTES + self.overhead_bytes
        return (self.mtu - TCP_HEADER_BYTES) / (full + acknowledgement / 2)

    def pipe(self, direction: LinkDirection) -> Pipe | None:
        """Return the pipe in that direction; None: unshaped."""
        return self.up if direction == "up" else self.down

    def dilated(self, factor: int) -> LinkProfile:
        """Return the same link in a world in which everything takes `factor` times as long: see `Pipe.dilated`."""
        if factor == 1:
            return self
        up, down = (None if pipe is None else pipe.dilated(factor) for pipe in (self.up, self.down))
        return self.model_copy(update={"up": up, "down": down})

    @model_validator(mode="after")
    def _buffer_holds_a_packet(self) -> LinkProfile:
        for side, pipe in (("up", self.up), ("down", self.down)):
            if pipe is not None and pipe.buffer_bytes < self.mtu:
                raise ValueError(
                    f"{side}.buffer holds {pipe.buffer_bytes} bytes, less than one packet of {self.mtu}; enlarge it"
                )
        return self
