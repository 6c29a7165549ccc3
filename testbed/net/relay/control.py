"""The relay process's end of the control channel: handles requests, one JSON line each, between packets."""

from __future__ import annotations

import base64
import json
import os
from array import array
from collections.abc import Mapping
from time import monotonic_ns
from typing import Any

from testbed.directions import LinkDirection
from testbed.net.relay.engine import Engine, EnginePort
from testbed.net.relay.pipe import RelayPipe
from testbed.net.relay.queues import HOLD_NS
from testbed.net.relay.shaper import build_pipe
from testbed.net.relay.wire import Opportunities
from testbed.process import Parent


class Control:
    """Builds the engine, and changes it while it runs."""

    engine: Engine

    def __init__(self, parent: Parent) -> None:
        """Build the engine of the first request, as written by `testbed.net.relay.client.Relay`."""
        self._parent, asked = parent, parent.request
        self._begun = b""
        self._traces: dict[str, array[int]] = {}
        self._playing_since_ns: int | None = None
        self._learn(asked)
        self._overheads = {port["name"]: port["overhead_bytes"] for port in asked["ports"]}
        self._numbers = {port["name"]: number for number, port in enumerate(asked["ports"])}
        ports = [
            EnginePort(
                port["name"],
                port["address"],
                port["fd"],
                self._build(port["name"], "up", port["up"]),
                self._build(port["name"], "down", port["down"]),
                port["behind"],
            )
            for port in asked["ports"]
        ]
        self.engine = Engine(ports, parent.requests_fd, self.serve)

    def _learn(self, request: Mapping[str, Any]) -> None:
        for digest, content in request["traces"].items():
            self._traces[digest] = array("I", base64.b64decode(content))

    def _build(
        self,
        port: str,
        direction: LinkDirection,
        pipe: Mapping[str, Any] | None,
        before: RelayPipe | None = None,
    ) -> RelayPipe:
        trace: Opportunities | None = None
        if pipe is not None and (named := pipe["trace"]) is not None:
            trace = Opportunities(self._traces[named["digest"]], named["loop"], named["offset_ms"], named["stretch"])
        stream = 2 * self._numbers[port] + (direction == "down")
        return build_pipe(pipe, self._overheads[port], stream, trace, before, monotonic_ns())

    def settings(self) -> dict[str, Any]:
        """Return the holding time of packets in a burst, and the current parameters of every direction."""
        return {
            "hold_ns": HOLD_NS,
            "ports": {
                port.name: {"up": port.up.settings(), "down": port.down.settings()} for port in self.engine.ports
            },
        }

    def serve(self) -> bool:
        """Handle the requests received so far. False when the input has ended."""
        content = os.read(self._parent.requests_fd, 1 << 16)
        *lines, self._begun = (self._begun + content).split(b"\n")
        for line in lines:
            self._parent.answer(self._carry_out(json.loads(line)))
        return bool(content)

    def _carry_out(self, request: Mapping[str, Any]) -> dict[str, Any]:
        now, ports = monotonic_ns(), self.engine.ports
        match request["do"]:
            case "count":  # lists, not tables: called ten times a second, and slowness causes lateness
                return {
                    "ports": [(port.up.counters(now), port.down.counters(now)) for port in ports],
                    "process": self.engine.process_counters(),
                }
            case "play":
                self._playing_since_ns = request["start_ns"]
                for port in ports:
                    port.up.play(request["start_ns"])
                    port.down.play(request["start_ns"])
            case "hold":
                self._playing_since_ns = None
                for port in ports:
                    port.up.hold()
                    port.down.hold()
            case "change":
                self._learn(request)
                port = ports[self._numbers[request["port"]]]
                side: LinkDirection = request["direction"]
                pipe = self._build(port.name, side, request["pipe"], getattr(port, side))
                if self._playing_since_ns is not None:
                    pipe.play(self._playing_since_ns)
                setattr(port, side, pipe)
                self.engine.look_again()
                return {"settings": pipe.settings()}
        return {}
