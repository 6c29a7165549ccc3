"""What a boundary measures of its link: bytes acknowledged, and the time that the link took for them."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.pipeline import sockinfo
from testbed.pipeline.port import Port
from testbed.pipeline.sockinfo import Progress


def test_progress_of_a_real_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        peer, _ = server.accept()
        with peer:
            before = sockinfo.read_progress(client)
            client.sendall(bytes(100_000))
            got = 0
            while got < 100_000:
                got += len(peer.recv(65536))
            until = time.monotonic() + 5
            while not (now := sockinfo.read_progress(client)).idle and time.monotonic() < until:
                time.sleep(0.01)
            assert now.acked_bytes - before.acked_bytes == 100_000
            assert now.idle
            assert before.busy_s <= now.busy_s < 5


def test_a_round_trip_after_a_pause_is_not_the_links_time(monkeypatch: pytest.MonkeyPatch) -> None:
    connection: Any = SimpleNamespace(socket=None)
    port = Port("downstream", connection=connection, timeout_s=1)
    told = iter(
        [
            Progress(0, 0.02, 0.04, idle=False),  # nothing acknowledged yet: it counts with what follows
            Progress(1000, 0.14, 0.04, idle=False),
            Progress(3000, 0.34, 0.04, idle=True),
            Progress(3000, 0.34, 0.04, idle=True),
            Progress(4000, 0.48, 0.04, idle=True),
        ]
    )
    monkeypatch.setattr(sockinfo, "read_progress", lambda _: next(told))
    found = [port.progress() for _ in range(5)]
    assert [acked for acked, _ in found] == [0, 1000, 2000, 0, 1000]
    assert [seconds for _, seconds in found] == pytest.approx([0, 0.1, 0.2, 0, 0.1])
