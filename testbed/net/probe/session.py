"""The measurements of one link, in an order in which none disturbs the next: idle echoes, messages, bulk, then overload."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import time
from collections.abc import Callable, Iterator

from testbed.net.probe import WAYS, Job, Readings, Way, datagrams, echo
from testbed.net.probe.stream import Stream, warm

PRIORITY = 40
"""Below the relay's: what is measured must not suffer from being measured."""
_CLONE_NEWNET = 0x40000000
_UNSHAPED_BULK_S = 0.2
_OVERLOAD, _UNDERLOAD = 1.05, 0.9
Turn = Callable[[], contextlib.AbstractContextManager[None]]
"""Entered while bytes are moved in bulk: links that share too few CPUs would measure these."""
_libc = ctypes.CDLL(None, use_errno=True)


def _enter(namespace_fd: int) -> None:
    """Move this process; it stays there. Sockets opened before stay where they are."""
    if _libc.setns(namespace_fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter a network namespace of the lab: {os.strerror(number)}")


def _socket_in(namespace_fd: int, kind: int) -> socket.socket:
    _enter(namespace_fd)
    return socket.socket(socket.AF_INET, kind)


@contextlib.contextmanager
def _phase(name: str, readings: Readings) -> Iterator[None]:
    """A phase that cannot be finished is a reading too: it is noted, and the others go on."""
    try:
        yield
    except OSError as error:
        readings.faults[name] = str(error)


def _become_real_time(job: Job) -> str:
    """The scheduling class that the kernel granted. An unshaped link is as fast as the CPU, which must not be taken from it."""
    if job.up is None and job.down is None:
        return "SCHED_OTHER"
    with contextlib.suppress(PermissionError):  # what was granted is read back
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    return "SCHED_FIFO" if os.sched_getscheduler(0) == os.SCHED_FIFO else "SCHED_OTHER"


def _patience_ns(job: Job) -> int:
    return 2 * job.round_trip_ns + 500_000_000


def _echoes(job: Job, readings: Readings) -> None:
    slowest = min((line.rate_bps for line in (job.up, job.down) if line), default=10**9)
    spacing = max(5_000_000, 4 * 8_000_000_000 * (echo.PAYLOAD_BYTES + 28) // slowest)
    _enter(job.node_fd)
    with echo.open_socket() as raw:
        readings.echoes = job.echoes
        readings.echo_bytes, readings.rtt_ns = echo.train(raw, job.hub_address, job.echoes, spacing, _patience_ns(job))
        attempts = 1 if max((line.loss for line in (job.up, job.down) if line), default=0) == 0 else 8
        readings.full_packet_passed = echo.passes(raw, job.hub_address, job.mtu, _patience_ns(job), attempts)
        readings.bigger_packet_refused = echo.refused(raw, job.hub_address, job.mtu + 1)


def _messages(job: Job, stream: Stream, readings: Readings, turn: Turn) -> None:
    readings.packet_payload_bytes = stream.packet_payload_bytes
    with turn():
        readings.window_bytes = warm(stream)
    for _ in range(job.repeats):
        for sizes in job.messages:
            time.sleep(job.idle_s)
            with turn():
                for way in WAYS:  # the other direction has been silent as long, but for acknowledgements
                    readings.messages.append(stream.message(way, sizes[way]))


def _bulk(job: Job, stream: Stream, readings: Readings) -> None:
    for way in WAYS:
        if job.line(way) is None:
            readings.bulk.append(stream.bulk(way, 0.1, job.bulk_s or _UNSHAPED_BULK_S))
        elif job.bulk_s:
            readings.bulk.append(stream.bulk(way, 1.0, job.bulk_s))


def _flows(job: Job, sockets: contextlib.ExitStack) -> list[datagrams.Flow]:
    flows = []
    ends: dict[Way, tuple[tuple[int, str], tuple[int, str]]] = {
        "up": ((job.node_fd, job.node_address), (job.hub_fd, job.hub_address)),
        "down": ((job.hub_fd, job.hub_address), (job.node_fd, job.node_address)),
    }
    for way in WAYS:
        if job.line(way) is None:
            continue
        (sender_fd, sender_address), (receiver_fd, receiver_address) = ends[way]
        receiver = sockets.enter_context(_socket_in(receiver_fd, socket.SOCK_DGRAM))
        receiver.bind((receiver_address, 0))
        sender = sockets.enter_context(_socket_in(sender_fd, socket.SOCK_DGRAM))
        sender.bind((sender_address, 0))
        sender.connect(receiver.getsockname())
        flows.append(datagrams.Flow(job, way, sender, receiver))
    return flows


def measure(job: Job, turn: Turn) -> Readings:
    """Everything that the job asks for. Phases that fail are in `faults`."""
    gc.disable()
    gc.freeze()
    readings = Readings(link=job.link, scheduling=_become_real_time(job))
    with contextlib.ExitStack() as sockets:
        flows: list[datagrams.Flow] = []
        with _phase("datagrams", readings):
            flows = _flows(job, sockets)
        with _phase("echo", readings):
            _echoes(job, readings)
        with _phase("stream", readings):
            node = sockets.enter_context(_socket_in(job.node_fd, socket.SOCK_STREAM))
            hub = sockets.enter_context(_socket_in(job.hub_fd, socket.SOCK_STREAM))
            with contextlib.closing(Stream(job, node, hub)) as stream:
                _messages(job, stream, readings, turn)
                with turn():
                    _bulk(job, stream, readings)
        with _phase("datagrams", readings):
            for flow in flows:  # one after the other: both at once would ask twice as much of the CPU
                with turn():
                    if job.loss_s:
                        readings.loss.append(flow.train(_UNDERLOAD, job.loss_s))
                    readings.rate.append(flow.train(_OVERLOAD / (1 - flow.loss), job.rate_s))
    return readings
