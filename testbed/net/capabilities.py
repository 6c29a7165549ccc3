"""What this machine can do, found by trying it in a scratch namespace: never by a version, a module list or a config file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from testbed import paths, spec
from testbed.errors import CapabilityError, LabError, TestbedError
from testbed.net import netem, offloads, qdisc, sysctl, topology
from testbed.net.namespace import Namespace
from testbed.net.netlink import Netlink
from testbed.net.relay.tun import open_tun
from testbed.spec import Engine, Frozen, Pipe

_SUDO = f"sudo {sys.executable} -m testbed ..."
_GUEST = "python -m testbed vm -- COMMAND"


class Finding(Frozen):
    """One thing tried."""

    name: str
    ok: bool
    needed: bool
    """False for what has a substitute, or what only some profiles use."""
    detail: str
    """What was found."""
    remedy: str
    """What to do, one command where there is one; empty when nothing is wrong."""


def _scratch_cable(a: Namespace, b: Namespace) -> None:
    """A veth cable between two namespaces, device `probe0` at both ends."""
    with Netlink(a) as netlink:
        netlink.add_veth("probe0", "02:77:ff:00:00:00", 1500, b, "probe0", "02:77:ff:00:00:01")


def _try_namespaces() -> str:
    with Namespace("probe") as probe, probe.entered():
        sysctl.apply(topology.base_sysctls(forward=True))
    return "made one, and set its kernel parameters"


def _try_veth() -> str:
    with Namespace("probe-a") as a, Namespace("probe-b") as b:
        _scratch_cable(a, b)
        with a.entered():
            off = offloads.switch_off("probe0")
    return f"laid a cable and switched its {len(off)} offloads off"


def try_netem() -> str:
    """Shape a scratch device with every effect that profiles use, and compare what the kernel holds; what was done.

    CapabilityError when this kernel or user cannot, ShapingError when its netem holds something else.
    """
    pipe = Pipe(rate_bps=80_000_000, delay_ns=10_000_000, buffer_bytes=1_000_000, loss=0.001, seed=1)
    plan = qdisc.plan(pipe, mtu=1500, layer="ip")
    with Namespace("probe-a") as a, Namespace("probe-b") as b:
        _scratch_cable(a, b)
        with Netlink(a) as netlink:
            netem.apply(netlink, "probe0", plan, link="a scratch link")
    return "set rate, delay, limit, loss and seed, and read them back"


def try_tun() -> str:
    """Make a TUN device in a scratch namespace; what was done. CapabilityError when this machine or user cannot."""
    with Namespace("probe") as probe, probe.entered():
        os.close(open_tun("probe0"))
    return "made a device"


def _try_real_time() -> str:
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
        os.sched_setscheduler(0, policy, parameters)
    except PermissionError:
        raise CapabilityError("a process may not have a real-time priority (SCHED_FIFO) here") from None
    return "SCHED_FIFO granted"


def _try_congestion_controls() -> str:
    wanted = {spec.load_profile(name).congestion_control for name in spec.profile_files()}
    for algorithm in sorted(wanted):
        with sysctl.congestion_control_allowed(algorithm), Namespace("probe") as probe, probe.entered():
            sysctl.set_congestion_control(algorithm)
    return f"the profiles use {', '.join(sorted(wanted))}"


def _try_user() -> str:
    if (user := paths.invoking_user()) is None:
        return "no other user behind sudo: stage hosts run as root, without its capabilities"
    uid, gid = user
    command = [sys.executable, "-c", "import testbed.process"]
    try:
        done = subprocess.run(
            command,
            user=uid,
            group=gid,
            extra_groups=[],
            capture_output=True,
            timeout=60,
            check=False,
            cwd=Path(__file__).parents[2],
        )
    except OSError as error:
        raise CapabilityError(f"user {uid} cannot run {sys.executable}: {error.strerror}") from None
    if done.returncode != 0:
        raise CapabilityError(f"user {uid} cannot import testbed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return f"user {uid} can run stage hosts"


def _find(name: str, attempt: Callable[[], str], remedy: str, *, needed: bool) -> Finding:
    try:
        return Finding(name=name, ok=True, needed=needed, detail=attempt(), remedy="")
    except (TestbedError, OSError) as error:
        return Finding(name=name, ok=False, needed=needed, detail=str(error), remedy=remedy)


def findings() -> tuple[Finding, ...]:
    """Everything that a lab needs, each tried on its own. Raises nothing: what fails is a finding with a remedy."""
    root = "" if os.geteuid() == 0 else f"run as root: {_SUDO}"
    shaper = _find("sch_netem", try_netem, root or f"modprobe sch_netem; else --engine relay, or {_GUEST}", needed=False)
    tun = _find("TUN device", try_tun, root or "modprobe tun; in a container add --device /dev/net/tun", needed=not shaper.ok)
    return (
        _find("network namespaces", _try_namespaces, root or "in a container: start it with --privileged", needed=True),
        _find("veth and offloads", _try_veth, root or "modprobe veth", needed=True),
        shaper.model_copy(update={"needed": not tun.ok}),
        tun,
        _find("real-time priority", _try_real_time, root or "in a container add --cap-add SYS_NICE", needed=not shaper.ok),
        _find(
            "congestion control", _try_congestion_controls, root or "modprobe tcp_NAME, or another in the profile", needed=True
        ),
        _find("the invoking user", _try_user, f"make {sys.prefix} and its Python readable for that user", needed=True),
    )


def resolve_engine(asked: Literal["auto", "netem", "relay"]) -> tuple[Engine, str]:
    """The engine to use and why: netem where it works when tried, else relay, unless one is asked for.

    CapabilityError, which says what to do, when the engine asked for, or either, does not work here.
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
            f"neither engine works here. netem: {reason}. relay: {error}. Or run it in the guest kernel: {_GUEST}"
        ) from None


def _require(engine: str, attempt: Callable[[], str]) -> str:
    try:
        return attempt()
    except LabError as error:
        raise CapabilityError(f"the engine {engine} was asked for and does not work here: {error}") from None


def _refuse_if_unprivileged() -> None:
    """A lab may stand in a user namespace of one's own; a plain user has none."""
    try:
        Namespace("probe").close()
    except CapabilityError:
        raise CapabilityError(f"a lab needs root, to make network namespaces and links; run it as root: {_SUDO}") from None
