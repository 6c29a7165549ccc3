"""The certificate: measure every link of a lab, all at once, and hold what is found against what was asked for.

The measuring is done by a program of its own (`testbed.net.probe`), the judging by judge.py; this starts the one and asks
the other.
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
from typing import Literal, NamedTuple

from testbed.errors import LabError
from testbed.net.judge import CONTENTION, LATENESS_TOLERANCE_MS, Judge, Lateness, overhead_bytes
from testbed.net.namespace import Namespace
from testbed.net.probe import Job, Line, Readings, Way
from testbed.net.relay import Relay, lateness_percentile
from testbed.records import Measurement
from testbed.spec import LinkProfile, Pipe

Form = Literal["quick", "full"]
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class ProbeLink:
    """One access link: a node at one end, the hub at the other."""

    name: str
    node: Namespace
    hub: Namespace
    node_address: str
    hub_address: str
    profile: LinkProfile


class _Effort(NamedTuple):
    """How much a form of certificate spends."""

    echoes: int
    repeats: int
    idle_s: float
    rate_s: float
    loss_s: float
    bulk_s: float
    longest_message_s: float
    """A message that takes longer on a link is cut down to this."""
    limit_s: float
    """After this long the probe is given up."""


_EFFORTS: dict[Form, _Effort] = {
    "quick": _Effort(echoes=20, repeats=1, idle_s=0.3, rate_s=0.2, loss_s=0, bulk_s=0, longest_message_s=1.5, limit_s=120),
    "full": _Effort(echoes=100, repeats=5, idle_s=1, rate_s=2, loss_s=2, bulk_s=3, longest_message_s=10, limit_s=600),
}


def _line(pipe: Pipe | None, profile: LinkProfile) -> Line | None:
    if pipe is None:
        return None
    return Line(
        rate_bps=pipe.rate_bps,
        delay_ns=pipe.delay_ns,
        buffer_bytes=pipe.buffer_bytes,
        loss=pipe.loss,
        overhead_bytes=overhead_bytes(profile),
    )


def _sizes(message_bytes: Sequence[int], profile: LinkProfile, effort: _Effort) -> tuple[dict[Way, int], ...]:
    def cut(size: int, pipe: Pipe | None) -> int:
        return size if pipe is None else min(size, max(1, int(pipe.rate_bps * effort.longest_message_s / 8)))

    sizes: list[dict[Way, int]] = []
    for size in sorted(set(message_bytes)):
        pair: dict[Way, int] = {"up": cut(size, profile.up), "down": cut(size, profile.down)}
        if pair not in sizes:
            sizes.append(pair)
    return tuple(sizes)


def plan(link: ProbeLink, form: Form, message_bytes: Sequence[int]) -> Job:
    """What the probe is to do on one link."""
    effort, profile = _EFFORTS[form], link.profile
    return Job(
        link=link.name,
        node_fd=link.node.fd,
        hub_fd=link.hub.fd,
        node_address=link.node_address,
        hub_address=link.hub_address,
        mtu=profile.mtu,
        congestion_control=profile.congestion_control,
        up=_line(profile.up, profile),
        down=_line(profile.down, profile),
        echoes=effort.echoes,
        messages=_sizes(message_bytes, profile, effort),
        repeats=effort.repeats,
        idle_s=effort.idle_s,
        rate_s=effort.rate_s,
        loss_s=effort.loss_s,
        bulk_s=effort.bulk_s,
    )


def _probe(jobs: Sequence[Job], limit_s: float) -> list[Readings]:
    process = subprocess.Popen(
        [sys.executable, "-m", "testbed.net.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=sorted({fd for job in jobs for fd in (job.node_fd, job.hub_fd)}),
        cwd=_ROOT,
        start_new_session=True,
    )
    asked = {"parent": os.getpid(), "jobs": [job.as_dict() for job in jobs]}
    try:
        found, errors = process.communicate(json.dumps(asked).encode(), timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise LabError(f"cannot certify {len(jobs)} links: the probe was not done after {limit_s:.0f} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # its children die with it
        process.wait()
    if process.returncode:
        why = errors.decode(errors="replace").strip() or "it left no message"
        raise LabError(f"cannot certify {len(jobs)} links: the probe ended with status {process.returncode}: {why}")
    return [Readings.from_dict(table) for table in json.loads(found)]


def _lateness(before: Sequence[int], after: Sequence[int]) -> Lateness | None:
    """Of the packets between two readings of the relay's counters; None when there were none."""
    between = [late - early for early, late in zip(before, after, strict=True)]
    p99_us = lateness_percentile(between, 0.99)
    worst_us = lateness_percentile(between, 1.0)
    return Lateness(p99_us / 1000, worst_us / 1000, sum(between)) if p99_us is not None and worst_us is not None else None


def certify(
    links: Sequence[ProbeLink], *, form: Form, message_bytes: Sequence[int], relay: Relay | None = None
) -> tuple[Measurement, ...]:
    """Measure all links at the same time, from the main thread. LabError when the probe itself cannot be run.

    `message_bytes` are the sizes that the run will send. `relay`, where one carries the links, is asked how late it was.
    A quantity that could not be measured is a failed Measurement, not an error.
    """
    assert threading.current_thread() is threading.main_thread()
    jobs = [plan(link, form, message_bytes) for link in links]
    before = relay.counters()["process"]["lateness"] if relay else []
    readings = _probe(jobs, _EFFORTS[form].limit_s)
    after = relay.counters()["process"]["lateness"] if relay else []
    lateness = _lateness(before, after)
    found: list[Measurement] = []
    for link, reading in zip(links, readings, strict=True):
        found.extend(Judge(link.profile, reading, lateness).measurements())
    if lateness:
        late = lateness.p99_ms > LATENESS_TOLERANCE_MS
        found.append(
            Measurement(
                link="relay",
                direction="both",
                quantity="lateness",
                detail="99th percentile",
                unit="ms",
                expected=0.0,
                measured=lateness.p99_ms,
                tolerance=LATENESS_TOLERANCE_MS,
                samples=lateness.packets,
                verdict="FAIL" if late else "PASS",
                note=CONTENTION if late else "",
            )
        )
    return tuple(found)
