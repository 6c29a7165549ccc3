"""Compare trains of UDP packets with a profile: delay, jitter, loss, order and copies of small packets; rate, queue and
throughput of a varying link under overload. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles
from typing import Literal

from testbed.directions import LinkDirection
from testbed.net.certificate import expect
from testbed.net.certificate.verdict import CONTENTION, Comparison
from testbed.net.probe.readings import PacketTrain, Readings
from testbed.profiles import GilbertElliott, LinkProfile, Pipe
from testbed.profiles.timeline import timeline
from testbed.units import format_rate

DELAY_TOLERANCE_MS, DELAY_TOLERANCE = 0.3, 0.01
"""Tolerance of a delay: the larger of both, the second as a share."""
_RATE_TOLERANCE = 0.01
_QUEUE_TOLERANCE = 0.1
_BURST_TOLERANCE = 0.1
_SCHEDULE_TOLERANCE = 0.02
_FEWEST_BURSTS = 10


def _train(trains: list[PacketTrain], way: LinkDirection) -> PacketTrain:
    """Return the train that arrived in one direction; an empty one if nothing arrived."""
    return next((train for train in trains if train.way == way and train.arrived), PacketTrain(way=way))


# ------------------------------------------------------------------ small packets
def small_packets(profile: LinkProfile, readings: Readings, way: LinkDirection, pipe: Pipe) -> Iterator[Comparison]:
    """Compare one direction's delay, jitter, loss, bursts of loss, order and copies."""
    train = _train(readings.light, way)
    # With jitter, only a train too sparse to bunch shows each packet's own delay.
    transit_ns = _undisturbed_ns(pipe, _train(readings.spaced, way) if pipe.jitter_ns else train)
    yield _delay(profile, way, pipe, train.packet_bytes, transit_ns)
    yield _jitter(way, pipe, transit_ns)
    yield _loss(way, pipe, train)
    if isinstance(pipe.loss, GilbertElliott):
        yield _burst(way, pipe.loss, train)
    yield _share("reordered", _overtaking(pipe, train), train.overtakers, train, pipe.mean_loss)
    yield _share("duplicated", pipe.duplicate, train.copies, train, pipe.mean_loss)


def _undisturbed_ns(pipe: Pipe, train: PacketTrain) -> list[int]:
    """Return the transit times of packets that neither waited for each other nor jumped the queue."""
    least_ns = (pipe.delay_ns - pipe.jitter_ns) / 2
    return [transit for transit in train.transit_ns if transit >= least_ns] if pipe.reorder else train.transit_ns


def _delay(
    profile: LinkProfile, way: LinkDirection, pipe: Pipe, packet_bytes: int, transit_ns: list[int]
) -> Comparison:
    expected = expect.delay_ms(profile, pipe, packet_bytes)
    chance = expect.middle_deviation(pipe.jitter_ns / 1e6, len(transit_ns)) if transit_ns else 0.0
    return Comparison(
        quantity="delay",
        direction=way,
        detail=f"{packet_bytes} bytes, one way",
        expected=expected,
        measured=median(transit_ns) / 1e6 if transit_ns else None,
        tolerance=max(DELAY_TOLERANCE_MS, DELAY_TOLERANCE * expected) + chance,
        chance=chance,
        samples=len(transit_ns),
    )


def _jitter(way: LinkDirection, pipe: Pipe, transit_ns: list[int]) -> Comparison:
    expected = pipe.jitter_ns / 1e6
    chance = expect.spread_deviation(expected, len(transit_ns)) if transit_ns else 0.0
    return Comparison(
        quantity="jitter",
        direction=way,
        detail="uniform, +-",
        expected=expected,
        measured=expect.spread(transit_ns) / 1e6 if transit_ns else None,
        tolerance=max(DELAY_TOLERANCE_MS, chance),
        chance=chance,
        samples=len(transit_ns),
    )


def _loss(way: LinkDirection, pipe: Pipe, train: PacketTrain) -> Comparison:
    loss, sent = pipe.mean_loss, train.sent
    share, remarks = None, ""
    tolerance: float | None = 0.0
    if sent:
        share, inflated = train.lost / sent, expect.inflation(pipe.loss)
        independent = max(1.0, sent / inflated)  # equivalent number of packets under independent loss
        low, high = expect.wilson_interval(round(share * independent), independent)
        if loss or train.lost:
            remarks = f"{train.lost} of {sent} lost: between {low:.5f} and {high:.5f}"
        if loss:  # a doubled packet must be lost at most twice
            tolerance = expect.share_deviation(loss, sent, inflated=inflated) + loss * pipe.duplicate
            if abs(share - loss) <= tolerance >= loss:  # no loss at all would pass as well
                tolerance, remarks = None, f"information: {sent} packets are too few for {100 * loss:.2g} %; {remarks}"
    return Comparison(
        quantity="loss",
        direction=way,
        detail="UDP, offered below the rate",
        expected=loss,
        measured=share,
        tolerance=tolerance,
        chance=tolerance or 0.0,
        samples=sent,
        remark=remarks,
    )


def _burst(way: LinkDirection, loss: GilbertElliott, train: PacketTrain) -> Comparison:
    bursts, expected = train.bursts, loss.mean_burst
    tolerance, remark = None, f"information: {bursts} bursts in {train.sent} packets are too few"
    if bursts >= _FEWEST_BURSTS:
        tolerance, remark = max(_BURST_TOLERANCE * expected, expect.burst_deviation(expected, bursts)), ""
    return Comparison(
        quantity="burst",
        direction=way,
        detail="lost in a row",
        expected=expected,
        measured=train.lost / max(1, bursts) if train.sent else None,
        tolerance=tolerance,
        chance=tolerance or 0.0,
        samples=bursts,
        remark=remark,
    )


def _overtaking(pipe: Pipe, train: PacketTrain) -> float | None:
    """Return the expected share of overtaking packets; None if the profile does not determine it."""
    # A packet alone on the link has nothing to overtake, and arrives in order.
    gap_ns = train.offer_ns / train.sent if train.sent else 0.0
    alone = pipe.reorder and pipe.delay_ns < 3_000_000 + 3 * gap_ns
    return None if pipe.jitter_reorders or alone else pipe.reorder


def _share(
    quantity: Literal["reordered", "duplicated"], expected: float | None, count: int, train: PacketTrain, loss: float
) -> Comparison:
    sent, tolerance = train.sent, None
    if expected is not None:  # lost packets may have been among them
        tolerance = expect.share_deviation(expected, sent) + expected * loss if expected and sent else 0.0
    return Comparison(
        quantity=quantity,
        direction=train.way,
        detail="of small packets",
        expected=expected,
        measured=count / sent if sent else None,
        tolerance=tolerance,
        chance=tolerance or 0.0,
        samples=sent,
        remark="information: the profile does not specify their number" if expected is None else "",
    )


# ------------------------------------------------------------------ overload
def overload(profile: LinkProfile, readings: Readings, way: LinkDirection, pipe: Pipe) -> Iterator[Comparison]:
    """Compare one direction's rate and queue."""
    train = _train(readings.overload, way)
    yield _rate(profile, pipe, train)
    if pipe.queue in (None, "fifo"):  # the others drop before they are full
        yield _queue(profile, pipe, train)


def _packet_bits(profile: LinkProfile, packet_bytes: int) -> int:
    return (packet_bytes + profile.overhead_bytes) * 8


def _rate(profile: LinkProfile, pipe: Pipe, train: PacketTrain) -> Comparison:
    measured, excuses = None, []
    tolerance, chance = _RATE_TOLERANCE * pipe.rate_bps, 0.0
    if train.span_ns:
        bits = _packet_bits(profile, train.packet_bytes)
        measured = train.counted * bits * 1e9 / train.span_ns
        # Jitter after the wire moves only the first and the last packet.
        if pipe.jitter_reorders:
            chance = 2 * pipe.jitter_ns / train.span_ns * pipe.rate_bps
            tolerance += chance
        if train.offer_ns and (offered_bps := train.sent * bits * 1e9 / train.offer_ns) < pipe.rate_bps:
            excuses.append(f"{CONTENTION}: the probe could offer only {format_rate(offered_bps)}")
    return Comparison(
        quantity="rate",
        direction=train.way,
        detail="UDP, offered above the rate",
        expected=float(pipe.rate_bps),
        measured=measured,
        tolerance=tolerance,
        chance=chance,
        samples=train.counted,
        excuses=tuple(excuses),
    )


def _queue(profile: LinkProfile, pipe: Pipe, train: PacketTrain) -> Comparison:
    """Compare the longest wait of a packet: its time under overload minus its time on an idle link."""
    transit_ns, expected = train.transit_ns, pipe.buffer_ns / 1e6
    measured, packet_ms, faults = None, 0.0, []
    if len(transit_ns) > 1:
        packet_ms = expect.serialisation_ns(pipe, train.packet_bytes + profile.overhead_bytes) / 1e6
        # Jitter after the wire does not change the median; otherwise the longest wait counts, except for rare ones.
        longest = median(transit_ns) if pipe.jitter_reorders else quantiles(transit_ns, n=20, method="inclusive")[-1]
        measured = max(0.0, longest / 1e6 - expect.delay_ms(profile, pipe, train.packet_bytes))
        if not train.lost:
            faults.append("nothing was dropped, although the offered load exceeded the rate")
    return Comparison(
        quantity="queue",
        direction=train.way,
        detail=f"{pipe.buffer_bytes} bytes, full",
        expected=expected,
        measured=measured,
        # A queue holds whole packets.
        tolerance=max(_QUEUE_TOLERANCE * expected, packet_ms + DELAY_TOLERANCE_MS),
        chance=packet_ms,
        samples=len(transit_ns),
        faults=tuple(faults),
    )


def schedule(profile: LinkProfile, readings: Readings, way: LinkDirection, pipe: Pipe, started_ns: int) -> Comparison:
    """Compare the throughput of one direction, played from `started_ns`, with its timeline."""
    train = _train(readings.followed, way)
    expected = _timeline_bytes(pipe, train, started_ns) if train.span_ns else None
    return Comparison(
        quantity="schedule",
        direction=way,
        detail=f"carried in {train.span_ns / 1e9:.1f} s while it varies",
        expected=expected,
        measured=None if expected is None else train.counted * _packet_bits(profile, train.packet_bytes) / 8,
        tolerance=None if expected is None else _SCHEDULE_TOLERANCE * expected,
        samples=train.counted,
    )


def _timeline_bytes(pipe: Pipe, train: PacketTrain, started_ns: int) -> float:
    """Return the bytes that the wire carries while the packets arrive, one delay earlier.

    Neither side counts copies and packets that jump the queue.
    """
    shape, since = timeline(pipe), (train.end_ns - train.span_ns - started_ns, train.end_ns - started_ns)
    begin, end = (max(0, at - shape.at(max(0, at)).delay_ns) for at in since)
    return shape.bits_between(begin, end) / 8
