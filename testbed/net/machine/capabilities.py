"""This machine's capabilities, determined by trials in a scratch namespace, never from versions, module lists or
config.

remedies.py has the remedy for each missing capability, by platform.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from testbed import paths, profiles, units
from testbed.errors import CapabilityError, LabError, TestbedError
from testbed.frozen import Frozen
from testbed.net.kernel import netem, sysctl
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netem_plan import plan_netem
from testbed.net.kernel.netlink import Netlink
from testbed.net.kernel.offloads import Offloads
from testbed.net.lab_plan import base_sysctls
from testbed.net.machine import remedies, rootless, timekeeping
from testbed.net.machine.remedies import GUEST, Problem
from testbed.net.relay.tun import open_tun
from testbed.process import ROOT
from testbed.profiles import Bernoulli, GilbertElliott, Pipe, Slot
from testbed.spec import Engine

_NOBODY = 65534
_PR_SET_DUMPABLE = 4
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_FREE_BYTES = 1_000_000_000
"""Room for the results of a long sweep with counters, and for a data set."""

_PLAIN: dict[str, Any] = {
    "rate_bps": 80_000_000,
    "delay_ns": 10_000_000,
    "buffer_bytes": 1_000_000,
    "loss": Bernoulli(probability=0.001),
}
_EFFECTS: dict[str, dict[str, Any]] = {
    "Gilbert-Elliott loss": {"loss": GilbertElliott(enter_bad=0.01, leave_bad=0.3, lost_in_bad=1, lost_in_good=0)},
    "jitter": {"jitter_ns": 1_000_000},
    "reorder": {"reorder": 0.01},
    "duplicate": {"duplicate": 0.01},
    "slot": {"slot": Slot(wait_ns=1_000_000, wait_max_ns=2_000_000, packets=10, max_bytes=0)},
    "a delay of 5 s": {"delay_ns": 5_000_000_000},
    "a rate of 40 Gbit/s": {"rate_bps": 40_000_000_000},
}
"""netem's effects beyond rate, delay, limit, independent loss and seed. The last two need 64-bit attributes."""


class Capability(Frozen):
    """One capability that was tried."""

    name: str
    ok: bool
    needed: bool
    """False if there is a substitute, or only some profiles use it."""
    detail: str
    """Result of the trial."""
    remedy: str
    """The remedy, a single command where possible; empty on success."""


@contextmanager
def _scratch_device() -> Iterator[tuple[Netlink, Namespace]]:
    """Create a namespace with a veth device `probe0`, whose other end is in a second one."""
    with Namespace("probe-a") as a, Namespace("probe-b") as b, Netlink(a) as netlink:
        netlink.add_veth("probe0", "02:77:ff:00:00:00", 1500, b, "probe0", "02:77:ff:00:00:01")
        yield netlink, a


def _try_namespaces() -> str:
    with Namespace("probe") as probe, probe.entered():
        sysctl.set_parameters(base_sysctls(forward=True))
    return "created one, and set its kernel parameters" + (", in a new user namespace" if rootless.inside() else "")


def _try_veth() -> str:
    with _scratch_device() as (_, namespace), namespace.entered():
        off = Offloads().switch_off("probe0")
    return f"created a veth pair and disabled its {len(off)} offloads"


def _shape(netlink: Netlink, **changes: Any) -> None:
    pipe = Pipe.plain(**{**_PLAIN, **changes})
    netem.apply_plan(netlink, "probe0", plan_netem(pipe, mtu=1500, layer="ip"), link="a scratch link")


def try_netem() -> str:
    """Shape a scratch device with the effects that every profile uses, and compare the kernel's state; returns a
    summary.

    CapabilityError when this kernel or user cannot, ShapingError when its netem differs.
    """
    with _scratch_device() as (netlink, _):
        _shape(netlink)
    return "set rate, delay, limit, loss and seed, and read them back"


def _try_effects() -> str:
    refused = {}
    for name, changes in _EFFECTS.items():
        with _scratch_device() as (netlink, _):
            try:
                _shape(netlink, **changes)
            except (CapabilityError, LabError) as error:
                refused[name] = str(error)
    if refused:
        raise CapabilityError(
            "refused, or different from the request: " + ", ".join(f"{name} ({why})" for name, why in refused.items())
        )
    return f"set and read back: {', '.join(_EFFECTS)}"


def try_tun() -> str:
    """Create a TUN device in a scratch namespace; returns a summary. CapabilityError when this machine or user
    cannot.
    """
    with Namespace("probe") as probe, probe.entered():
        os.close(open_tun("probe0"))
    return "created a device"


def _try_congestion_controls() -> str:
    wanted = {profiles.load_profile(name).congestion_control for name in profiles.profile_files()}
    for algorithm in sorted(wanted):
        sysctl.require_congestion_control(algorithm)
    return f"the profiles use {', '.join(sorted(wanted))}"


def _try_user() -> str:
    if (user := paths.invoking_user()) is None:
        return "not under sudo: stage hosts run as this user"
    uid, gid = user
    try:
        done = subprocess.run(
            [sys.executable, "-Pc", "import sys; sys.path.insert(0, sys.argv[1]); import testbed.process", ROOT],
            user=uid,
            group=gid,
            extra_groups=[],
            capture_output=True,
            timeout=60,
            check=False,
            cwd=ROOT,
        )
    except OSError as error:
        raise CapabilityError(f"user {uid} cannot run {sys.executable}: {error.strerror}") from None
    if done.returncode != 0:
        raise CapabilityError(
            f"user {uid} cannot import testbed: {done.stderr.decode(errors='replace').strip()[-300:]}"
        )
    return f"user {uid} can run stage hosts"


def _try_rootless() -> str:
    """Enter a user namespace and create a TUN device there, in a child process, as an ordinary user."""
    uid, gid = paths.invoking_user() or (_NOBODY, _NOBODY)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:  # needs no readable package folder
        why = b""
        try:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
            os.setresuid(uid, uid, uid)
            _prctl(_PR_SET_DUMPABLE, 1)  # otherwise /proc/self still belongs to root after the change of user
            rootless.enter()
            os.close(open_tun("probe0"))
        except (TestbedError, OSError) as error:
            why = str(error).encode()
        finally:
            os.write(writing, why)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        refused = answer.read().decode()
    os.waitpid(child, 0)
    if refused:
        raise CapabilityError(f"user {uid}: {refused}")
    return f"user {uid} can create a user namespace, and a TUN device in it"


def _try_disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free
    if free < _FREE_BYTES:
        raise CapabilityError(
            f"{units.format_size(free)} are free in {Path.cwd()}, but a long sweep needs "
            f"{units.format_size(_FREE_BYTES)}"
        )
    return f"{units.format_size(free)} free here"


def _find(
    name: str, attempt: Callable[[], str], problem: Problem, *, needed: bool, blocked: bool = False
) -> Capability:
    """Try one capability; on failure, `problem` selects the remedy. `blocked`: no namespace can be created for it."""
    if blocked:
        return Capability(name=name, ok=False, needed=needed, detail="not tried: it needs a namespace", remedy="")
    try:
        return Capability(name=name, ok=True, needed=needed, detail=attempt(), remedy="")
    except (TestbedError, OSError) as error:
        if problem == "namespaces" and os.geteuid() != 0:
            problem = "not root"
        if (problem == "user namespaces" or rootless.inside()) and "/dev/net/tun" in str(error):
            problem = "tun for users"
        if problem == "netem" and "Linux before" in str(error):
            problem = "old netem"
        # The advice in an error, after its semicolon, is generic; the remedy is for this platform.
        detail, remedy = str(error).partition("; ")[0], remedies.remedy(problem, remedies.facts())
        return Capability(name=name, ok=False, needed=needed, detail=detail, remedy=remedy)


def try_capabilities() -> tuple[Capability, ...]:
    """Try all capabilities that a lab needs, independently. Never raises: failures are returned with remedies."""
    namespaces = _find("network namespaces", _try_namespaces, "namespaces", needed=True)
    inside = partial(_find, blocked=not namespaces.ok)
    shaper = inside("netem", try_netem, "netem", needed=False)
    tun = inside("TUN device", try_tun, "tun", needed=not shaper.ok)
    kept, rooted = timekeeping.measure_timekeeping(), not rootless.inside()
    real_time = partial(timekeeping.judge_priority, kept)
    tried = [
        namespaces,
        inside("veth and offloads", _try_veth, "veth", needed=True),
        shaper.model_copy(update={"needed": not tun.ok}),
        tun,
        inside("congestion control", _try_congestion_controls, "congestion control", needed=True),
        _find("real-time priority", real_time, "real-time", needed=rooted and not shaper.ok),
        _find("timers", partial(timekeeping.judge_timers, kept), "late timers", needed=False),
        _find("processors", partial(timekeeping.judge_load, kept), "other load", needed=False),
        _find("the invoking user", _try_user, "unreadable program", needed=True),
        _find("disk", _try_disk, "disk", needed=False),
    ]
    if shaper.ok:
        tried.insert(3, inside("netem's other effects", _try_effects, "old netem", needed=False))
    if os.geteuid() == 0 and rooted:
        tried.insert(-1, _find("without root", _try_rootless, "user namespaces", needed=False))
    return tuple(tried)


def resolve_engine(asked: Literal["auto", "netem", "relay"]) -> tuple[Engine, str]:
    """Choose the engine, with the reason: netem if a trial succeeds, else relay, unless one is requested.

    CapabilityError with advice when the requested engine, or either, does not work here.
    """
    if os.geteuid() != 0:
        _refuse_if_unprivileged()
    if asked == "netem":
        return "netem", f"asked for; {_require('netem', try_netem)}"
    if asked == "relay":
        return "relay", f"asked for; {_require('relay', try_tun)}"
    try:
        return "netem", f"auto: tried sch_netem: {try_netem()}"
    except (CapabilityError, LabError) as error:
        reason = str(error).split(";")[0]
    try:
        return "relay", f"auto: {reason}; tried TUN instead: {try_tun()}"
    except (CapabilityError, LabError) as error:
        raise CapabilityError(
            f"neither engine works here. netem: {reason}. relay: {error}. Or run it in the guest kernel: {GUEST}"
        ) from None


def _require(engine: str, attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except LabError as error:
        raise CapabilityError(f"the requested engine {engine} does not work here: {error}") from None


def _refuse_if_unprivileged() -> None:
    """Refuse an ordinary user outside a user namespace in which a lab can run."""
    try:
        Namespace("probe").close()
    except CapabilityError:
        remedy = remedies.remedy("not root", remedies.facts())
        raise CapabilityError(
            f"a lab needs root to create network namespaces and links; run as root: {remedy}"
        ) from None
