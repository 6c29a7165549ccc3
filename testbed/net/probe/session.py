"""Measure one link in an order in which no phase disturbs the next: idle echoes, messages, bulk, small packets,
overload.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import socket
import time
from collections.abc import Callable, Iterator

from testbed.directions import LINK_DIRECTIONS
from testbed.net.kernel.namespace import enter
from testbed.net.probe import patterns
from testbed.net.probe.datagrams import DatagramFlow, SleepTimer, exchange
from testbed.net.probe.echo import echo_train, open_echo_socket, packet_passes, packet_refused
from testbed.net.probe.job import ProbeJob
from testbed.net.probe.readings import Readings
from testbed.net.probe.sockets import socket_in
from testbed.net.probe.stream import Stream, warm

PRIORITY = 40
"""Below the relay's, so that measuring does not disturb the link."""
_UNSHAPED_BULK_S = 0.2
_OVERLOAD = 1.05
_OVERLOAD_PACKETS = 20_000
_BOTH_AT_ONCE_BPS, _FOLLOWED_AT_ONCE_BPS = 40_000_000, 200_000_000
_LONG_ROUND_TRIP_NS = 100_000_000
Turn = Callable[[], contextlib.AbstractContextManager[None]]
"""Entered during bulk transfers: links that share too few CPUs would otherwise measure CPU contention."""


@contextlib.contextmanager
def _phase(name: str, readings: Readings) -> Iterator[None]:
    """Record a phase that fails, which is a reading, too, and continue with the others."""
    try:
        yield
    except OSError as error:
        readings.faults[name] = str(error)


def _become_real_time(job: ProbeJob) -> str:
    """Ask for a real-time priority; return the scheduling class that the kernel granted.

    Not for an unshaped link, which is as fast as the CPU and must not be deprived of it.
    """
    if job.up is None and job.down is None:
        return "SCHED_OTHER"
    with contextlib.suppress(PermissionError):  # what was granted is read back
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    return "SCHED_FIFO" if os.sched_getscheduler(0) == os.SCHED_FIFO else "SCHED_OTHER"


def _patience_ns(job: ProbeJob) -> int:
    """Return the longest time to wait for a reply.

    With loss, some waits are in vain, so they are short.
    """
    shapes = [shape for shape in (job.up, job.down) if shape]
    slack = 100_000_000 if any(shape.loss for shape in shapes) else 500_000_000
    crossing = sum(shape.delay_ns + 2 * shape.jitter_ns + round(job.mtu * 8e9 / shape.rate_bps) for shape in shapes)
    return 2 * crossing + slack


def _attempts(job: ProbeJob) -> int:
    """Return the number of packets of which at least one gets a reply, except in one case in a hundred thousand."""
    answered = math.prod(1 - shape.loss for shape in (job.up, job.down) if shape)
    return 1 if answered == 1 else min(40, math.ceil(math.log(1e-5) / math.log(1 - answered)) if answered else 40)


def _echoes(job: ProbeJob, readings: Readings) -> None:
    enter(job.near_fd)
    with open_echo_socket() as raw:
        readings.echoes = job.echoes
        readings.echo_bytes, readings.rtt_ns = echo_train(
            raw, job.far_address, job.echoes, job.echo_spacing_ns, _patience_ns(job)
        )
        readings.full_packet_passed = packet_passes(raw, job.far_address, job.mtu, _patience_ns(job), _attempts(job))
        readings.bigger_packet_refused = packet_refused(raw, job.far_address, job.mtu + 1)


def _messages(job: ProbeJob, stream: Stream, readings: Readings, turn: Turn) -> None:
    readings.packet_payload_bytes = stream.packet_payload_bytes
    with turn():
        # Over a long delay this is mostly waiting.
        readings.window_bytes = warm(stream, together=job.round_trip_ns > _LONG_ROUND_TRIP_NS)
    for _ in range(job.repeats):
        for sizes in job.messages:
            time.sleep(job.idle_s)
            with turn():
                for way in LINK_DIRECTIONS:  # the other direction was equally silent, except for acknowledgements
                    readings.messages.append(stream.message(way, sizes[way]))


def _bulk(job: ProbeJob, stream: Stream, readings: Readings) -> None:
    lead_s = 1.0 + 4e-9 * job.round_trip_ns
    for way in LINK_DIRECTIONS:
        if job.shape(way) is None:
            readings.bulk.append(stream.bulk(way, 0.1, job.bulk_s or _UNSHAPED_BULK_S))
        elif job.bulk_s:
            readings.bulk.append(stream.bulk(way, lead_s, job.bulk_s))


def _flows(job: ProbeJob, sockets: contextlib.ExitStack) -> list[DatagramFlow]:
    flows = []
    near, far = (job.near_fd, job.near_address), (job.far_fd, job.far_address)
    for way, ends in zip(LINK_DIRECTIONS, ((near, far), (far, near)), strict=True):
        (sender_fd, sender_address), (receiver_fd, receiver_address) = ends
        if job.shape(way) is None:
            continue
        receiver = sockets.enter_context(socket_in(receiver_fd, socket.SOCK_DGRAM))
        receiver.bind((receiver_address, 0))
        sender = sockets.enter_context(socket_in(sender_fd, socket.SOCK_DGRAM))
        sender.bind((sender_address, 0))
        sender.connect(receiver.getsockname())
        flows.append(DatagramFlow(job, way, sender, receiver))
    return flows


def _together(flows: list[DatagramFlow], bps: float, most_bps: float) -> list[list[DatagramFlow]]:
    """Group the directions: both at once, or one after the other if both would overload the CPU."""
    return [flows] if bps <= most_bps else [[flow] for flow in flows]


def _datagrams(job: ProbeJob, flows: list[DatagramFlow], readings: Readings, timer: SleepTimer, turn: Turn) -> None:
    shapes = [flow.shape for flow in flows]
    if job.follow_s:
        for group in _together(flows, sum(shape.peak_bps for shape in shapes), _FOLLOWED_AT_ONCE_BPS):
            with turn():
                peaks = [patterns.peak(flow.shape, job.mtu, job.follow_s) for flow in group]
                readings.followed += exchange(group, peaks, timer)
        return
    with turn():
        readings.light += exchange(flows, [patterns.light(shape, job.light_s) for shape in shapes], timer)
    if job.spaced_s:
        jittery = [flow for flow in flows if flow.shape.jitter_ns]
        readings.spaced += exchange(jittery, [patterns.spaced(flow.shape, job.spaced_s) for flow in jittery], timer)
    for group in _together(flows, sum(shape.rate_bps for shape in shapes), _BOTH_AT_ONCE_BPS):
        # At most as many packets as the receiver's buffer holds, because reading takes CPU time from sending.
        seconds = [min(job.rate_s, _OVERLOAD_PACKETS * 8 * job.mtu / flow.shape.rate_bps) for flow in group]
        offered = [
            patterns.overload(flow.shape, job.mtu, _OVERLOAD, most) for flow, most in zip(group, seconds, strict=True)
        ]
        with turn():
            readings.overload += exchange(group, offered, timer)


def measure_link(job: ProbeJob, turn: Turn) -> Readings:
    """Run all measurements of the job. Failed phases are in `faults`."""
    gc.disable()
    gc.freeze()
    timer = SleepTimer()
    readings = Readings(link=job.link, scheduling=_become_real_time(job))
    with contextlib.ExitStack() as sockets:
        flows: list[DatagramFlow] = []
        with _phase("datagrams", readings):
            flows = _flows(job, sockets)
            readings.small_buffers = any(flow.small_buffers for flow in flows)
        if not job.follow_s:
            with _phase("echo", readings):
                _echoes(job, readings)
            with _phase("stream", readings):
                near = sockets.enter_context(socket_in(job.near_fd, socket.SOCK_STREAM))
                far = sockets.enter_context(socket_in(job.far_fd, socket.SOCK_STREAM))
                with contextlib.closing(Stream(job, near, far)) as stream:
                    _messages(job, stream, readings, turn)
                    with turn():
                        _bulk(job, stream, readings)
        with _phase("datagrams", readings):
            _datagrams(job, flows, readings, timer, turn)
    readings.timer = timer.lateness
    return readings
