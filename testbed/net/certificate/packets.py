"""Echoes and UDP packets, judged: round trip, delay, jitter, loss, order, copies; and under overload rate, queue and schedule."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles
from typing import Literal

from testbed.net.certificate import expect
from testbed.net.certificate.fitness import CONTENTION
from testbed.net.certificate.verdict import Verdicts
from testbed.net.probe import Span, Train, Way
from testbed.profiles import GilbertElliott, Pipe
from testbed.profiles.timeline import timeline
from testbed.records import Measurement
from testbed.units import format_rate

_DELAY_TOLERANCE_MS, _DELAY_TOLERANCE = 0.3, 0.01
_RATE_TOLERANCE = 0.01
_QUEUE_TOLERANCE = 0.1
_BURST_TOLERANCE = 0.1
_SCHEDULE_TOLERANCE = 0.02
_FEWEST_BURSTS = 10


class PacketVerdicts(Verdicts):
    """Of one link."""

    def _train(self, trains: list[Train], way: Way) -> Train | None:
        return next((train for train in trains if train.way == way and train.arrived), None)

    # ---------------------------------------------------------------- echoes
    def rtt(self) -> Measurement:
        readings, profile = self._readings, self._profile
        pipes = [pipe for pipe in (profile.up, profile.down) if pipe]
        faults = []
        if "echo" not in readings.faults:
            if not readings.full_packet_passed:
                faults.append(f"an unfragmented packet of the MTU, {profile.mtu} bytes, was not answered")
            if not readings.bigger_packet_refused:
                faults.append(f"a packet of {profile.mtu + 1} bytes was not refused")
        missing = readings.echoes - len(readings.rtt_ns)
        if missing and readings.rtt_ns and not any(pipe.loss for pipe in pipes):
            faults.append(f"{missing} of {readings.echoes} echoes were lost on a link without loss")
        expected = expect.rtt_ms(profile, readings.echo_bytes) if profile.shaped else None
        tolerance = None
        if expected is not None and readings.rtt_ns:
            jitter_ms = sum(pipe.jitter_ns for pipe in pipes) / 1e6
            chance = expect.middle_deviation(jitter_ms, len(readings.rtt_ns))
            tolerance = max(_DELAY_TOLERANCE_MS, _DELAY_TOLERANCE * expected) + chance
        return self._make(
            "rtt",
            "both",
            "ms",
            detail=f"{readings.echo_bytes} bytes, idle",
            expected=expected,
            measured=median(readings.rtt_ns) / 1e6 if readings.rtt_ns else None,
            tolerance=tolerance,
            samples=len(readings.rtt_ns),
            phase="echo",
            faults=tuple(faults),
            remarks=("unshaped",) if not profile.shaped else (),
        )

    # ---------------------------------------------------------------- small packets
    def light(self, way: Way, pipe: Pipe) -> Iterator[Measurement]:
        train = self._train(self._readings.light, way)
        yield self._delay(way, pipe, train)
        yield self._jitter(way, pipe, train)
        yield self._loss(way, pipe, train)
        if isinstance(pipe.loss, GilbertElliott):
            yield self._burst(way, pipe.loss, train)
        yield self._reordered(way, pipe, train)
        yield self._share("duplicated", way, pipe.duplicate, train.copies if train else None, train, pipe.mean_loss)

    def _apart(self, way: Way, pipe: Pipe, train: Train | None) -> list[int]:
        """Transit times of packets that did not wait for each other."""
        if pipe.jitter_ns:
            train = self._train(self._readings.spaced, way)
        found = train.transit_ns if train else []
        # What left at once took no part in the delay.
        return (
            [transit for transit in found if transit >= (pipe.delay_ns - pipe.jitter_ns) / 2] if pipe.reorder else found
        )

    def _delay(self, way: Way, pipe: Pipe, train: Train | None) -> Measurement:
        transit = self._apart(way, pipe, train)
        packet_bytes = train.packet_bytes if train else 0
        expected = expect.delay_ms(self._profile, pipe, packet_bytes)
        chance = expect.middle_deviation(pipe.jitter_ns / 1e6, len(transit)) if transit else 0.0
        return self._make(
            "delay",
            way,
            "ms",
            detail=f"{packet_bytes} bytes, one way",
            expected=expected,
            measured=median(transit) / 1e6 if transit else None,
            tolerance=max(_DELAY_TOLERANCE_MS, _DELAY_TOLERANCE * expected) + chance,
            samples=len(transit),
            phase="datagrams",
        )

    def _jitter(self, way: Way, pipe: Pipe, train: Train | None) -> Measurement:
        transit = self._apart(way, pipe, train)
        expected = pipe.jitter_ns / 1e6
        chance = expect.spread_deviation(expected, len(transit)) if transit else 0.0
        return self._make(
            "jitter",
            way,
            "ms",
            detail="uniform, +-",
            expected=expected,
            measured=expect.spread(transit) / 1e6 if transit else None,
            tolerance=max(_DELAY_TOLERANCE_MS, chance),
            samples=len(transit),
            phase="datagrams",
        )

    def _loss(self, way: Way, pipe: Pipe, train: Train | None) -> Measurement:
        loss, sent = pipe.mean_loss, train.sent if train else 0
        remarks: tuple[str, ...] = ()
        tolerance = 0.0
        if train:
            inflated = expect.inflation(pipe.loss)
            low, high = expect.wilson_interval(train.lost, max(1.0, train.sent / inflated))
            share = train.lost / train.sent
            if inflated != 1:  # the interval is about the share, as if of fewer packets
                low, high = expect.wilson_interval(round(share * max(1.0, sent / inflated)), max(1.0, sent / inflated))
            if loss or train.lost:
                remarks = (f"{train.lost} of {sent} lost: between {low:.5f} and {high:.5f}",)
            if loss:  # a packet that is doubled must be lost twice, at most
                tolerance = expect.share_deviation(loss, sent, inflated=inflated) + loss * pipe.duplicate
        return self._make(
            "loss",
            way,
            "share",
            detail="UDP, offered slower than the rate",
            expected=loss,
            measured=train.lost / train.sent if train else None,
            tolerance=tolerance,
            samples=sent,
            phase="datagrams",
            remarks=remarks,
        )

    def _burst(self, way: Way, loss: GilbertElliott, train: Train | None) -> Measurement:
        bursts = train.bursts if train else 0
        enough = bursts >= _FEWEST_BURSTS
        expected = loss.mean_burst
        chance = expect.burst_deviation(expected, bursts) if enough else 0.0
        nothing = train is not None and bursts == 0
        return self._make(
            "burst",
            way,
            "packets",
            detail="lost in a row",
            expected=expected,
            measured=train.lost / bursts if train and bursts else 0.0 if nothing else None,
            tolerance=max(_BURST_TOLERANCE * expected, chance) if enough else None,
            samples=bursts,
            phase="datagrams",
            remarks=()
            if enough
            else (f"information: {bursts} bursts in {train.sent if train else 0} packets are too few",),
        )

    def _reordered(self, way: Way, pipe: Pipe, train: Train | None) -> Measurement:
        # Nothing to overtake: a packet that is all alone on the link arrives in order whatever it skips.
        gap_ns = train.offer_ns / train.sent if train and train.sent else 0.0
        if pipe.jitter_reorders:
            return self._share("reordered", way, None, train.overtakers if train else None, train, 0.0)
        if pipe.reorder and pipe.delay_ns < 3_000_000 + 3 * gap_ns:
            return self._share("reordered", way, None, train.overtakers if train else None, train, 0.0)
        return self._share("reordered", way, pipe.reorder, train.overtakers if train else None, train, pipe.mean_loss)

    def _share(
        self,
        quantity: Literal["reordered", "duplicated"],
        way: Way,
        expected: float | None,
        count: int | None,
        train: Train | None,
        loss: float,
    ) -> Measurement:
        sent = train.sent if train else 0
        tolerance = None
        if expected is not None:  # some of them were lost as well
            tolerance = expect.share_deviation(expected, sent) + expected * loss if expected and sent else 0.0
        return self._make(
            quantity,
            way,
            "share",
            detail="of small packets",
            expected=expected,
            measured=count / sent if count is not None and sent else None,
            tolerance=tolerance,
            samples=sent,
            phase="datagrams",
            remarks=("information: how many is not part of what was asked for",) if expected is None else (),
        )

    # ---------------------------------------------------------------- overload
    def overload(self, way: Way, pipe: Pipe) -> Iterator[Measurement]:
        train = self._train(self._readings.overload, way)
        yield self._rate(way, pipe, train)
        yield self._queue(way, pipe, train)

    def _packet_bits(self, packet_bytes: int) -> int:
        return (packet_bytes + self._profile.overhead_bytes) * 8

    def _rate(self, way: Way, pipe: Pipe, train: Train | None) -> Measurement:
        why: tuple[str, ...] = ()
        measured = None
        tolerance = _RATE_TOLERANCE * pipe.rate_bps
        if train and train.span_ns:
            bits = self._packet_bits(train.packet_bytes)
            measured = train.counted * bits * 1e9 / train.span_ns
            # Behind the wire jitter moves the first and the last packet, and nothing else.
            if pipe.jitter_reorders:
                tolerance += 2 * pipe.jitter_ns / train.span_ns * pipe.rate_bps
            if train.offer_ns and (offered_bps := train.sent * bits * 1e9 / train.offer_ns) < pipe.rate_bps:
                why = (f"{CONTENTION}: the probe could offer only {format_rate(offered_bps)}",)
        return self._make(
            "rate",
            way,
            "bit/s",
            detail="UDP, offered faster than the rate",
            expected=float(pipe.rate_bps),
            measured=measured,
            tolerance=tolerance,
            samples=train.counted if train else 0,
            phase="datagrams",
            why=why,
        )

    def _queue(self, way: Way, pipe: Pipe, train: Train | None) -> Measurement:
        """What a packet waits at most: how long it takes under overload, less what it takes on an idle link."""
        transit = train.transit_ns if train else []
        expected = pipe.buffer_ns / 1e6
        measured = None
        faults: tuple[str, ...] = ()
        packet_ms = 0.0
        if train and len(transit) > 1:
            packet_ms = expect.serialisation_ns(pipe, train.packet_bytes + self._profile.overhead_bytes) / 1e6
            # Of jitter behind the wire the middle is free; else the longest wait counts, but for what is seldom.
            longest = median(transit) if pipe.jitter_reorders else quantiles(transit, n=20, method="inclusive")[-1]
            measured = max(0.0, longest / 1e6 - expect.delay_ms(self._profile, pipe, train.packet_bytes))
            if not train.lost:
                faults = ("nothing was dropped, though more was offered than the link carries",)
        return self._make(
            "queue",
            way,
            "ms",
            detail=f"{pipe.buffer_bytes} bytes, full",
            expected=expected,
            measured=measured,
            # A queue holds whole packets.
            tolerance=max(_QUEUE_TOLERANCE * expected, packet_ms + _DELAY_TOLERANCE_MS),
            samples=len(transit),
            phase="datagrams",
            faults=faults,
        )

    def schedule(self, way: Way, pipe: Pipe, started_ns: int) -> Measurement:
        span = next((span for span in self._readings.spans if span.way == way and span.end_ns > span.begin_ns), None)
        expected = measured = None
        if span:
            expected, measured = self._asked_bytes(pipe, span, started_ns), self._found_bytes(span)
        seconds = (span.end_ns - span.begin_ns) / 1e9 if span else 0.0
        return self._make(
            "schedule",
            way,
            "bytes",
            detail=f"carried in {seconds:.1f} s while it varies",
            expected=expected,
            measured=measured,
            tolerance=_SCHEDULE_TOLERANCE * expected if expected is not None else None,
            samples=span.packets if span else 0,
            phase="datagrams",
        )

    def _asked_bytes(self, pipe: Pipe, span: Span, started_ns: int) -> float:
        """What the wire carries in that time, a delay earlier. Copies and what jumps the queue are not counted either side."""
        shape = timeline(pipe)
        begin, end = (
            at - started_ns - shape.at(max(0, at - started_ns)).delay_ns for at in (span.begin_ns, span.end_ns)
        )
        return shape.bits_between(max(0, begin), max(0, end)) / 8

    def _found_bytes(self, span: Span) -> float:
        return span.packets * self._packet_bits(span.packet_bytes) / 8
