"""Background flows in this process: what their sockets may do."""

from __future__ import annotations

import socket
import time

from testbed.net.background import _Flow
from testbed.waiting import Waiter


def test_a_datagram_whose_checksum_is_wrong_is_nobodys() -> None:
    """The kernel calls the socket readable, and finds out when it is read: then there is nothing."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
    near, far = sockets
    near.connect(far.getsockname())
    table = {"seed": 1, "way": "up", "congestion_control": None, "rate_bps": 10**6, "pause_ns": 10_000_000}
    with Waiter(0) as waiter:
        flow = _Flow(table | {"fds": [sock.detach() for sock in sockets]}, waiter)
        flow.start(time.monotonic_ns())
        (receiver,) = flow.watched
        flow.go_on(receiver)
        assert (flow.carried_bytes, list(flow.watched)) == (0, [receiver])
        flow._sockets[0].send(b"four")
        flow.go_on(receiver)
        assert flow.carried_bytes == 4
        for sock in flow._sockets:
            sock.close()
