"""What a link should have shown, from its profile, against what the probe read: pure functions from Readings to Measurements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Literal, NamedTuple

from testbed.net.probe import WAYS, Readings, Way
from testbed.records import Measurement
from testbed.spec import LinkProfile, Pipe
from testbed.units import format_rate

CONTENTION = "CPU contention, not the network"
LATENESS_TOLERANCE_MS = 1.0
_RTT_TOLERANCE_MS, _RTT_TOLERANCE = 0.3, 0.01
_RATE_TOLERANCE = 0.01
_MESSAGE_TOLERANCE_MS, _MESSAGE_TOLERANCE = 0.3, 0.03
_LOSS_DEVIATIONS = 3.3  # of a binomial count: one good link in a thousand is refused


class Lateness(NamedTuple):
    """How late the relay's packets left while the links were measured."""

    p99_ms: float
    worst_ms: float
    """Rounded up to a power of two of microseconds."""
    packets: int

    def explanation(self) -> str | None:
        """What it may have done to a link that was slow; None: nothing."""
        if self.p99_ms > LATENESS_TOLERANCE_MS:
            return f"{CONTENTION}: the relay was {self.p99_ms:.2f} ms late (p99)"
        if self.worst_ms > LATENESS_TOLERANCE_MS:
            return f"perhaps {CONTENTION}: the relay was up to {self.worst_ms:.1f} ms late, if seldom"
        return None


def overhead_bytes(profile: LinkProfile) -> int:
    """What the profile's rate counts on top of each IP packet."""
    return 14 if profile.layer == "ethernet" else 0


def pipe_of(profile: LinkProfile, way: Way) -> Pipe | None:
    """The profile's pipe in that direction; None: unshaped."""
    return profile.up if way == "up" else profile.down


def serialisation_ns(pipe: Pipe | None, counted_bytes: float) -> float:
    """How long so many bytes of the profile's layer take; 0 unshaped."""
    return counted_bytes * 8e9 / pipe.rate_bps if pipe else 0.0


def expected_rtt_ms(profile: LinkProfile, packet_bytes: int) -> float:
    """Of an IP packet that is answered by one of its size, on an idle link."""
    counted = packet_bytes + overhead_bytes(profile)
    return sum(pipe.delay_ns + serialisation_ns(pipe, counted) for pipe in (profile.up, profile.down) if pipe) / 1e6


def expected_message_ms(profile: LinkProfile, pipe: Pipe, size: int, packet_payload_bytes: int) -> float:
    """From the first byte sent to the last byte read, with a congestion window that never makes the sender wait."""
    packets = -(-size // packet_payload_bytes)
    headers = profile.mtu - packet_payload_bytes + overhead_bytes(profile)
    return (serialisation_ns(pipe, size + packets * headers) + pipe.delay_ns) / 1e6


def expected_goodput_bps(profile: LinkProfile, pipe: Pipe, packet_payload_bytes: int) -> float:
    """TCP payload in full packets."""
    return pipe.rate_bps * packet_payload_bytes / (profile.mtu + overhead_bytes(profile))


def wilson_interval(count: int, samples: int, deviations: float) -> tuple[float, float]:
    """The shares that explain `count` of `samples` within so many standard deviations (Wilson, 1927)."""
    share, square = count / samples, deviations**2 / samples
    centre = (share + square / 2) / (1 + square)
    half = math.sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)


class Judge:
    """One link's readings as measurements."""

    def __init__(self, profile: LinkProfile, readings: Readings, lateness: Lateness | None) -> None:
        """`lateness` is the relay's, if there is one: it tells whose fault a slow link is."""
        self._profile, self._readings, self._lateness = profile, readings, lateness

    def measurements(self) -> Iterator[Measurement]:
        yield self._rtt()
        for way in WAYS:
            yield from self._way(way)

    def _make(
        self,
        quantity: Literal["rtt", "rate", "message", "goodput", "loss"],
        direction: Literal["up", "down", "both"],
        unit: str,
        *,
        detail: str = "",
        expected: float | None,
        measured: float | None,
        tolerance: float | None,
        samples: int,
        phase: str,
        faults: tuple[str, ...] = (),
        remarks: tuple[str, ...] = (),
        why: tuple[str, ...] = (),
    ) -> Measurement:
        """`faults` fail it; `remarks` are told either way; `why` may explain a number out of tolerance."""
        if measured is None:
            faults = (*faults, self._readings.faults.get(phase, "nothing arrived"))
        off = None not in (expected, measured, tolerance) and abs(measured - expected) > tolerance  # type: ignore[operator]
        if off:
            if self._lateness and (explanation := self._lateness.explanation()):
                why = (*why, explanation)
            if self._readings.scheduling != "SCHED_FIFO":
                why = (*why, "the probe had no real-time priority")
            faults = (*faults, *why) or ("out of tolerance",)
        return Measurement(
            link=self._readings.link,
            direction=direction,
            quantity=quantity,
            detail=detail,
            unit=unit,
            expected=expected,
            measured=measured,
            tolerance=tolerance,
            samples=samples,
            verdict="FAIL" if faults else "PASS",
            note="; ".join((*faults, *remarks)),
        )

    def _rtt(self) -> Measurement:
        readings, profile = self._readings, self._profile
        faults = []
        if "echo" not in readings.faults:
            if not readings.full_packet_passed:
                faults.append(f"an unfragmented packet of the MTU, {profile.mtu} bytes, was not answered")
            if not readings.bigger_packet_refused:
                faults.append(f"a packet of {profile.mtu + 1} bytes was not refused")
        missing = readings.echoes - len(readings.rtt_ns)
        lossless = all(pipe is None or pipe.loss == 0 for pipe in (profile.up, profile.down))
        if missing and readings.rtt_ns and lossless:
            faults.append(f"{missing} of {readings.echoes} echoes were lost on a link without loss")
        expected = expected_rtt_ms(profile, readings.echo_bytes) if profile.shaped else None
        return self._make(
            "rtt",
            "both",
            "ms",
            detail=f"{readings.echo_bytes} bytes, idle",
            expected=expected,
            measured=median(readings.rtt_ns) / 1e6 if readings.rtt_ns else None,
            tolerance=max(_RTT_TOLERANCE_MS, _RTT_TOLERANCE * expected) if expected is not None else None,
            samples=len(readings.rtt_ns),
            phase="echo",
            faults=tuple(faults),
            remarks=("unshaped",) if not profile.shaped else (),
        )

    def _way(self, way: Way) -> Iterator[Measurement]:
        pipe = pipe_of(self._profile, way)
        if pipe is not None:
            yield self._rate(way, pipe)
        sizes = sorted({message.size for message in self._readings.messages if message.way == way})
        for size in sizes:
            yield self._message(way, pipe, size)
        if not sizes and "stream" in self._readings.faults:
            yield self._make("message", way, "ms", expected=None, measured=None, tolerance=None, samples=0, phase="stream")
        for bulk in self._readings.bulk:
            if bulk.way == way and bulk.span_ns:
                yield self._goodput(way, pipe, bulk.size * 8e9 / bulk.span_ns, bulk.span_ns / 1e9)
        for train in self._readings.loss:
            if train.way == way and pipe is not None:
                yield self._loss(way, pipe, train.sent, train.received)

    def _rate(self, way: Way, pipe: Pipe) -> Measurement:
        train = next((train for train in self._readings.rate if train.way == way and train.received > 1), None)
        bits = (self._profile.mtu + overhead_bytes(self._profile)) * 8
        why: tuple[str, ...] = ()
        if train and (offered_bps := train.sent * bits * 1e9 / train.offer_ns) < pipe.rate_bps:
            why = (f"{CONTENTION}: the probe could offer only {format_rate(offered_bps)}",)
        return self._make(
            "rate",
            way,
            "bit/s",
            detail="UDP, offered faster than the rate",
            expected=float(pipe.rate_bps),
            measured=(train.received - 1) * bits * 1e9 / train.span_ns if train and train.span_ns else None,
            tolerance=_RATE_TOLERANCE * pipe.rate_bps,
            samples=train.received if train else 0,
            phase="datagrams",
            why=why,
        )

    def _message(self, way: Way, pipe: Pipe | None, size: int) -> Measurement:
        readings, profile = self._readings, self._profile
        found = [message for message in readings.messages if message.way == way and message.size == size]
        expected = tolerance = None
        remarks: list[str] = []
        why: list[str] = []
        if pipe is None:
            remarks.append("unshaped")
        else:
            expected = expected_message_ms(profile, pipe, size, readings.packet_payload_bytes)
            tolerance = max(_MESSAGE_TOLERANCE_MS, _MESSAGE_TOLERANCE * expected)
            if pipe.loss:
                tolerance = None
                remarks.append("information: retransmission is part of the link that was asked for")
            elif profile.slow_start_after_idle and profile.congestion_control != "bbr":
                tolerance = None
                remarks.append("information: slow start after idle is part of the link that was asked for")
            # Both directions' delays, for the window is freed by acknowledgements.
            needed = pipe.rate_bps * sum(p.delay_ns for p in (profile.up, profile.down) if p) / 8e9
            if readings.window_bytes.get(way, 0) < needed:
                why.append(
                    f"the congestion window stayed at {readings.window_bytes.get(way, 0)} bytes, the link needs {needed:.0f}"
                )
            if retransmits := sum(message.retransmits for message in found):
                why.append(f"{retransmits} packets were sent again")
        return self._make(
            "message",
            way,
            "ms",
            detail=f"{size} bytes after idle, {profile.congestion_control}",
            expected=expected,
            measured=median(message.elapsed_ns for message in found) / 1e6,
            tolerance=tolerance,
            samples=len(found),
            phase="stream",
            remarks=tuple(remarks),
            why=tuple(why),
        )

    def _goodput(self, way: Way, pipe: Pipe | None, found: float, seconds: float) -> Measurement:
        expected = tolerance = None
        remark = "unshaped"
        if pipe is not None:
            expected = expected_goodput_bps(self._profile, pipe, self._readings.packet_payload_bytes)
            tolerance = _RATE_TOLERANCE * expected if not pipe.loss else None
            remark = "information: the congestion control decides what loss costs" if pipe.loss else ""
        return self._make(
            "goodput",
            way,
            "bit/s",
            detail=f"TCP {self._profile.congestion_control} over {seconds:.1f} s",
            expected=expected,
            measured=found,
            tolerance=tolerance,
            samples=1,
            phase="stream",
            remarks=(remark,) if remark else (),
        )

    def _loss(self, way: Way, pipe: Pipe, sent: int, received: int) -> Measurement:
        lost = sent - received
        low, high = wilson_interval(lost, sent, _LOSS_DEVIATIONS) if sent else (0.0, 1.0)
        # At p = 0 nothing may be lost; else a binomial count, and one packet for its being a count.
        deviation = _LOSS_DEVIATIONS * math.sqrt(pipe.loss * (1 - pipe.loss) / sent) + 1 / sent if pipe.loss and sent else 0.0
        return self._make(
            "loss",
            way,
            "share",
            detail="UDP, offered slower than the rate",
            expected=pipe.loss,
            measured=lost / sent if sent else None,
            tolerance=deviation,
            samples=sent,
            phase="datagrams",
            remarks=(f"{lost} of {sent} lost: between {low:.5f} and {high:.5f}",),
        )
