"""A lab: the namespaces, links and shapers of one topology, made from a plan, read back, and gone when it is closed.

topology.py decides what there is and build.py makes it; meters.py counts, player.py and the relay play what varies, certify.py
measures. Nothing here has a name outside this process: when it dies, however it dies, the kernel takes everything away.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from pydantic import Field

from testbed.directions import LinkDirection
from testbed.errors import LabError, SpecError, UnknownNameError
from testbed.frozen import Frozen
from testbed.net import directory
from testbed.net.arrange import with_own_seed
from testbed.net.build import build
from testbed.net.certificate.certify import certify
from testbed.net.elements import Link
from testbed.net.kernel import netem, qdisc
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Netlink
from testbed.net.kernel.varying import Move, Player
from testbed.net.machine import rootless
from testbed.net.meters import Counters, Meters
from testbed.net.parts import LabLink, Node, link_of, nodes_of, record_of
from testbed.net.topology import MAX_NODES, line, star
from testbed.profiles import LinkProfile, Pipe
from testbed.records import Certificate, LabRecord, Measurement
from testbed.spec import Engine, Topology

__all__ = ["Lab", "LabLink", "LabSpec", "Node"]


class LabSpec(Frozen):
    """What a lab is asked to be."""

    topology: Topology
    profiles: tuple[LinkProfile, ...] = Field(min_length=1)
    """One that all links have, or one a link: by node in a star, by boundary in a line."""
    nodes: int = Field(ge=1, le=MAX_NODES)
    engine: Engine
    engine_reason: str
    """Why this engine: see `capabilities.resolve_engine`."""


class Lab:
    """Links that stand until it is closed; a context manager. From the main thread only, like `Relay` and `Namespace.popen`;
    `counters` from any one thread.
    """

    nodes: tuple[Node, ...]
    links: tuple[LabLink, ...]
    namespaces: Mapping[str, Namespace]
    """All of them by name, those of the hub and the gateways too."""
    record: LabRecord
    """The lab as the kernel says it is."""

    def __init__(self, spec: LabSpec) -> None:
        """Build it. Where a step fails, everything made before it is undone.

        SpecError for what the topology or the engine cannot carry out, before anything is started. LabError names the step,
        ShapingError what was asked and found, CapabilityError what this machine lacks.
        """
        started = time.monotonic()
        self.spec = spec
        self._plan = (star if spec.topology == "star" else line)(spec.profiles, spec.nodes, spec.engine)
        self._shapers = {(shaper.link, shaper.direction): shaper for shaper in self._plan.shapers}
        self._changed: set[tuple[str, LinkDirection]] = set()
        with ExitStack() as stack:
            built = build(self._plan, stack)
            self.namespaces, self._relay = built.namespaces, built.relay
            self._meters = Meters(self._plan, self.namespaces, self._relay)
            stack.callback(self._meters.close)
            self._player = self._make_player(stack)
            self.nodes = nodes_of(self._plan, self.namespaces)
            self.links = tuple(link_of(link, self.namespaces) for link in self._plan.links)
            self.record = LabRecord(
                topology=spec.topology,
                engine=spec.engine,
                engine_reason=spec.engine_reason,
                rootless=rootless.inside(),
                build_seconds=time.monotonic() - started,
                overhead_bytes=self._plan.overhead_bytes,
                links=tuple(record_of(link, built) for link in self._plan.links),
                played_at_ns=None,
            )
            stack.enter_context(directory.publish(self.namespaces))
            self._stack = stack.pop_all()

    def _make_player(self, stack: ExitStack) -> Player | None:
        moves = [
            Move(
                link=shaper.link,
                direction=shaper.direction,
                namespace=self.namespaces[shaper.place],
                device=shaper.device,
                pipe=shaper.pipe,
                mtu=self._plan.mtu,
                layer=self._link(shaper.link).profile.layer,
            )
            for shaper in self._plan.shapers
            if shaper.pipe.varies
        ]
        if not moves:
            return None
        player = Player(moves)
        stack.callback(player.close)
        return player

    def _link(self, name: str) -> Link:
        found = next((link for link in self._plan.links if link.name == name), None)
        if found is None:
            raise UnknownNameError("link", name, (link.name for link in self._plan.links))
        return found

    def play(self) -> int:
        """The schedules and traces of all links begin now; the moment, in nanoseconds of CLOCK_MONOTONIC. Noted in `record`."""
        start_ns = self._play()
        self.record = self.record.model_copy(update={"played_at_ns": start_ns})
        return start_ns

    def _play(self) -> int:
        start_ns = time.monotonic_ns()
        if self._relay is not None:
            self._relay.play(start_ns)
        if self._player is not None:
            self._player.play(start_ns)
        return start_ns

    def hold(self) -> None:
        """Back to every pipe's own constant numbers; what is queued keeps its time."""
        if self._player is not None:
            self._player.hold()
        if self._relay is not None:
            self._relay.hold()
        for name, direction in sorted(self._changed):
            pipe = self._link(name).profile.pipe(direction)
            assert pipe is not None
            self._set(name, direction, pipe)
        self._changed.clear()

    def change(self, link: str, direction: LinkDirection, pipe: Pipe) -> None:
        """Shape one direction of a link otherwise, from its next packet on, until `hold`; what is queued is kept.

        SpecError where that direction has no shaper, or its engine cannot carry the pipe out; ShapingError as from `Lab`.
        """
        if self._link(link).profile.pipe(direction) is None:
            raise SpecError(
                f"{link} {direction} was built unshaped and cannot be changed; build it with a profile that shapes it"
            )
        self._set(link, direction, pipe)
        self._changed.add((link, direction))

    def _set(self, name: str, direction: LinkDirection, pipe: Pipe) -> None:
        link = self._link(name)
        if self._relay is not None:
            port = link.meters[direction]
            self._relay.change(port.place, port.what, pipe)  # type: ignore[arg-type]  # a port's meter names its direction
            return
        shaper = self._shapers[name, direction]
        seeded = with_own_seed(pipe, self._plan.links.index(link), direction)
        plan = qdisc.plan(seeded, mtu=self._plan.mtu, layer=link.profile.layer)
        with Netlink(self.namespaces[shaper.place]) as netlink:
            netem.change(netlink, shaper.device, plan, link=f"{name} {direction}")
        self._shapers[name, direction] = replace(shaper, pipe=seeded, plan=plan)

    def counters(self) -> Counters:
        """What every link has carried and dropped since it was built, both ways. LabError when the relay has died."""
        return self._meters.read()

    def lateness(self) -> dict[str, Any] | None:
        """How late the relay was, and what it cost (`process` of `Relay.counters`); None where no relay runs."""
        return self._relay.counters()["process"] if self._relay is not None else None

    def check(self) -> None:
        """That the lab still stands: LabError when the relay has died, ShapingError when a schedule could not be followed."""
        if self._relay is not None:
            self._relay.counters()
        if self._player is not None and (fault := self._player.fault):
            raise LabError(f"the links' schedules are no longer followed: {fault}")

    def certify(
        self, form: Literal["quick", "full"], message_bytes: Sequence[int], capture: Path | None = None
    ) -> Certificate:
        """Measure every link with messages of these sizes; once more, where that fails.

        What failed the first time stands in the certificate. `capture`: a file for the packets at the links' ends.
        ShapingError when a shaper is not what it was.
        """
        started, taken_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        self.check()
        for shaper in self._shapers.values():
            with Netlink(self.namespaces[shaper.place]) as netlink:
                netem.check(netlink, shaper.device, shaper.plan, link=f"{shaper.link} {shaper.direction}")

        def measure() -> tuple[Measurement, ...]:
            return certify(
                self.links,
                form=form,
                message_bytes=message_bytes,
                relay=self._relay,
                play=self._play,
                hold=self.hold,
                capture=capture,
            )

        measurements = measure()
        if rejected := tuple(one for one in measurements if one.verdict == "FAIL"):
            measurements = measure()
        return Certificate(
            form=form,
            engine=self.spec.engine,
            taken_at=taken_at,
            seconds=time.monotonic() - started,
            measurements=measurements,
            rejected=rejected,
        )

    def close(self) -> None:
        """Take it down. What still runs inside a namespace keeps that namespace, but not the links."""
        self._stack.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
