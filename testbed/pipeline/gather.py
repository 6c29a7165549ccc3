"""All-gather of a few numbers between the stages of a job, over Unix sockets: it uses no shaped link. Stage 0 is the hub.

It is also what ends a step: nobody leaves `exchange` before everybody has entered it.
"""

from __future__ import annotations

import itertools
import math
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from testbed.errors import TransportError

_LARGEST_BYTES = 128 * 1024  # fits a Unix socket's default buffer (208 KiB)


def make_sockets(stages: int) -> tuple[tuple[socket.socket, ...], ...]:
    """The sockets that each stage needs, by stage: stage 0 one to every other, in order; the others one to stage 0."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1, stages)]
    return (tuple(hub for hub, _ in pairs), *((rim,) for _, rim in pairs))


class Met(NamedTuple):
    """What all stages know alike after they have met, so that all decide alike."""

    line_ns: int
    """When the last action of all ended."""
    left_ns: int
    """When what came before was over at all stages."""
    asked: bool
    """Whether a stage was asked to finish."""
    loss: float
    """The last stage's; NaN where it had none to tell."""
    norm: float
    """Of the whole model's gradient."""


class Gather:
    """One stage's end. Owns its sockets."""

    def __init__(self, stage: int, sockets: Sequence[socket.socket], timeout_s: float) -> None:
        self._stage, self._sockets, self._timeout_s = stage, tuple(sockets), timeout_s
        for sock in self._sockets:
            sock.settimeout(timeout_s)

    def exchange(self, values: Sequence[float]) -> list[float]:
        """The values of all stages, by stage. TransportError when a stage is lost or does not come in time."""
        mine = struct.pack(f"{len(values)}d", *values)
        if self._stage == 0:
            parts = [mine, *(self._receive(peer + 1, sock) for peer, sock in enumerate(self._sockets))]
            merged = b"".join(parts)
            for peer, sock in enumerate(self._sockets):
                self._send(peer + 1, sock, merged)
        else:
            self._send(0, self._sockets[0], mine)
            merged = self._receive(0, self._sockets[0])
        return [value for (value,) in struct.iter_unpack("d", merged)]

    def meet(
        self,
        line_ns: int,
        *,
        left_ns: int,
        asked: bool = False,
        loss: float | None = None,
        squares: Sequence[float] = (),
    ) -> Met:
        """The end of a step or evaluation: tell the others and hear what all of them tell.

        `line_ns` is when this stage's last action ended, `left_ns` when what came before was over, `asked` whether it was asked
        to finish, `loss` the last stage's loss, `squares` the squared norms of its gradients.
        """
        mine = [line_ns, left_ns, asked, math.nan if loss is None else loss, len(squares), *squares]
        rest = iter(self.exchange(mine))
        lines, lefts, asks, losses = [], [], [], []
        norms: list[float] = []
        for line in rest:
            left, ask, found, count = itertools.islice(rest, 4)
            lines.append(line)
            lefts.append(left)
            asks.append(ask)
            losses.append(found)
            norms.extend(itertools.islice(rest, int(count)))
        return Met(int(max(lines)), int(max(lefts)), any(asks), losses[-1], global_norm(norms))

    def _send(self, peer: int, sock: socket.socket, data: bytes) -> None:
        assert len(data) < _LARGEST_BYTES
        try:
            sock.send(b"\0" + data)  # never empty: an empty packet reads like a closed socket
        except OSError as error:
            raise self._lost(peer, error) from None

    def _receive(self, peer: int, sock: socket.socket) -> bytes:
        try:
            data = sock.recv(_LARGEST_BYTES)
        except OSError as error:
            raise self._lost(peer, error) from None
        if not data:
            raise TransportError(f"stage {self._stage}: stage {peer} ended before the end of the step")
        return data[1:]

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
    """Root of the sum of squared norms, summed without rounding: the same for every order, hence for every split."""
    return math.sqrt(math.fsum(squares))
