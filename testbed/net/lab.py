"""A lab: the namespaces, links and shapers of one topology, made from a plan, read back, and gone when it is closed.

topology.py plans it and build.py makes it; meters.py counts, schedules.py and the relay play what varies, and
certificate/ measures. Nothing here has a name outside this process: when it dies, however it dies, the kernel takes
everything away.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from testbed.closing import Closing
from testbed.directions import LinkDirection
from testbed.errors import LabError, SpecError, UnknownNameError
from testbed.frozen import Frozen
from testbed.net import directory
from testbed.net.build import build_lab
from testbed.net.certificate.certify import Watch, certify
from testbed.net.kernel import netem
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Netlink
from testbed.net.machine import rootless
from testbed.net.meters import Counters, Meters
from testbed.net.plan import LabPlan, Link, with_own_seed
from testbed.net.schedules import ScheduleDriver, Schedules
from testbed.net.topology import MAX_NODES, plan_lab
from testbed.profiles import LinkProfile, Pipe
from testbed.records import Certificate, LabRecord
from testbed.spec import Engine, Topology

if TYPE_CHECKING:
    from testbed.metrics.bound import BoundedStep


class LabSpec(Frozen):
    """What a lab is asked to be."""

    topology: Topology
    profiles: tuple[LinkProfile, ...] = Field(min_length=1)
    """One that all links have, or one per link: by node in a star, by boundary in a line."""
    nodes: int = Field(ge=1, le=MAX_NODES)
    engine: Engine
    engine_reason: str
    """Why this engine: see `capabilities.resolve_engine`."""


@dataclass(frozen=True, kw_only=True)
class LabNode:
    """Where one stage lives in the lab."""

    index: int
    name: str
    address: str
    """IPv4. In a star every other node reaches it, in a line the node before (the first node: the one after)."""
    devices: tuple[str, ...]
    """The ends of its links inside `namespace`; in a line the one to the previous node first."""
    namespace: Namespace


class Lab(Closing):
    """Links that stand until it is closed; a context manager.

    It is used from the main thread only, like `Relay`; `counters` from any one thread.
    """

    nodes: tuple[LabNode, ...]
    links: tuple[Link, ...]
    """In the order of the nodes or boundaries. The namespaces at their ends are in `namespaces`."""
    namespaces: Mapping[str, Namespace]
    """All of them by name, those of the hub and the gateways too."""
    record: LabRecord
    """The lab as the kernel says it is."""
    schedules: Schedules | None
    """Of the links that vary under engine netem, where whoever holds the lab follows them; else None."""

    def __init__(self, spec: LabSpec, *, follow: bool = True) -> None:
        """Build it. Where a step fails, everything made before it is undone.

        `follow`: a thread of the lab's own follows the schedules of links that vary; else it has no thread, and whoever
        holds it follows `schedules`.

        SpecError for what the topology or the engine cannot carry out, before anything is started. LabError names the
        step, ShapingError what was asked and found, CapabilityError what this machine lacks.
        """
        started = time.monotonic()
        self.spec = spec
        self._plan = plan_lab(spec.topology, spec.profiles, spec.nodes, spec.engine)
        self._shaped = {(shaped.link, shaped.direction): shaped for shaped in self._plan.shaped}
        self._changed: set[tuple[str, LinkDirection]] = set()
        with ExitStack() as stack:
            built = build_lab(self._plan, stack)
            self.namespaces, self._relay = built.namespaces, built.relay
            self._meters = Meters(self._plan, self.namespaces, self._relay)
            stack.callback(self._meters.close)
            self._follower: ScheduleDriver | Schedules | None = None
            if any(shaped.pipe.varies for shaped in self._plan.shaped):
                kind = ScheduleDriver if follow else Schedules
                self._follower = kind(self._plan.shaped, self.namespaces)
                stack.callback(self._follower.close)
            self.schedules = self._follower if isinstance(self._follower, Schedules) else None
            self.nodes = _nodes_of(self._plan, self.namespaces)
            self.links = self._plan.links
            self.record = LabRecord(
                topology=spec.topology,
                engine=spec.engine,
                engine_reason=spec.engine_reason,
                rootless=rootless.inside(),
                build_seconds=time.monotonic() - started,
                overhead_bytes=self._plan.overhead_bytes,
                links=tuple(built.record(link) for link in self.links),
                played_at_ns=None,
            )
            stack.enter_context(directory.publish(self.namespaces))
            self._stack = stack.pop_all()

    def _link(self, name: str) -> Link:
        for link in self._plan.links:
            if link.name == name:
                return link
        raise UnknownNameError("link", name, (link.name for link in self._plan.links))

    def play(self, start_ns: int | None = None) -> int:
        """Begin the schedules and traces of all links now, or at `start_ns`; the moment, in nanoseconds of
        CLOCK_MONOTONIC.

        Noted in `record`.
        """
        start_ns = self._play(start_ns)
        self.record = self.record.model_copy(update={"played_at_ns": start_ns})
        return start_ns

    def _play(self, start_ns: int | None = None) -> int:
        start_ns = time.monotonic_ns() if start_ns is None else start_ns
        if self._relay is not None:
            self._relay.play(start_ns)
        if self._follower is not None:
            self._follower.play(start_ns)
        return start_ns

    def hold(self) -> None:
        """Go back to every pipe's own constant numbers; what is queued keeps its time."""
        if self._follower is not None:
            self._follower.hold()
        if self._relay is not None:
            self._relay.hold()
        for name, direction in sorted(self._changed):
            pipe = self._link(name).profile.pipe(direction)
            assert pipe is not None
            self._set(name, direction, pipe)
        self._changed.clear()

    def change(self, link: str, direction: LinkDirection, pipe: Pipe) -> None:
        """Shape one direction of a link otherwise, from its next packet on, until `hold`; what is queued is kept.

        SpecError where that direction has no shaper, or its engine cannot carry the pipe out; ShapingError as from
        `Lab`.
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
            self._relay.change(port.where, port.what, pipe)  # type: ignore[arg-type]  # a port's meter names its direction
            return
        shaped = self._shaped[name, direction]
        changed = replace(shaped, pipe=with_own_seed(pipe, self._plan.links.index(link), direction))
        with Netlink(self.namespaces[shaped.namespace]) as netlink:
            netem.change_plan(netlink, shaped.device, changed.plan(), link=shaped.label)
        self._shaped[name, direction] = changed

    def counters(self) -> Counters:
        """Return what every link has carried and dropped since it was built, both ways.

        LabError when the relay has died.
        """
        return self._meters.read()

    def check(self) -> None:
        """Check that the lab still stands: LabError when the relay has died or a schedule could not be followed."""
        if self._relay is not None:
            self._relay.counters()
        if isinstance(self._follower, ScheduleDriver) and (fault := self._follower.fault):
            raise LabError(f"the links' schedules are no longer followed: {fault}")

    def certify(
        self,
        form: Literal["quick", "full"],
        message_bytes: Sequence[int],
        capture: Path | None = None,
        *,
        step: BoundedStep | None = None,
    ) -> Certificate:
        """Measure every link with messages of these sizes; once more, where that fails.

        `step` judges what was found by what it does to that step; without it a link must be exact as far as the probe
        can tell. Of two attempts the better one counts, because a busy machine adds to what is wrong with a link and
        takes nothing away; what failed in the other stands in the certificate. `capture`: a file for the packets at
        the links' ends. ShapingError when a shaper is not what it was.
        """
        first = self._certify_once(form, message_bytes, capture, step)
        if first.verdict == "PASS":
            return first
        second = self._certify_once(form, message_bytes, capture, step)
        better, other = sorted((second, first), key=_badness)
        return better.model_copy(
            update={
                "taken_at": first.taken_at,
                "seconds": first.seconds + second.seconds,
                "rejected": tuple(m for m in other.measurements if m.verdict == "FAIL"),
            }
        )

    def _certify_once(
        self,
        form: Literal["quick", "full"],
        message_bytes: Sequence[int],
        capture: Path | None,
        step: BoundedStep | None,
    ) -> Certificate:
        started, taken_at = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        self.check()
        for shaped in self._shaped.values():
            with Netlink(self.namespaces[shaped.namespace]) as netlink:
                netem.check_plan(netlink, shaped.device, shaped.plan(), link=shaped.label)
        measurements = certify(
            self.links,
            self.namespaces,
            form=form,
            message_bytes=message_bytes,
            relay=self._relay,
            play=self._play,
            hold=self.hold,
            capture=capture,
        )
        certificate = Certificate(
            form=form,
            engine=self.spec.engine,
            taken_at=taken_at,
            seconds=time.monotonic() - started,
            measurements=measurements,
            rejected=(),
        )
        return certificate if step is None else step.assess(certificate)

    def watch(self) -> Watch:
        """Begin to count how late the machine makes the links. LabError when the relay has died."""
        return Watch(self._relay)

    def close(self) -> None:
        """Take it down. What still runs inside a namespace keeps that namespace, but not the links."""
        self._stack.close()


def _badness(certificate: Certificate) -> tuple[bool, float, int]:
    """Order certificates: one that passes first, then by the bound, then by how much has failed."""
    failed = sum(m.verdict == "FAIL" for m in certificate.measurements)
    return certificate.verdict == "FAIL", math.inf if certificate.bound is None else certificate.bound, failed


def _nodes_of(plan: LabPlan, namespaces: Mapping[str, Namespace]) -> tuple[LabNode, ...]:
    """Return the nodes in their order."""
    addresses = {wanted.name: wanted.addresses for wanted in plan.namespaces}
    return tuple(
        LabNode(
            index=index,
            name=name,
            # The first: of the link to the node before, as topology.py states them in the order of the links.
            address=addresses[name][0][1],
            devices=tuple(device for device, _ in addresses[name]),
            namespace=namespaces[name],
        )
        for index, name in enumerate(plan.nodes)
    )
