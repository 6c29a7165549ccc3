"""Compare the probe's readings of one link with its profile: pure functions from readings to measurements.

Echoes and TCP are compared here, UDP trains in trains.py; expect.py holds the arithmetic, verdict.py passes or fails a
comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.net.certificate import expect
from testbed.net.certificate.trains import DELAY_TOLERANCE, DELAY_TOLERANCE_MS, overload, schedule, small_packets
from testbed.net.certificate.verdict import Comparison, Fitness
from testbed.net.probe.readings import BulkTransfer, Readings
from testbed.profiles import LinkProfile, Pipe
from testbed.records import Measurement

_MESSAGE_TOLERANCE = 0.03
_MESSAGE_TOLERANCE_MS = 0.5
"""After a pause, sender, relay and receiver must each wake up, which takes 0.2 to 0.35 ms in a virtual machine."""
_GOODPUT_TOLERANCE = 0.01


def judge_still(profile: LinkProfile, readings: Readings, fitness: Fitness) -> Iterator[Measurement]:
    """Judge a link that was constant during the measurement."""
    return (comparison.judged(readings, fitness) for comparison in _comparisons(profile, readings))


def judge_varying(profile: LinkProfile, readings: Readings, fitness: Fitness, started_ns: int) -> Iterator[Measurement]:
    """Judge a link that was played from `started_ns`, CLOCK_MONOTONIC."""
    for way in LINK_DIRECTIONS:
        pipe = profile.pipe(way)
        if pipe is not None and pipe.scheduled:
            yield schedule(profile, readings, way, pipe, started_ns).judged(readings, fitness)


def _comparisons(profile: LinkProfile, readings: Readings) -> Iterator[Comparison]:
    yield _round_trip(profile, readings)
    for way in LINK_DIRECTIONS:
        pipe = profile.pipe(way)
        if pipe is not None:
            yield from small_packets(profile, readings, way, pipe)
            yield from overload(profile, readings, way, pipe)
        yield from _stream(profile, readings, way, pipe)


def _round_trip(profile: LinkProfile, readings: Readings) -> Comparison:
    faults = []
    if "echo" in readings.faults:
        faults += [readings.faults["echo"]] if readings.rtt_ns else []  # otherwise it is the reason of the row
    else:
        if not readings.full_packet_passed:
            faults.append(f"no reply to an unfragmented packet of the MTU, {profile.mtu} bytes")
        if not readings.bigger_packet_refused:
            faults.append(f"a packet of {profile.mtu + 1} bytes was not refused")
    missing = readings.echoes - len(readings.rtt_ns)
    if missing and readings.rtt_ns and not any(pipe.loss for pipe in profile.pipes):
        faults.append(f"{missing} of {readings.echoes} echoes were lost on a link without loss")
    expected = expect.rtt_ms(profile, readings.echo_bytes) if profile.shaped else None
    tolerance, chance = None, 0.0
    if expected is not None and readings.rtt_ns:
        jitter_ms = sum(pipe.jitter_ns for pipe in profile.pipes) / 1e6
        chance = expect.middle_deviation(jitter_ms, len(readings.rtt_ns))
        tolerance = max(DELAY_TOLERANCE_MS, DELAY_TOLERANCE * expected) + chance
    return Comparison(
        quantity="rtt",
        direction="both",
        detail=f"{readings.echo_bytes} bytes, idle",
        expected=expected,
        measured=median(readings.rtt_ns) / 1e6 if readings.rtt_ns else None,
        tolerance=tolerance,
        chance=chance,
        samples=len(readings.rtt_ns),
        faults=tuple(faults),
        remark="" if profile.shaped else "unshaped",
    )


# ------------------------------------------------------------------ TCP
def _stream(profile: LinkProfile, readings: Readings, way: LinkDirection, pipe: Pipe | None) -> Iterator[Comparison]:
    sizes = sorted({message.size for message in readings.messages if message.way == way})
    for size in sizes:
        yield _message(profile, readings, way, pipe, size)
    if "stream" in readings.faults:
        yield Comparison(quantity="message", direction=way)
    for bulk in readings.bulk:
        if bulk.way == way:
            if bulk.span_ns:
                yield _goodput(profile, readings, pipe, bulk)
            elif pipe is not None and _left_to_tcp(profile, pipe) is None:
                yield Comparison(quantity="goodput", direction=way)


def _left_to_tcp(profile: LinkProfile, pipe: Pipe) -> str | None:
    """Return why TCP's time is not determined by the link alone; None if it is. Acknowledgements use the other pipe."""
    if any(pipe.loss for pipe in profile.pipes):
        return "retransmission"
    if any(pipe.reorder or pipe.jitter_reorders for pipe in profile.pipes):
        return "TCP's response to reordered packets"
    if any(pipe.duplicate for pipe in profile.pipes):
        return "TCP's response to copies"
    if expect.outgrown(profile, pipe):
        return f"the response of {profile.congestion_control} to a buffer below rate times round trip"
    return None


def _message(profile: LinkProfile, readings: Readings, way: LinkDirection, pipe: Pipe | None, size: int) -> Comparison:
    messages = [message for message in readings.messages if message.way == way and message.size == size]
    expected = tolerance = reason = None
    jitter_ms, excuses = 0.0, []
    if pipe is not None:
        expected = expect.message_ms(profile, pipe, size, readings.packet_payload_bytes)
        # Jitter delays the first packets, and with them the wire; the rest follows at the rate.
        jitter_ms = 2 * pipe.jitter_ns / 1e6
        reason = _left_to_tcp(profile, pipe)
        if reason is None and profile.slow_start_after_idle and profile.congestion_control != "bbr":
            reason = "slow start after idle"
        if reason is None:
            tolerance = max(_MESSAGE_TOLERANCE_MS, _MESSAGE_TOLERANCE * expected) + jitter_ms
        # Both directions' delays count, because acknowledgements free the window.
        needed = pipe.rate_bps * profile.round_trip_ns / 8e9
        if (window := readings.window_bytes.get(way, 0)) < needed:
            excuses.append(f"the congestion window stayed at {window} bytes, the link needs {needed:.0f}")
        if retransmits := sum(message.retransmits for message in messages):
            excuses.append(f"{retransmits} packets were sent again")
    return Comparison(
        quantity="message",
        direction=way,
        detail=f"{size} bytes after idle, {profile.congestion_control}",
        expected=expected,
        measured=median(message.elapsed_ns for message in messages) / 1e6,
        tolerance=tolerance,
        chance=jitter_ms,
        samples=len(messages),
        remark=_remark(pipe, reason),
        excuses=tuple(excuses),
    )


def _goodput(profile: LinkProfile, readings: Readings, pipe: Pipe | None, bulk: BulkTransfer) -> Comparison:
    expected = tolerance = reason = None
    if pipe is not None:
        expected = expect.goodput_bps(profile, pipe, readings.packet_payload_bytes)
        if (reason := _left_to_tcp(profile, pipe)) is None:
            tolerance = _GOODPUT_TOLERANCE * expected
    return Comparison(
        quantity="goodput",
        direction=bulk.way,
        detail=f"TCP {profile.congestion_control} over {bulk.span_ns / 1e9:.1f} s",
        expected=expected,
        measured=bulk.size * 8e9 / bulk.span_ns,
        tolerance=tolerance,
        samples=1,
        remark=_remark(pipe, reason),
    )


def _remark(pipe: Pipe | None, reason: str | None) -> str:
    if pipe is None:
        return "unshaped"
    return f"information: {reason} is part of the profile" if reason else ""
