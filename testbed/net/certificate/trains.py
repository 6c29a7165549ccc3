"""Compare trains of UDP packets with what a profile asks for: delay, jitter, loss, order and copies of small packets;
rate, queue and what a varying link carries under overload. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median, quantiles
from typing import Literal

from testbed.directions import LinkDirection
from testbed.net.certificate import expect
from testbed.net.certificate.verdict import CONTENTION, Comparison
from testbed.net.probe.readings import Outflow, PacketTrain, Readings
from testbed.profiles import GilbertElliott, LinkProfile, Pipe
from testbed.profiles.timeline import timeline
from testbed.units import format_rate

DELAY_TOLERANCE_MS, DELAY_TOLERANCE = 0.3, 0.01
"""How far a delay may be off: the larger of both, the second as a share."""
_RATE_TOLERANCE = 0.01
_QUEUE_TOLERANCE = 0.1
_BURST_TOLERANCE = 0.1
_SCHEDULE_TOLERANCE = 0.02
_FEWEST_BURSTS = 10


def _train(trains: list[PacketTrain], way: LinkDirection) -> PacketTrain | None:
    return next((train for train in trains if train.way == way and train.arrived), None)


# ------------------------------------------------------------------ small packets
def small_packets(profile: LinkProfile, readings: Readings, way: LinkDirection, pipe: Pipe) -> Iterator[Comparison]:
    """Compare one direction's delay, jitter, loss, bursts of loss, order and copies."""
    train = _train(readings.light, way)
    # Where there is jitter, only a train that it cannot push together shows each packet's own delay.
    transit_ns = _undisturbed_ns(pipe, _train(readings.spaced, way) if pipe.jitter_ns else train)
    yield _delay(profile, way, pipe, train, transit_ns)
    yield _jitter(way, pipe, transit_ns)
    yield _loss(way, pipe, train)
    if isinstance(pipe.loss, GilbertElliott):
        yield _burst(way, pipe.loss, train)
    yield _share("reordered", way, _overtaking(pipe, train), train.overtakers if train else None, train, pipe.mean_loss)
    yield _share("duplicated", way, pipe.duplicate, train.copies if train else None, train, pipe.mean_loss)


def _undisturbed_ns(pipe: Pipe, train: PacketTrain | None) -> list[int]:
    """Transit times of packets that did not wait for each other and did not jump the queue."""
    transit_ns = train.transit_ns if train else []
    least_ns = (pipe.delay_ns - pipe.jitter_ns) / 2
    return [transit for transit in transit_ns if transit >= least_ns] if pipe.reorder else transit_ns


def _delay(
    profile: LinkProfile, way: LinkDirection, pipe: Pipe, train: PacketTrain | None, transit_ns: list[int]
) -> Comparison:
    packet_bytes = train.packet_bytes if train else 0
    expected = expect.delay_ms(profile, pipe, packet_bytes)
    chance = expect.middle_deviation(pipe.jitter_ns / 1e6, len(transit_ns)) if transit_ns else 0.0
    return Comparison(
        quantity="delay",
        direction=way,
        unit="ms",
        detail=f"{packet_bytes} bytes, one way",
        expected=expected,
        measured=median(transit_ns) / 1e6 if transit_ns else None,
        tolerance=max(DELAY_TOLERANCE_MS, DELAY_TOLERANCE * expected) + chance,
        chance=chance,
        samples=len(transit_ns),
        phase="datagrams",
    )


def _jitter(way: LinkDirection, pipe: Pipe, transit_ns: list[int]) -> Comparison:
    expected = pipe.jitter_ns / 1e6
    chance = expect.spread_deviation(expected, len(transit_ns)) if transit_ns else 0.0
    return Comparison(
        quantity="jitter",
        direction=way,
        unit="ms",
        detail="uniform, +-",
        expected=expected,
        measured=expect.spread(transit_ns) / 1e6 if transit_ns else None,
        tolerance=max(DELAY_TOLERANCE_MS, chance),
        chance=chance,
        samples=len(transit_ns),
        phase="datagrams",
    )


def _loss(way: LinkDirection, pipe: Pipe, train: PacketTrain | None) -> Comparison:
    loss, sent = pipe.mean_loss, train.sent if train else 0
    remarks: tuple[str, ...] = ()
    tolerance = 0.0
    if train:
        inflated = expect.inflation(pipe.loss)
        low, high = expect.wilson_interval(train.lost, max(1.0, sent / inflated))
        if inflated != 1:  # the interval is about the share, as if of fewer packets
            fewer = max(1.0, sent / inflated)
            low, high = expect.wilson_interval(round(train.lost / sent * fewer), fewer)
        if loss or train.lost:
            remarks = (f"{train.lost} of {sent} lost: between {low:.5f} and {high:.5f}",)
        if loss:  # a packet that is doubled must be lost twice, at most
            tolerance = expect.share_deviation(loss, sent, inflated=inflated) + loss * pipe.duplicate
    return Comparison(
        quantity="loss",
        direction=way,
        unit="share",
        detail="UDP, offered slower than the rate",
        expected=loss,
        measured=train.lost / train.sent if train else None,
        tolerance=tolerance,
        chance=tolerance,
        samples=sent,
        phase="datagrams",
        remarks=remarks,
    )


def _burst(way: LinkDirection, loss: GilbertElliott, train: PacketTrain | None) -> Comparison:
    bursts = train.bursts if train else 0
    enough = bursts >= _FEWEST_BURSTS
    expected = loss.mean_burst
    measured = None
    if train:
        measured = train.lost / bursts if bursts else 0.0
    tolerance = max(_BURST_TOLERANCE * expected, expect.burst_deviation(expected, bursts)) if enough else None
    too_few = f"information: {bursts} bursts in {train.sent if train else 0} packets are too few"
    return Comparison(
        quantity="burst",
        direction=way,
        unit="packets",
        detail="lost in a row",
        expected=expected,
        measured=measured,
        tolerance=tolerance,
        chance=tolerance or 0.0,
        samples=bursts,
        phase="datagrams",
        remarks=() if enough else (too_few,),
    )


def _overtaking(pipe: Pipe, train: PacketTrain | None) -> float | None:
    """Return the share of packets that must overtake others; None where the profile does not determine it."""
    # With nothing to overtake, a packet that is all alone on the link arrives in order whatever it skips.
    gap_ns = train.offer_ns / train.sent if train and train.sent else 0.0
    alone = pipe.reorder and pipe.delay_ns < 3_000_000 + 3 * gap_ns
    return None if pipe.jitter_reorders or alone else pipe.reorder


def _share(
    quantity: Literal["reordered", "duplicated"],
    way: LinkDirection,
    expected: float | None,
    count: int | None,
    train: PacketTrain | None,
    loss: float,
) -> Comparison:
    sent = train.sent if train else 0
    tolerance = None
    if expected is not None:  # some of them were lost as well
        tolerance = expect.share_deviation(expected, sent) + expected * loss if expected and sent else 0.0
    return Comparison(
        quantity=quantity,
        direction=way,
        unit="share",
        detail="of small packets",
        expected=expected,
        measured=count / sent if count is not None and sent else None,
        tolerance=tolerance,
        chance=tolerance or 0.0,
        samples=sent,
        phase="datagrams",
        remarks=("information: how many is not part of what was asked for",) if expected is None else (),
    )


# ------------------------------------------------------------------ overload
def overload(profile: LinkProfile, readings: Readings, way: LinkDirection, pipe: Pipe) -> Iterator[Comparison]:
    """Compare one direction's rate and queue."""
    train = _train(readings.overload, way)
    yield _rate(profile, way, pipe, train)
    yield _queue(profile, way, pipe, train)


def _packet_bits(profile: LinkProfile, packet_bytes: int) -> int:
    return (packet_bytes + profile.overhead_bytes) * 8


def _rate(profile: LinkProfile, way: LinkDirection, pipe: Pipe, train: PacketTrain | None) -> Comparison:
    excuses: tuple[str, ...] = ()
    measured = None
    tolerance, chance = _RATE_TOLERANCE * pipe.rate_bps, 0.0
    if train and train.span_ns:
        bits = _packet_bits(profile, train.packet_bytes)
        measured = train.counted * bits * 1e9 / train.span_ns
        # Behind the wire jitter moves the first and the last packet, and nothing else.
        if pipe.jitter_reorders:
            chance = 2 * pipe.jitter_ns / train.span_ns * pipe.rate_bps
            tolerance += chance
        if train.offer_ns and (offered_bps := train.sent * bits * 1e9 / train.offer_ns) < pipe.rate_bps:
            excuses = (f"{CONTENTION}: the probe could offer only {format_rate(offered_bps)}",)
    return Comparison(
        quantity="rate",
        direction=way,
        unit="bit/s",
        detail="UDP, offered faster than the rate",
        expected=float(pipe.rate_bps),
        measured=measured,
        tolerance=tolerance,
        chance=chance,
        samples=train.counted if train else 0,
        phase="datagrams",
        excuses=excuses,
    )


def _queue(profile: LinkProfile, way: LinkDirection, pipe: Pipe, train: PacketTrain | None) -> Comparison:
    """Compare the longest wait of a packet: the time that it takes under overload, less the time on an idle link."""
    transit_ns = train.transit_ns if train else []
    expected = pipe.buffer_ns / 1e6
    measured = None
    faults: tuple[str, ...] = ()
    packet_ms = 0.0
    if train and len(transit_ns) > 1:
        packet_ms = expect.serialisation_ns(pipe, train.packet_bytes + profile.overhead_bytes) / 1e6
        # Jitter behind the wire leaves the middle as it is; else the longest wait counts, but for rare ones.
        longest = median(transit_ns) if pipe.jitter_reorders else quantiles(transit_ns, n=20, method="inclusive")[-1]
        measured = max(0.0, longest / 1e6 - expect.delay_ms(profile, pipe, train.packet_bytes))
        if not train.lost:
            faults = ("nothing was dropped, though more was offered than the link carries",)
    return Comparison(
        quantity="queue",
        direction=way,
        unit="ms",
        detail=f"{pipe.buffer_bytes} bytes, full",
        expected=expected,
        measured=measured,
        # A queue holds whole packets.
        tolerance=max(_QUEUE_TOLERANCE * expected, packet_ms + DELAY_TOLERANCE_MS),
        chance=packet_ms,
        samples=len(transit_ns),
        phase="datagrams",
        faults=faults,
    )


def schedule(profile: LinkProfile, readings: Readings, way: LinkDirection, pipe: Pipe, started_ns: int) -> Comparison:
    """Compare what came out of one direction while it was played from `started_ns` with what its timeline holds."""
    outflow = next(
        (outflow for outflow in readings.outflows if outflow.way == way and outflow.end_ns > outflow.begin_ns), None
    )
    expected = measured = None
    if outflow:
        expected = _timeline_bytes(pipe, outflow, started_ns)
        measured = outflow.packets * _packet_bits(profile, outflow.packet_bytes) / 8
    seconds = (outflow.end_ns - outflow.begin_ns) / 1e9 if outflow else 0.0
    return Comparison(
        quantity="schedule",
        direction=way,
        unit="bytes",
        detail=f"carried in {seconds:.1f} s while it varies",
        expected=expected,
        measured=measured,
        tolerance=_SCHEDULE_TOLERANCE * expected if expected is not None else None,
        samples=outflow.packets if outflow else 0,
        phase="datagrams",
    )


def _timeline_bytes(pipe: Pipe, outflow: Outflow, started_ns: int) -> float:
    """Return what the wire carries in that time, a delay earlier.

    Neither side counts copies and what jumps the queue.
    """
    shape = timeline(pipe)
    begin, end = (
        at - started_ns - shape.at(max(0, at - started_ns)).delay_ns for at in (outflow.begin_ns, outflow.end_ns)
    )
    return shape.bits_between(max(0, begin), max(0, end)) / 8
