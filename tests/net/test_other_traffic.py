"""What others send over a link, beside streams of the lab's nodes: each gets what the discipline promises."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Sequence

import pytest

from testbed import spec
from testbed.errors import SpecError
from testbed.net.lab import Lab, LabSpec
from testbed.profiles import load_profile

RATE = 10.0
CALL = 2.6 * (1083.3 + 28) / 1083.3
"""On the wire: six packets each 20 ms."""
PAYLOAD, CALLS = 1448 / 1500, {"call 2.6Mbit": 1083.3 / 1111.3, "call 8Mbit": 1176.5 / 1204.5}
NETEM = [pytest.mark.netem, pytest.mark.virtual_clock]


def shared(engine: spec.Engine, queue: str, background: str, senders: Sequence[int], seconds: float) -> list[float]:
    """Return the Mbit/s on the wire of each sender's stream and of each background flow, over `seconds`.

    Nodes 0 and 1 are behind one link of 10 Mbit/s, and so are the background flows; all send to node 2 or the hub.
    One of the two alone is a node with that link of its own.
    """
    access = load_profile(f"link(10Mbit, 5ms, buffer=100ms, queue={queue}, background={background})")
    plain = load_profile("link(1Gbit, 0ms, buffer=1s)")
    site = (spec.SiteSpec(nodes=(0, 1), profile=access),) if len(senders) > 1 else None
    profiles = (plain, plain, plain) if site else (access, plain, plain)
    wanted = LabSpec(topology="star", profiles=profiles, nodes=3, sites=site, engine=engine, engine_reason="a test")
    with Lab(wanted, follow=False) as lab, contextlib.ExitStack() as stack:
        target = lab.nodes[2]
        with target.namespace.entered():
            listener = stack.enter_context(socket.create_server((target.address, 5000)))
        ends = []
        for node in senders:
            with lab.nodes[node].namespace.entered():
                sender = stack.enter_context(socket.socket())
            sender.connect((target.address, 5000))
            ends.append((sender, stack.enter_context(listener.accept()[0])))
        carried, over = [0] * len(ends), threading.Event()

        def send(sender: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while not over.is_set():
                    sender.sendall(bytes(1 << 15))

        def receive(place: int, receiver: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while not over.is_set():
                    carried[place] += len(receiver.recv(1 << 16))

        threads = [threading.Thread(target=send, args=(sender,)) for sender, _ in ends]
        threads += [threading.Thread(target=receive, args=(place, end)) for place, (_, end) in enumerate(ends)]
        start_ns = lab.play()
        for thread in threads:
            thread.start()
        time.sleep(2)  # slow start, and flows that begin within a tenth of a second
        begun = [*carried, *_background(lab)]
        before_ns = time.monotonic_ns()
        time.sleep(seconds)
        ended = [*carried, *_background(lab)]
        lasted_ns = time.monotonic_ns() - before_ns
        over.set()
        for sender, _ in ends:
            sender.shutdown(socket.SHUT_RDWR)
        lab.hold()
        for thread in threads:
            thread.join()
        assert lab.record.background is not None
        assert lab.record.played_at_ns == start_ns
        kinds = [PAYLOAD] * len(ends)
        for each in lab.record.background:
            assert each.carried_bytes > 0
            assert each.lasted_ns >= seconds * 1e9
            kinds.append(CALLS.get(each.flow.rpartition(" ")[0], PAYLOAD))
    found = [(after - before) * 8e3 / lasted_ns / kind for before, after, kind in zip(begun, ended, kinds, strict=True)]
    print(engine, queue, background, senders, [round(rate, 3) for rate in found], round(sum(found), 3))
    return found


def _background(lab: Lab) -> list[int]:
    assert lab._background is not None
    return [each.carried_bytes for each in lab._background.carried()]


@pytest.mark.parametrize("senders", [(0,), (0, 1)], ids=["link", "site"])
@pytest.mark.parametrize("background", ["1 cubic up", "1 bbr up", "call up"])
@pytest.mark.parametrize(
    ("engine", "seconds"), [pytest.param("netem", 20, marks=NETEM), pytest.param("relay", 6, marks=pytest.mark.root)]
)
def test_a_fifo_is_never_idle(engine: spec.Engine, seconds: float, background: str, senders: tuple[int, ...]) -> None:
    for _ in range(3 if engine == "relay" else 1):  # on the real clock a busy machine holds senders up
        found = shared(engine, "fifo", background, senders, seconds)
        if sum(found) == pytest.approx(RATE, rel=0.01):
            break
    assert sum(found) == pytest.approx(RATE, rel=0.01)
    assert min(found) > 0.1 * RATE


@pytest.mark.netem
@pytest.mark.virtual_clock
@pytest.mark.parametrize(
    ("queue", "background", "senders", "expected"),
    [
        ("fifo", "call up", (0,), (RATE - CALL, CALL)),
        *(
            (queue, background, (0,), (5, 5))
            for queue in ("fq_codel", "cake")
            for background in ("1 cubic up", "1 bbr up")
        ),
        ("fq_codel", "call up", (0,), (RATE - CALL, CALL)),
        ("fq_codel", "call 8Mbit up", (0,), (5, 5)),
        ("fq_codel", "1 cubic up", (0, 1), (10 / 3,) * 3),
        ("fq_codel", "1 bbr up", (0, 1), (10 / 3,) * 3),
        ("fq_codel", "call up", (0, 1), ((RATE - CALL) / 2,) * 2 + (CALL,)),
        ("fq_codel", "call 8Mbit up", (0, 1), (10 / 3,) * 3),
    ],
)
def test_every_flow_gets_what_the_discipline_promises(
    queue: str, background: str, senders: tuple[int, ...], expected: tuple[float, ...]
) -> None:
    assert shared("netem", queue, background, senders, 20) == pytest.approx(expected, rel=0.01)


@pytest.mark.netem
@pytest.mark.virtual_clock
@pytest.mark.parametrize("background", ["1 cubic up", "1 bbr up"])
def test_cake_shares_between_hosts_then_between_the_flows_of_each(background: str) -> None:
    """Both streams are to node 2. A host's only flow is not always waiting for its turn, so this misses 1 %."""
    assert shared("netem", "cake", background, (0, 1), 60) == pytest.approx((2.5, 2.5, 5), rel=0.02)


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_cake_loses_nothing_of_a_flow_below_its_share() -> None:
    stream, call = shared("netem", "cake", "call up", (0,), 60)
    assert call == pytest.approx(CALL, rel=0.01)
    assert stream + call > 0.97 * RATE


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_what_is_sent_down_shares_with_nothing_that_goes_up() -> None:
    found = shared("netem", "fq_codel", "call up + call 8Mbit down", (0,), 20)
    assert found == pytest.approx((RATE - CALL, CALL, 8 * 1204.5 / 1176.5), rel=0.01)


def test_the_relay_refuses_other_disciplines_before_anything_starts() -> None:
    with pytest.raises(SpecError, match="only engine netem implements queue"):
        shared("relay", "cake", "call up", (0,), 1)
