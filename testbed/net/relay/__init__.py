"""The userspace link emulator: one process that reads every TUN device of a lab and hands packets on when they are due.

This module starts that process and talks to it; control.py is the process's side of the conversation and engine.py its loop.
pipe.py is the formula and shaper.py all of it, made of wire.py, loss.py and draws.py; lanes.py decides when to wake. tun.py makes
devices.
"""

from __future__ import annotations

import base64
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.errors import LabError, SpecError
from testbed.net.relay.pipe import COUNTERS
from testbed.process import Child

if TYPE_CHECKING:  # the relay process imports this module too, and needs no pydantic
    from testbed.profiles import Pipe


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


def asked(pipe: Pipe | None) -> dict[str, Any] | None:
    """A pipe as the relay process is told it. SpecError for what this engine cannot carry out."""
    if pipe is None:
        return None
    if pipe.slot is not None:
        raise SpecError("slot is carried out by engine netem only; leave it out of the profile, or use --engine netem")
    from testbed.profiles.timeline import timeline  # not at the top: the relay process imports this module too

    varying = timeline(pipe) if pipe.schedule is not None else None
    table = pipe.model_dump(
        include={"rate_bps", "delay_ns", "jitter_ns", "buffer_bytes", "loss", "reorder", "duplicate", "seed"}
    )
    return table | {
        "jitter_reorders": pipe.jitter_reorders,
        "steps": [step._asdict() | {"loss": step.loss and step.loss.model_dump()} for step in varying.steps]
        if varying
        else None,
        "repeat_ns": varying.repeat_ns if varying else None,
        "trace": pipe.trace and pipe.trace.model_dump(include={"digest", "loop", "offset_ms", "stretch"}),
    }


def _traces(pipes: Iterable[Pipe | None]) -> dict[str, str]:
    """The content of every trace that is named, by digest: its times in ms as 32-bit words."""
    from testbed.profiles import trace

    named = {pipe.trace.digest: pipe.trace for pipe in pipes if pipe is not None and pipe.trace is not None}
    return {
        digest: base64.b64encode(array("I", trace.load_trace(record)).tobytes()).decode()
        for digest, record in named.items()
    }


class Relay:
    """A running relay process; a context manager that ends it."""

    settings: dict[str, Any]
    """Read back from the process: scheduling class, priority, locked memory, timer slack, and every port's pipes."""

    def __init__(self, ports: Sequence[Port]) -> None:
        """Start it and wait until it carries packets. From the main thread only: it dies with the thread that started it.

        LabError when it does not start, or two ports share a name or an address; SpecError for a pipe that it cannot carry out.
        """
        assert all(port.name != "process" for port in ports)  # the counters' key for the relay itself
        for what in ("name", "address"):
            if len({getattr(port, what) for port in ports}) < len(ports):
                raise LabError(f"cannot start the relay: two of its {len(ports)} ports have the same {what}")
        wanted = {
            "traces": _traces(pipe for port in ports for pipe in (port.up, port.down)),
            "ports": [
                {
                    "name": port.name,
                    "address": port.address,
                    "fd": port.tun_fd,
                    "up": asked(port.up),
                    "down": asked(port.down),
                    "overhead_bytes": port.overhead_bytes,
                }
                for port in ports
            ],
        }
        self._names = [port.name for port in ports]
        self._speaking = threading.Lock()
        self._process = Child(
            "testbed.net.relay",
            wanted,
            attempt="start the relay",
            failure=LabError,
            fds=[port.tun_fd for port in ports],
        )
        self.settings = self._process.answer()

    def _ask(self, request: dict[str, Any], attempt: str) -> dict[str, Any]:
        with self._speaking:  # a sampler asks for counters while the main thread plays and changes
            answer: dict[str, Any] = self._process.ask(request, attempt)
            return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def counters(self) -> dict[str, dict[str, Any]]:
        """Per port `{"up": ..., "down": ...}`: what `pipe.COUNTERS` names, in packets and bytes of IP.

        Under `process`: `lateness` (packets by powers of two of us after they were to leave, see `Engine.process_counters`),
        lateness_max_ns, undeliverable_packets, refused_packets, cpu_s. From any thread. LabError when the relay has died.
        """
        found = self._ask({"do": "count"}, "read the relay's counters")
        by_port: dict[str, dict[str, Any]] = {
            name: {
                side: dict(zip(COUNTERS, numbers, strict=True))
                for side, numbers in zip(LINK_DIRECTIONS, pair, strict=True)
            }
            for name, pair in zip(self._names, found["ports"], strict=True)
        }
        return by_port | {"process": found["process"]}

    def play(self, start_ns: int) -> None:
        """Schedules and traces of all ports begin at this moment of CLOCK_MONOTONIC. LabError when the relay has died."""
        self._ask({"do": "play", "start_ns": start_ns}, "play the schedules and traces")

    def hold(self) -> None:
        """Back to every pipe's own constant numbers. LabError when the relay has died."""
        self._ask({"do": "hold"}, "stop the schedules and traces")

    def change(self, port: str, direction: LinkDirection, pipe: Pipe | None) -> None:
        """Put another pipe in the place of a direction's, from its next packet on.

        What is under way keeps its time; counters and the sequence of losses go on. Where the relay is playing, the new pipe's
        schedule or trace is where it would be had it played from the start.

        LabError when there is no such port or the relay has died, SpecError for a pipe that it cannot carry out.
        """
        if port not in self._names:
            raise LabError(f"cannot change {port}: the relay has no such port; it has: {', '.join(self._names)}")
        request = {"do": "change", "port": port, "direction": direction, "pipe": asked(pipe), "traces": _traces([pipe])}
        found = self._ask(request, f"change {port} {direction}")
        self.settings["ports"][port][direction] = found["settings"]

    def close(self) -> None:
        """End it, by the end of its input. Packets under way are lost."""
        self._process.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
