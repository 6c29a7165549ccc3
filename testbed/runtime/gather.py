"""The barrier of all places at the end of a step. No torch.

`Gather` is an all-gather of a few numbers over Unix sockets, which uses no shaped link; place 0 is the hub. It is also
a barrier: no place leaves `exchange` before all have entered it.
"""

from __future__ import annotations

import contextlib
import json
import math
import select
import socket
from collections.abc import Sequence
from typing import Any

from testbed.errors import TransportError

_LARGEST_BYTES = 128 * 1024  # fits a Unix socket's default buffer (208 KiB)


def make_sockets(stages: int) -> tuple[tuple[socket.socket, ...], ...]:
    """Make the sockets of each stage, by stage: stage 0 has one to every other, in order; the others have one to stage
    0.
    """
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1, stages)]
    return (tuple(hub for hub, _ in pairs), *((rim,) for _, rim in pairs))


class Gather:
    """One stage's end. Owns its sockets."""

    def __init__(self, stage: int, sockets: Sequence[socket.socket], timeout_s: float) -> None:
        self._stage, self._sockets, self._timeout_s = stage, tuple(sockets), timeout_s
        self._announced: int | None = None
        for sock in self._sockets:
            sock.settimeout(timeout_s)

    def exchange(self, value: Any) -> list[Any]:
        """Exchange JSON values, with exact numbers; returns the values of all places, by place. TransportError when a
        place is lost or late.
        """
        mine = json.dumps(value, separators=(",", ":")).encode()
        if self._stage == 0:
            parts = [mine, *(self._receive(peer + 1, sock) for peer, sock in enumerate(self._sockets))]
            merged = b"[" + b",".join(parts) + b"]"
            for peer, sock in enumerate(self._sockets):
                self._send(peer + 1, sock, merged)
        else:
            self._send(0, self._sockets[0], mine)
            while self._note(merged := self._receive(0, self._sockets[0])):
                pass
        return list(json.loads(merged))

    def announce(self, value: int) -> None:
        """Send a number from the hub to all others without waiting; they read it with `announced`. Elsewhere, do
        nothing.

        A place that sees any later action of the hub, by any route, also sees the number.
        """
        for sock in self._sockets if self._stage == 0 else ():
            with contextlib.suppress(OSError):  # skip places that are gone
                sock.send(json.dumps(value).encode())

    def announced(self) -> int | None:
        """Return the number that the hub has announced; None before, and always None at the hub."""
        if self._announced is None and self._stage != 0 and select.select([self._sockets[0]], [], [], 0)[0]:
            with contextlib.suppress(TransportError):  # waiting for the hub's messages reveals its loss
                self._note(self._receive(0, self._sockets[0]))
        return self._announced

    def _note(self, data: bytes) -> bool:
        """Store the data if it is an announcement."""
        said = json.loads(data)
        if isinstance(said, int):
            self._announced = said
        return isinstance(said, int)

    def _send(self, peer: int, sock: socket.socket, data: bytes) -> None:
        assert len(data) < _LARGEST_BYTES
        try:
            sock.send(data)
        except OSError as error:
            raise self._lost(peer, error) from None

    def _receive(self, peer: int, sock: socket.socket) -> bytes:
        try:
            data = sock.recv(_LARGEST_BYTES)
        except OSError as error:
            raise self._lost(peer, error) from None
        if not data:
            raise TransportError(f"stage {self._stage}: stage {peer} ended before the end of the step")
        return data

    def _lost(self, peer: int, error: OSError) -> TransportError:
        if isinstance(error, TimeoutError):
            return TransportError(
                f"stage {self._stage}: stage {peer} did not end the step within {self._timeout_s:g} s"
            )
        return TransportError(f"stage {self._stage}: stage {peer} is lost: {error.strerror}")

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


def global_norm(squares: Sequence[float]) -> float:
    """Return the root of the sum of squared norms, summed without rounding: the same for every order, hence for every
    split.
    """
    return math.sqrt(math.fsum(squares))
