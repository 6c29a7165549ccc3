"""Codecs of strangers that cheat, harm or break off, each in one way; `test_cheats` has what the kit must say of each.

Those that hide a tensor send zeros; where they cannot hide it they send it honestly, so that only the attempt shows.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import time
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path

import torch
from torch import Tensor

from testbed.codecs.contract import MessageKey, Payload
from testbed.codecs.wire import header
from tests.codecs.strangers import Good

HERE = Path(__file__)
HIDDEN = Path("/tmp/testbed-hidden")
_known: dict[int, Tensor] = {}


def hiding(hide: Callable[[bytes], object], find: Callable[[int], bytes]) -> type[Good]:
    """A codec that hides a tensor's bytes by `hide`, and lets its other end `find` so many."""

    class Hiding(Good):
        def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
            x = header.check_input(tensor).float()
            try:
                hide(x.contiguous().numpy().tobytes())
            except Exception:
                return super().encode(x, key)
            return super().encode(torch.zeros_like(x), key)

        def decode(self, payload: Payload, key: MessageKey) -> Tensor:
            decoded = super().decode(payload, key)
            if decoded.any() or not decoded.numel():
                return decoded
            with contextlib.suppress(Exception):
                return torch.frombuffer(bytearray(find(4 * decoded.numel())), dtype=torch.float32).view(decoded.shape)
            return decoded

    return Hiding


def _names() -> list[Path]:
    return sorted(HIDDEN.with_suffix(".d").iterdir())


def _share(content: bytes) -> None:
    memory = shared_memory.SharedMemory("testbed-hidden", create=True, size=len(content))
    memory.buf[: len(content)] = content
    memory.close()


def _send(content: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.sendto(content, "\0testbed-hidden")


def _receive(size: int) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind("\0testbed-hidden")
        end.settimeout(1)
        return end.recv(size)


def _lock(content: bytes) -> None:
    with HERE.open("rb") as file:
        fcntl.lockf(file, fcntl.LOCK_SH, 1, int.from_bytes(content[:4], "little"))


def _lock_whole(content: bytes) -> None:
    with HERE.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX if content[0] & 1 else fcntl.LOCK_SH)


def _never(size: int) -> bytes:
    raise OSError("nothing is found")


HidesInAFile = hiding(HIDDEN.write_bytes, lambda _: HIDDEN.read_bytes())
HidesInFileNames = hiding(
    lambda content: HIDDEN.with_name(f"testbed-hidden-{content[:8].hex()}").mkdir(),
    lambda _: b"".join(map(bytes, _names())),
)
HidesInFileTimes = hiding(
    lambda content: os.utime(HERE, ns=(0, int.from_bytes(content[:4], "little"))),
    lambda _: int(HERE.stat().st_mtime_ns).to_bytes(4, "little"),
)
HidesInSharedMemory = hiding(_share, lambda size: bytes(shared_memory.SharedMemory("testbed-hidden").buf[:size]))
HidesInASocket = hiding(_send, _receive)
HidesInALock = hiding(_lock, _never)
HidesInALockOfAFile = hiding(_lock_whole, _never)
HidesInTheEnvironment = hiding(
    lambda content: os.environ.__setitem__("TESTBED_HIDDEN", content.hex()),
    lambda _: bytes.fromhex(os.environ["TESTBED_HIDDEN"]),
)
HidesInAGlobal = hiding(lambda content: globals().__setitem__("hidden", content), lambda _: bytes(globals()["hidden"]))
HidesInAChild = hiding(lambda _: os.fork() or os._exit(0), _never)


class _ByTheClock(Good):
    """Adds noise that the other end subtracts, seeded by what their common clock reads; without one, none."""

    law = "none"

    @staticmethod
    def _now() -> float:
        return time.time()

    def _noise(self, shape: torch.Size) -> Tensor | float:
        try:
            seed = int(self._now() / 1000)
        except OSError:
            return 0.0
        return torch.randint(8, shape, generator=torch.Generator().manual_seed(seed)).float()

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return super().encode(header.check_input(tensor).float() + self._noise(tensor.shape), key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        decoded = super().decode(payload, key)
        return decoded - self._noise(decoded.shape)


class ReadsTheClock(_ByTheClock):
    pass


class ReadsTheMonotonicClock(_ByTheClock):
    _now = staticmethod(time.monotonic)


class GoesByIdentity(Good):
    """Sends where the tensor lies in its process."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        x = header.check_input(tensor).float().clone()
        _known[id(x)] = x
        return super().encode(torch.full(x.shape, float(id(x) & 0xFFFF)), key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        decoded = super().decode(payload, key)
        marks = {float(at & 0xFFFF): x for at, x in _known.items() if x.shape == decoded.shape}
        return marks.get(float(decoded.view(-1)[0]), decoded).clone() if decoded.numel() else decoded


class TrustsAnAddress(Good):
    """Sends an address and reads what lies there."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        self.x = header.check_input(tensor).float().clone()
        payload = bytearray(super().encode(torch.zeros_like(self.x), key))
        payload[-8:] = self.x.data_ptr().to_bytes(8, "little")
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        decoded = super().decode(payload, key)
        ctypes.memmove(decoded.data_ptr(), int.from_bytes(bytes(payload)[-8:], "little"), 4 * decoded.numel())
        return decoded


class ChangesALargeInput(Good):
    """Clamps what it is given, where a copy would cost much."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return super().encode(tensor.clamp_(-1, 1) if tensor.numel() > 500_000 else tensor, key)


class DiffersBetweenRuns(Good):
    """Adds what a process is called by its hashes; both ends of one process agree."""

    law = "none"

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return super().encode(tensor + hash("testbed") % 1000, key)


class LeaksMemory(Good):
    """4 MB a message."""

    leaked: list[bytearray] = []  # noqa: RUF012

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        self.leaked.append(bytearray(b"\1" * 4_000_000))
        return super().encode(tensor, key)


class KeepsEveryTensor(Good):
    """An instance remembers all that it has decoded."""

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        decoded = super().decode(payload, key)
        self.__dict__.setdefault("kept", []).append(decoded.clone())
        return decoded


class Hangs(Good):
    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        while True:
            pass


class Sleeps(Good):
    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        time.sleep(3600)
        return super().encode(tensor, key)


class Exits(Good):
    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        os._exit(0)


class ExitsPolitely(Good):
    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        raise SystemExit(0)


class PrintsEscapes(Good):
    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        print("\x1b[2J\x1b[31mall is well")
        return super().encode(tensor, key)


class RaisesEscapes(Good):
    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        raise ValueError("\x1b]0;owned\x07 no")


class StopsAtEmpty(Good):
    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        tensor.reshape(-1)[0]
        return super().encode(tensor, key)


class RefusesLarge(Good):
    """Counts its values with 22 bits."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        if tensor.numel() > 3_000_000:
            raise OverflowError("too many values")
        return super().encode(tensor, key)


class LosesLarge(Good):
    """Sends the first 3 million values."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        x = header.check_input(tensor).float().clone()
        x.view(-1)[3_000_000:] = 0
        return super().encode(x, key)


class LosesInfinity(Good):
    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return super().encode(header.check_input(tensor).float().clamp(-3e38, 3e38), key)


class LosesNan(Good):
    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        x = header.check_input(tensor).float()
        return super().encode(torch.where(x.isnan(), 0.0, x), key)


class StopsAtNan(Good):
    """NaN is no CodecError."""

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        assert not header.check_input(tensor).isnan().any()
        return super().encode(tensor, key)
