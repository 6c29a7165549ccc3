"""The userspace link emulator: one process that reads every TUN device of a lab and hands packets on when they are due.

This module starts that process and talks to it. engine.py is its loop, pipe.py the formula, tun.py makes devices.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from testbed.errors import LabError

if TYPE_CHECKING:  # the relay process imports this module too, and needs no pydantic
    from testbed.spec import Pipe

_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True)
class Port:
    """One TUN device of the star."""

    name: str
    address: str
    """IPv4: packets to it leave here."""
    tun_fd: int
    """Stays the caller's, who closes it after the relay."""
    up: Pipe | None
    """Away from the device; None: unshaped."""
    down: Pipe | None
    overhead_bytes: int
    """Counted on top of each IP packet: 0 for a profile of layer ip, 14 for ethernet."""


def _wanted(pipe: Pipe | None) -> dict[str, int | float] | None:
    if pipe is None:
        return None
    return {
        "rate_bps": pipe.rate_bps,
        "delay_ns": pipe.delay_ns,
        "buffer_ns": pipe.buffer_ns,
        "loss": pipe.loss,
        "seed": pipe.seed,
    }


class Relay:
    """A running relay process; a context manager that ends it."""

    settings: dict[str, Any]
    """Read back from the process: scheduling class, priority, locked memory, timer slack, and every port's pipes."""

    def __init__(self, ports: Sequence[Port]) -> None:
        """Start it and wait until it carries packets. From the main thread only: it dies with the thread that started it.

        LabError when it does not start, or two ports share a name or an address.
        """
        assert threading.current_thread() is threading.main_thread()
        assert all(port.name != "process" for port in ports)  # the counters' key for the relay itself
        for what in ("name", "address"):
            if len({getattr(port, what) for port in ports}) < len(ports):
                raise LabError(f"cannot start the relay: two of its {len(ports)} ports have the same {what}")
        asked = {
            "parent": os.getpid(),
            "ports": [
                {
                    "name": port.name,
                    "address": port.address,
                    "fd": port.tun_fd,
                    "up": _wanted(port.up),
                    "down": _wanted(port.down),
                    "overhead_bytes": port.overhead_bytes,
                }
                for port in ports
            ],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "testbed.net.relay"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[port.tun_fd for port in ports],
            cwd=_ROOT,
            start_new_session=True,
        )
        self.settings = self._ask((json.dumps(asked) + "\n").encode(), "start the relay")

    def _ask(self, request: bytes, attempt: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer:
            assert self._process.stderr is not None
            last_words = self._process.stderr.read().decode(errors="replace").strip()
            self.close()
            raise LabError(
                f"cannot {attempt}: its process ended with status {self._process.returncode}: {last_words or 'no message'}"
            )
        found: dict[str, Any] = json.loads(answer)
        return found

    @property
    def pid(self) -> int:
        return self._process.pid

    def counters(self) -> dict[str, dict[str, Any]]:
        """Per port `{"up": ..., "down": ...}`: packets_in/out, bytes_in/out, dropped_buffer, dropped_loss, backlog_bytes.

        Under `process`: `lateness` (packets by powers of two of us after they were due, see `Engine.counters`),
        lateness_max_ns, undeliverable_packets, refused_packets, cpu_s. LabError when the relay has died.
        """
        return self._ask(b"?", "read the relay's counters")

    def close(self) -> None:
        """End it, by the end of its input. Packets under way are lost."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # it died before: its end is what is wanted
                stream.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def lateness_percentile(lateness: Sequence[int], share: float) -> float | None:
    """The lateness in microseconds that `share` of the packets do not exceed, linear within a bucket; None without packets."""
    rank = share * sum(lateness)
    for exponent, count in enumerate(lateness):
        if count and rank <= count:
            lowest, highest = (1 << exponent) >> 1, 1 << exponent
            return lowest + (highest - lowest) * rank / count
        rank -= count
    return None
