"""The relay's interface for the lab: start the process, configure pipes, read counters, end it."""

from __future__ import annotations

import base64
import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.closing import Closing
from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.errors import LabError, SpecError
from testbed.net.relay.pipe import COUNTERS
from testbed.process import Child
from testbed.profiles import Pipe, rate_trace
from testbed.profiles.timeline import Timeline, timeline


@dataclass(frozen=True, kw_only=True)
class RelayPort:
    """One device that the relay reads and writes, and the pipes between it and the relay's switch."""

    name: str
    address: str
    """IPv4 address: packets to it leave here."""
    up: Pipe | None
    """Away from the device; None: unshaped."""
    down: Pipe | None
    overhead_bytes: int
    """Counted by the pipes in addition to each IP packet: 0 for a profile of layer ip, 14 for ethernet."""
    behind: str | None = None
    """The port whose pipes lie between this one and the switch; None: nothing does."""


def refuse_unsupported(pipe: Pipe | None) -> None:
    """Raise SpecError for a pipe that the relay cannot implement."""
    if pipe is not None and pipe.slot is not None:
        raise SpecError("only engine netem implements slot; remove it from the profile, or use --engine netem")
    if pipe is not None and pipe.queue not in (None, "fifo"):
        raise SpecError(f"only engine netem implements queue {pipe.queue!r}; state 'fifo', or use --engine netem")
    for fault in (pipe.faults if pipe is not None else None) or ():
        if only := [name for name in ("reorder", "duplicate", "corrupt") if name in fault.effects]:
            raise SpecError(f"only engine netem implements a fault with {only[0]}; remove it, or use --engine netem")
    if pipe is not None and pipe.faults and (pipe.trace or (pipe.schedule and pipe.schedule.repeat_ns)):
        raise SpecError(
            "engine relay implements no fault of a link with a trace or a schedule that repeats; use --engine netem"
        )


def pipe_table(pipe: Pipe | None) -> dict[str, Any] | None:
    """Encode a pipe for the relay process; None for unshaped. SpecError for a pipe that it cannot implement."""
    refuse_unsupported(pipe)
    if pipe is None:
        return None
    varying = timeline(pipe) if pipe.schedule is not None or pipe.faults else None
    moments = {edge for fault in pipe.faults or () for edge in (fault.at_ns, fault.end_ns)}
    table = pipe.model_dump(
        include={"rate_bps", "delay_ns", "jitter_ns", "buffer_bytes", "loss", "reorder", "duplicate", "seed"}
    )
    return table | {
        "jitter_reorders": pipe.jitter_reorders,
        "steps": [_step_table(varying, at_ns) for at_ns in sorted(moments | {s.at_ns for s in varying.steps})]
        if varying
        else None,
        "repeat_ns": varying.repeat_ns if varying else None,
        "trace": pipe.trace and pipe.trace.model_dump(include={"digest", "loop", "offset_ms", "stretch"}),
    }


def _step_table(line: Timeline, at_ns: int) -> dict[str, Any]:
    step = line.at(at_ns)
    return {name: getattr(step, name) for name in ("rate_bps", "delay_ns", "jitter_ns")} | {
        "at_ns": at_ns,
        "loss": step.loss and step.loss.model_dump(),
    }


def _traces(pipes: Iterable[Pipe | None]) -> dict[str, str]:
    """Return the content of every trace of the pipes, by digest: times in ms as 32-bit words."""
    named = {pipe.trace.digest: pipe.trace for pipe in pipes if pipe is not None and pipe.trace is not None}
    return {
        digest: base64.b64encode(array("I", rate_trace.load_trace(record)).tobytes()).decode()
        for digest, record in named.items()
    }


class Relay(Closing):
    """A running relay process; a context manager that ends it."""

    settings: dict[str, Any]
    """Read back from the process: scheduling class, priority, locked memory, timer slack, and the pipes of every
    port."""

    def __init__(self, ports: Sequence[RelayPort], descriptors: Sequence[int]) -> None:
        """Start it and wait until it forwards packets. Main thread only: it dies with the thread that started it. The
        caller owns the `descriptors` of the ports' devices, and closes them after the relay.

        LabError when it does not start; SpecError for a pipe that it cannot implement.
        """
        assert all(port.name != "process" for port in ports)  # the counters' key for the relay itself
        request = {
            "traces": _traces(pipe for port in ports for pipe in (port.up, port.down)),
            "ports": [
                {**vars(port), "fd": descriptor, "up": pipe_table(port.up), "down": pipe_table(port.down)}
                for port, descriptor in zip(ports, descriptors, strict=True)
            ],
        }
        self._names = [port.name for port in ports]
        self._speaking = threading.Lock()
        self._process = Child(
            "testbed.net.relay", request, attempt="start the relay", failure=LabError, fds=descriptors
        )
        self.settings = self._process.answer()

    def _ask(self, request: dict[str, Any], attempt: str) -> dict[str, Any]:
        with self._speaking:  # a sampler reads counters while the main thread plays and changes
            answer: dict[str, Any] = self._process.ask(request, attempt)
            return answer

    @property
    def pid(self) -> int:
        return self._process.pid

    def counters(self) -> dict[str, dict[str, Any]]:
        """Read every port's `{"up": ..., "down": ...}`: what `pipe.COUNTERS` names, in packets and bytes of IP.

        Under `process`: `lateness` (packets by powers of two of us after their due time, see
        `Engine.process_counters`), lateness_max_ns, undeliverable_packets, refused_packets, cpu_s. From any thread.
        LabError when the relay has died.
        """
        answer = self._ask({"do": "count"}, "read the relay's counters")
        by_port: dict[str, dict[str, Any]] = {
            name: {
                direction: dict(zip(COUNTERS, numbers, strict=True))
                for direction, numbers in zip(LINK_DIRECTIONS, pair, strict=True)
            }
            for name, pair in zip(self._names, answer["ports"], strict=True)
        }
        return by_port | {"process": answer["process"]}

    def play(self, start_ns: int) -> None:
        """Start the schedules and traces of all ports at this time of CLOCK_MONOTONIC.

        LabError when the relay has died.
        """
        self._ask({"do": "play", "start_ns": start_ns}, "play the schedules and traces")

    def hold(self) -> None:
        """Return every pipe to its constant values. LabError when the relay has died."""
        self._ask({"do": "hold"}, "stop the schedules and traces")

    def change(self, port: str, direction: LinkDirection, pipe: Pipe | None) -> None:
        """Replace the pipe of a direction, from its next packet on.

        Packets in flight keep their times; counters and the sequence of losses continue. If the relay is playing, the
        new pipe's schedule or trace is at the position of the current time.

        LabError when the relay has died, SpecError for a pipe that it cannot implement.
        """
        content = {"pipe": pipe_table(pipe), "traces": _traces([pipe])}
        request = {"do": "change", "port": port, "direction": direction, **content}
        answer = self._ask(request, f"change {port} {direction}")
        self.settings["ports"][port][direction] = answer["settings"]

    def close(self) -> None:
        """End it by closing its input. Packets in flight are lost."""
        self._process.close()


def lateness_percentile(lateness: Sequence[int], share: float) -> float | None:
    """Return the quantile `share` of the lateness in us, linear within a bucket; None without packets."""
    rank = share * sum(lateness)
    for exponent, count in enumerate(lateness):
        if count and rank <= count:
            lowest, highest = (1 << exponent) >> 1, 1 << exponent
            return lowest + (highest - lowest) * rank / count
        rank -= count
    return None


def lateness_mean(lateness: Sequence[int]) -> float:
    """Return the mean lateness in us, with values rounded up to a power of two, hence an overestimate; 0 without
    packets.
    """
    return sum(count << exponent for exponent, count in enumerate(lateness)) / max(1, sum(lateness))
