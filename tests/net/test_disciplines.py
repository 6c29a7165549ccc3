"""What queue disciplines promise two flows that fill a link, and a small packet beside them; on the virtual clock."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from statistics import median
from typing import NamedTuple

import pytest

from testbed.net.kernel import sysctl
from testbed.net.lab import Lab, LabSpec
from testbed.profiles import LinkProfile, Pipe
from testbed.profiles.link_profile import Queue

pytestmark = [pytest.mark.netem, pytest.mark.virtual_clock]
RATE_BPS, DELAY_MS = 10_000_000, 25
SECONDS = 20.0
_CONGESTION = 13


class Seen(NamedTuple):
    shares: list[float]
    """Of the two flows, over the last 60 %."""
    total_bps: float
    """Of TCP payload, together."""
    ping_ms: float
    """Median of a small packet's one-way time, more than the link's delay."""


def flood(queue: Queue | None, algorithms: tuple[str, str]) -> Seen:
    pipe = Pipe.plain(rate_bps=RATE_BPS, delay_ns=DELAY_MS * 10**6, buffer_bytes=625_000, queue=queue)
    profile = LinkProfile(
        name="t",
        summary="t",
        source="t",
        layer="ip",
        mtu=1500,
        congestion_control="cubic",
        slow_start_after_idle=False,
        up=pipe,
        down=pipe,
    )
    spec = LabSpec(topology="line", profiles=(profile,), nodes=2, engine="netem", engine_reason="a test")
    for algorithm in algorithms:
        sysctl.require_congestion_control(algorithm)
    with Lab(spec, follow=False) as lab, contextlib.ExitStack() as stack:
        near, far = lab.nodes
        with far.namespace.entered():
            listener = stack.enter_context(socket.create_server(("10.78.0.2", 5000)))
            echoes = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            echoes.bind(("10.78.0.2", 6000))
        with near.namespace.entered():
            senders = [stack.enter_context(socket.socket()) for _ in algorithms]
            pinger = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        receivers = []
        for sender, algorithm in zip(senders, algorithms, strict=True):
            sender.connect(("10.78.0.2", 5000))
            sender.setsockopt(socket.IPPROTO_TCP, _CONGESTION, algorithm.encode())  # the route's is set by connect
            receivers.append(stack.enter_context(listener.accept()[0]))
        time.sleep(1 - time.monotonic() % 1)
        began = time.monotonic()
        got: list[list[tuple[float, int]]] = [[] for _ in receivers]
        waits: list[float] = []

        def send(sender: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while time.monotonic() < began + SECONDS:
                    sender.sendall(bytes(1 << 15))
            sender.shutdown(socket.SHUT_WR)

        def receive(receiver: socket.socket, marks: list[tuple[float, int]]) -> None:
            while taken := receiver.recv(1 << 16):
                marks.append((time.monotonic() - began, len(taken)))

        def ping() -> None:
            while time.monotonic() < began + SECONDS:
                pinger.sendto(str(time.monotonic_ns()).encode(), ("10.78.0.2", 6000))
                time.sleep(0.02)

        def answer() -> None:
            echoes.settimeout(3)
            with contextlib.suppress(TimeoutError):
                while True:
                    sent_ns = int(echoes.recv(100))
                    waits.append((time.monotonic_ns() - sent_ns) / 1e6 - DELAY_MS)

        threads = [threading.Thread(target=send, args=(sender,)) for sender in senders]
        threads += [threading.Thread(target=receive, args=pair) for pair in zip(receivers, got, strict=True)]
        threads += [threading.Thread(target=ping), threading.Thread(target=answer)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    begin = 0.4 * SECONDS
    sums = [sum(size for at, size in marks if begin < at <= SECONDS) for marks in got]
    total = sum(sums)
    seen = Seen([each / total for each in sums], total * 8 / (SECONDS - begin), median(waits[len(waits) // 3 :]))
    print(queue, algorithms, seen)
    return seen


PAYLOAD = 1448 / 1500


@pytest.mark.parametrize("queue", [None, "fifo"])
def test_a_full_buffer_delays_everything(queue: Queue | None) -> None:
    seen = flood(queue, ("cubic", "cubic"))
    assert seen.ping_ms > 250
    assert seen.total_bps == pytest.approx(PAYLOAD * RATE_BPS, rel=0.01)


@pytest.mark.parametrize("algorithms", [("cubic", "cubic"), ("cubic", "bbr")])
@pytest.mark.parametrize("queue", ["fq_codel", "cake"])
def test_fair_queues_share_equally_and_delay_nothing_else(queue: Queue, algorithms: tuple[str, str]) -> None:
    seen = flood(queue, algorithms)
    # A flow that has just backed off is not always waiting for its turn.
    assert seen.shares[0] == pytest.approx(0.5, abs=0.03 if algorithms[0] == algorithms[1] else 0.05)
    assert seen.ping_ms < 5
    assert seen.total_bps > 0.9 * PAYLOAD * RATE_BPS


def test_red_keeps_its_queue_between_its_thresholds() -> None:
    seen = flood("red", ("cubic", "cubic"))
    # 26 and 78 kB of a buffer of 625 take 21 and 63 ms at this rate.
    assert 10 < seen.ping_ms < 70
    assert seen.total_bps > 0.9 * PAYLOAD * RATE_BPS
