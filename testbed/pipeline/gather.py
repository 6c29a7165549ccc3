"""Meet the other stages at the end of a step, and decide alike when training ends. No torch.

`Gather` is an all-gather of a few numbers over Unix sockets, which uses no shaped link; stage 0 is the hub. It also
ends a step: nobody leaves `exchange` before everybody has entered it. `Stops` decides from what all stages then know
alike, so all of them end after the same step.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import select
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

from testbed.errors import TransportError
from testbed.pipeline.control import Ended
from testbed.spec import TrainingSpec

_LARGEST_BYTES = 128 * 1024  # fits a Unix socket's default buffer (208 KiB)


def make_sockets(stages: int) -> tuple[tuple[socket.socket, ...], ...]:
    """Make the sockets that each stage needs, by stage: stage 0 has one to every other, in order; the others have one
    to stage 0.
    """
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
    squares: tuple[float, ...]
    """The squared norms of all gradients."""


class Gather:
    """One stage's end. Owns its sockets."""

    def __init__(self, stage: int, sockets: Sequence[socket.socket], timeout_s: float) -> None:
        self._stage, self._sockets, self._timeout_s = stage, tuple(sockets), timeout_s
        for sock in self._sockets:
            sock.settimeout(timeout_s)

    def exchange(self, values: Sequence[float]) -> list[float]:
        """Exchange values; returns those of all stages, by stage. TransportError when a stage is lost or does not come
        in time.
        """
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
        """End a step or evaluation: tell the others and hear what all of them tell.

        `line_ns` is when this stage's last action ended, `left_ns` when what came before was over, `asked` whether it
        was asked to finish, `loss` the last stage's loss, `squares` the squared norms of its gradients.
        """
        mine = [line_ns, left_ns, asked, math.nan if loss is None else loss, len(squares), *squares]
        rest = iter(self.exchange(mine))
        lines, lefts, asks, losses = [], [], [], []
        everybody: list[float] = []
        for line in rest:
            left, ask, stage_loss, count = itertools.islice(rest, 4)
            lines.append(line)
            lefts.append(left)
            asks.append(ask)
            losses.append(stage_loss)
            everybody.extend(itertools.islice(rest, int(count)))
        return Met(int(max(lines)), int(max(lefts)), any(asks), losses[-1], tuple(everybody))

    def announce(self, value: float) -> None:
        """Have the hub tell all others a number, and wait for nobody: they find it when they look. Others say nothing.

        Who has what the hub did afterwards, over whichever way, finds the number there.
        """
        for sock in self._sockets if self._stage == 0 else ():
            with contextlib.suppress(OSError):  # who is gone needs no telling
                sock.send(struct.pack("d", value))

    def announced(self) -> float | None:
        """Return what the hub has announced; None where that is nothing yet. At the hub itself always None."""
        data = b""
        if self._stage != 0 and select.select([self._sockets[0]], [], [], 0)[0]:
            with contextlib.suppress(OSError):  # that the hub is gone is found where its messages are missed
                data = self._sockets[0].recv(_LARGEST_BYTES)
        return float(struct.unpack("d", data)[0]) if data else None

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
    """Return the root of the sum of squared norms, summed without rounding: the same for every order, hence for every
    split.
    """
    return math.sqrt(math.fsum(squares))


class Stops:
    """Decides when training ends. To be told of every step and evaluation, in order."""

    def __init__(self, training: TrainingSpec, *, dilation: int, start_ns: int) -> None:
        """Training begins at `start_ns`; the lab takes `dilation` times as long as the world that the budget is for."""
        self._training = training
        self._budget_ns = None if training.budget_s is None else training.budget_s * 1e9 * dilation
        self._spent_ns = 0
        self._counted_ns = start_ns
        self._updating = False

    def after_step(self, done: int, met: Met) -> Ended | None:
        """Say why training ends with the step that is number `done`, counted from 1; None: it goes on."""
        self._spent_ns += met.line_ns - self._counted_ns
        self._counted_ns, self._updating = met.line_ns, True
        if met.asked:
            return "asked"
        if done == self._training.steps:
            return "steps"
        return "budget" if self._budget_ns is not None and self._spent_ns >= self._budget_ns else None

    def evaluation_due(self, done: int) -> bool:
        """Say whether an evaluation follows that step, though training goes on."""
        return self._training.evaluate_every > 0 and done % self._training.evaluate_every == 0

    def after_evaluation(self, met: Met) -> Ended | None:
        """Say why training ends with an evaluation; None: it goes on."""
        if self._updating:  # which `after_step` could not count
            self._spent_ns += max(0, met.left_ns - self._counted_ns)
        self._counted_ns, self._updating = met.line_ns, False
        if self._training.target_loss is not None and met.loss <= self._training.target_loss:
            return "target"
        return "asked" if met.asked else None
