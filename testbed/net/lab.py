"""A lab: the namespaces, links and shapers of one topology, built from a plan, read back, and removed on close.

topology.py plans a lab and build.py builds it; meters.py counts, schedules.py and the relay play varying links, and
certificate/ measures. Nothing here has a name outside this process: when it dies, in any way, the kernel removes
everything.
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

from pydantic import Field, model_validator

from testbed.closing import Closing
from testbed.directions import LinkDirection
from testbed.errors import LabError, SpecError, UnknownNameError
from testbed.frozen import Frozen, is_none
from testbed.net import directory
from testbed.net.background import Background
from testbed.net.build import build_lab
from testbed.net.certificate.certify import Watch, certify
from testbed.net.kernel import shaping
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Netlink
from testbed.net.lab_plan import LabPlan, Link, with_own_seed
from testbed.net.machine import rootless
from testbed.net.meters import Counters, Meters
from testbed.net.schedules import ScheduleDriver, Schedules
from testbed.net.topology import MAX_NODES, plan_lab
from testbed.profiles import LinkProfile, Pipe
from testbed.records import Certificate, LabRecord
from testbed.spec import Engine, RtoMaxMs, Sites, Topology, sites_fault

if TYPE_CHECKING:
    from testbed.metrics.bound import BoundedStep


_DRAIN_S, _DRAIN_LOOK_S = 60.0, 0.01


class LabSpec(Frozen):
    """Specification of a lab."""

    topology: Topology
    profiles: tuple[LinkProfile, ...] = Field(min_length=1)
    """One for all links, or one per link: by node in a star, by boundary in a line."""
    nodes: int = Field(ge=1, le=MAX_NODES)
    sites: Sites = Field(default=None, exclude_if=is_none)
    tcp_rto_max_ms: RtoMaxMs = Field(default=None, exclude_if=is_none)
    engine: Engine
    engine_reason: str
    """Reason for this engine: see `capabilities.resolve_engine`."""

    @property
    def distinct(self) -> tuple[LinkProfile, ...]:
        """Every profile once, with those of the sites."""
        return tuple(dict.fromkeys((*self.profiles, *(site.profile for site in self.sites or ()))))

    @model_validator(mode="after")
    def _sites_fit(self) -> LabSpec:
        if fault := sites_fault(self.topology, self.nodes, self.sites):
            raise ValueError(fault)
        return self


@dataclass(frozen=True, kw_only=True)
class LabNode:
    """The place of one node of a job in the lab."""

    index: int
    name: str
    address: str
    """IPv4 address. Reachable in a star by every other node, in a line by the previous node (for the first: by the
    next)."""
    devices: tuple[str, ...]
    """Ends of its links inside `namespace`; in a line the one to the previous node comes first."""
    namespace: Namespace


class Lab(Closing):
    """Running links until it is closed; a context manager.

    Use it from the main thread only, like `Relay`; `counters` from any single thread.
    """

    nodes: tuple[LabNode, ...]
    links: tuple[Link, ...]
    """Links in the order of nodes or boundaries. `namespaces` has the namespaces at their ends."""
    namespaces: Mapping[str, Namespace]
    """All namespaces by name, including those of the hub and the gateways."""
    record: LabRecord
    """The lab as reported by the kernel."""
    schedules: Schedules | None
    """Schedules of varying links under engine netem, if the owner of the lab follows them; otherwise None."""

    def __init__(self, spec: LabSpec, *, follow: bool = True) -> None:
        """Build it. If a step fails, everything built before is removed.

        `follow`: a thread of the lab follows the schedules of varying links; otherwise it has no thread, and its owner
        follows `schedules`.

        SpecError, before anything is started, for a specification that topology or engine cannot implement. LabError
        names the step, ShapingError the request and the result, CapabilityError the missing capability.
        """
        started = time.monotonic()
        self.spec = spec
        asked = spec.topology, spec.profiles, spec.nodes, spec.engine, spec.sites
        self._plan = plan_lab(*asked, spec.tcp_rto_max_ms)
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
            self._background: Background | None = None
            stack.callback(self._end_background)
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
            self._ready_background()  # before a run: starting a program takes time
            stack.enter_context(directory.publish(self.namespaces))
            self._stack = stack.pop_all()

    def _link(self, name: str) -> Link:
        for link in self._plan.links:
            if link.name == name:
                return link
        raise UnknownNameError("link", name, (link.name for link in self._plan.links))

    def play(self, start_ns: int | None = None) -> int:
        """Start the schedules and traces of all links now, or at `start_ns`; returns the start in nanoseconds of
        CLOCK_MONOTONIC.

        Background flows start then, too. The start is stored in `record`.
        """
        self._ready_background()
        start_ns = self._play(start_ns)
        if self._background is not None:
            self._background.play(start_ns)
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
        """Return every pipe to its constant values; queued packets keep their times.

        Background flows end, and `record` has what they carried; returns when their last packets have arrived.
        """
        if self._background is not None:
            self.record = self.record.model_copy(update={"background": self._background.carried()})
            self._end_background()
            self._drain()
        if self._follower is not None:
            self._follower.hold()
            self.record = self.record.model_copy(update={"faults": self._follower.faults() or None})
        if self._relay is not None:
            self._relay.hold()
        for name, direction in sorted(self._changed):
            pipe = self._link(name).profile.pipe(direction)
            assert pipe is not None
            self._set(name, direction, pipe)
        self._changed.clear()

    def _ready_background(self) -> None:
        if self._background is None and any(link.home for link in self.links):
            self._background = Background(self.links, self.namespaces)

    def _end_background(self) -> None:
        if self._background is not None:
            self._background.close()
            self._background = None

    def _drain(self) -> None:
        """Wait until no link holds a packet, for at most a minute: certificates need empty links."""
        delay_ns = max(pipe.delay_ns for link in self.links for pipe in link.profile.pipes)
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline:
            time.sleep(_DRAIN_LOOK_S + delay_ns / 1e9)  # packets in their delay may not be counted
            if not any(way.backlog_bytes for ways in self.counters().values() for way in ways.values()):
                return

    def change(self, link: str, direction: LinkDirection, pipe: Pipe) -> None:
        """Change one direction of a link from its next packet on, until `hold`; queued packets are kept.

        SpecError where that direction has no shaper, or its engine cannot implement the pipe; ShapingError like `Lab`.
        """
        if self._link(link).profile.pipe(direction) is None:
            raise SpecError(
                f"cannot change {link} {direction}, which was built unshaped; build it with a profile that shapes it"
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
        kinds = [[child.kind for child in each.plan().children] for each in (shaped, changed)]
        if kinds[0] != kinds[1]:
            raise SpecError(f"cannot change {name} {direction} to other qdiscs; build it with a pipe that varies alike")
        with Netlink(self.namespaces[shaped.namespace]) as netlink:
            shaping.change_shaping(netlink, shaped.device, shaped.plan(), changed.plan(), link=shaped.label)
        self._shaped[name, direction] = changed

    def counters(self) -> Counters:
        """Return each link's traffic and drops since it was built, in both directions.

        LabError when the relay has died.
        """
        return self._meters.read()

    def check(self) -> None:
        """Check that the lab is still running: LabError when the relay or the background flows have died, or a schedule
        could not be followed.
        """
        if self._background is not None:
            self._background.carried()
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
        """Measure every link with messages of these sizes, and repeat once on failure.

        `step` judges deviations by their effect on that step; without it a link must be exact within the probe's
        accuracy. The better of two attempts counts, because a busy machine can only add to a link's deviations; the
        certificate lists the failures of the other attempt. `capture`: a file for the packets at the links' ends.
        ShapingError when a shaper has changed.
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
                shaping.check_shaping(netlink, shaped.device, shaped.plan(), link=shaped.label)
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
        """Start counting the lateness that the machine causes on links. LabError when the relay has died."""
        return Watch(self._relay)

    def close(self) -> None:
        """Tear it down. Processes still running inside a namespace keep that namespace, but not the links."""
        self._stack.close()


def _badness(certificate: Certificate) -> tuple[bool, float, int]:
    """Order certificates: passing ones first, then by the bound, then by the number of failures."""
    failed = sum(m.verdict == "FAIL" for m in certificate.measurements)
    return certificate.verdict == "FAIL", math.inf if certificate.bound is None else certificate.bound, failed


def _nodes_of(plan: LabPlan, namespaces: Mapping[str, Namespace]) -> tuple[LabNode, ...]:
    """Return the nodes, in order."""
    addresses = {wanted.name: wanted.addresses for wanted in plan.namespaces}
    return tuple(
        LabNode(
            index=index,
            name=name,
            # The first one belongs to the link to the previous node, because topology.py lists them in the order of
            # links.
            address=addresses[name][0][1],
            devices=tuple(device for device, _ in addresses[name]),
            namespace=namespaces[name],
        )
        for index, name in enumerate(plan.nodes)
    )
