"""Packets at the ends of links into one pcapng file that Wireshark opens: an interface an end, nanoseconds, first bytes only.

A process of its own does it (`python -m testbed.net.capture.recorder`), with rings of the kernel's (ring.py): it takes no time from the
probe and works in namespaces without names. What it could not keep is counted, in the file and in `Capture.story`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from testbed.errors import LabError, SpecError
from testbed.net.capture.pcapng import INBOUND, LINKTYPE_ETHERNET, LINKTYPE_RAW, OUTBOUND, Writer
from testbed.net.capture.ring import KEPT_BYTES, Ring
from testbed.net.probe.sockets import enter
from testbed.process import die_with_parent

_ROOT = Path(__file__).resolve().parents[2]
_LAST_BLOCK_S = 0.1  # more than the kernel takes to hand over a block that is not full
_SIOCGIFHWADDR, _ARPHRD_NONE = 0x8927, 0xFFFE
_PATIENCE_S = 30


class Point(NamedTuple):
    """Where to capture."""

    name: str
    """In the file."""
    namespace_fd: int
    device: str


class Capture:
    """A running capture; a context manager that ends it. From the main thread only: it dies with the thread that started it."""

    story: str
    """How much it kept and lost, once it has ended."""

    def __init__(self, path: Path, points: Sequence[Point]) -> None:
        """Start, and return when packets are being kept. LabError when it cannot; SpecError for a file that cannot be written."""
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise SpecError(f"cannot write the capture {path}: {error.strerror}") from None
        self._path, self.story = path, ""
        asked = {"parent": os.getpid(), "file": self._file.fileno(), "points": [point._asdict() for point in points]}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "testbed.net.capture.recorder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=sorted({self._file.fileno(), *(point.namespace_fd for point in points)}),
            cwd=_ROOT,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write((json.dumps(asked) + "\n").encode())
            self._process.stdin.flush()
        if not self._process.stdout.readline():
            self._fail()

    def _fail(self) -> None:
        assert self._process.stderr is not None
        words = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        self._end()
        raise LabError(f"cannot capture into {self._path}: {words[-1] if words else 'the process left no message'}")

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._file.close()

    def close(self) -> None:
        """Keep what has been seen so far, and end."""
        try:
            found, _ = self._process.communicate(timeout=_PATIENCE_S)
            counts: dict[str, Any] = json.loads(found) if found else {}
        except subprocess.TimeoutExpired:
            counts = {}
        finally:
            self._end()
        self.story = (
            f"captured {counts['kept']} packets in {self._path.name}, {counts['lost']} lost by the capture itself"
            if counts
            else f"the capture {self._path.name} ended too early"
        )

    def __enter__(self) -> Capture:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open(point: Point) -> tuple[Ring, int]:
    """A capture there, and what its packets begin with."""
    enter(point.namespace_fd)
    return Ring(point.device), _link_type(point.device)


def _link_type(device: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFHWADDR, struct.pack("16s24x", device.encode()))
    (kind,) = struct.unpack_from("@H", answer, 16)
    return LINKTYPE_RAW if kind == _ARPHRD_NONE else LINKTYPE_ETHERNET


def _drain(ring: Ring, number: int, writer: Writer) -> int:
    kept = 0
    for packet in ring.read():
        writer.packet(number, packet.at_ns, packet.content, packet.length, OUTBOUND if packet.outgoing else INBOUND)
        kept += 1
    return kept


def main() -> None:
    """Capture until the end of standard input."""
    asked = json.loads(sys.stdin.readline())
    die_with_parent(asked["parent"])
    points = [Point(**point) for point in asked["points"]]
    rings = [_open(point) for point in points]
    kept = 0
    with os.fdopen(asked["file"], "wb", buffering=1 << 20) as file:
        writer = Writer(file, "testbed")
        numbers = {
            ring: writer.interface(point.name, kind, KEPT_BYTES)
            for point, (ring, kind) in zip(points, rings, strict=True)
        }
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        end = None
        while end is None or time.monotonic() < end:
            ready, _, _ = select.select([*numbers, *([sys.stdin] if end is None else [])], [], [], _LAST_BLOCK_S)
            if sys.stdin in ready:
                end = time.monotonic() + _LAST_BLOCK_S
            for ring, number in numbers.items():
                kept += _drain(ring, number, writer)
        for ring, number in numbers.items():
            ring.count()
            writer.statistics(number, time.time_ns(), ring.seen, ring.lost)
    json.dump({"kept": kept, "lost": sum(ring.lost for ring in numbers)}, sys.stdout)


if __name__ == "__main__":
    main()
