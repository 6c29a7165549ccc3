"""Remedies for missing capabilities: one command, by platform. Pure, except for `facts`.

capabilities.py detects missing capabilities by trial. Only the remedy depends on the platform.
"""

from __future__ import annotations

import os
import platform as python_platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from testbed import paths

Platform = Literal["debian", "ubuntu", "fedora", "wsl2", "docker", "docker desktop", "podman", "github runner", "linux"]
Problem = Literal[
    "not root",
    "namespaces",
    "veth",
    "netem",
    "old netem",
    "tun",
    "real-time",
    "congestion control",
    "user namespaces",
    "tun for users",
    "unreadable program",
    "late timers",
    "other load",
    "disk",
]

GUEST = "python -m testbed vm -- COMMAND"
"""The fallback on any x86-64 machine, without root."""


class Facts(NamedTuple):
    """The facts that identify a platform."""

    os_release: Mapping[str, str]
    """/etc/os-release."""
    kernel: str
    """/proc/version."""
    release: str
    """Output of `uname -r`."""
    architecture: str
    """Debian's name: amd64, arm64."""
    environment: Mapping[str, str]
    own_kernel: bool
    """Whether the kernel's own threads are visible, which a container hides.

    (A container image may also be booted as a machine.)
    """
    marks: frozenset[str]
    """The members of MARKS that are present."""


MARKS = ("/.dockerenv", "/run/.containerenv", "/proc/modules", "/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
"""Markers of Docker and podman; of a kernel that can load modules; of an AppArmor that may restrict user namespaces."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def facts() -> Facts:
    """Read the facts of this machine."""
    try:
        os_release = python_platform.freedesktop_os_release()
    except OSError:
        os_release = {}
    try:
        kernel = Path("/proc/version").read_text(encoding="utf8", errors="replace")
    except OSError:
        kernel = ""
    processor = python_platform.machine()
    return Facts(
        os_release=os_release,
        kernel=kernel,
        release=python_platform.release(),
        architecture=_ARCHITECTURES.get(processor, processor),
        environment=os.environ,
        own_kernel=_kernel_thread(),
        marks=frozenset(mark for mark in MARKS if Path(mark).exists()),
    )


def _kernel_thread() -> bool:
    try:
        return Path("/proc/2/comm").read_text(encoding="ascii").strip() == "kthreadd"
    except OSError:
        return False


def platform(machine: Facts) -> Platform:
    """Identify the platform: a container takes precedence over its host, because it decides permissions.

    Then the vendor of the kernel, then the distribution.
    """
    kernel = machine.kernel.lower()
    inside = None if machine.own_kernel else machine.environment.get("container")
    if inside == "podman" or ("/run/.containerenv" in machine.marks and not machine.own_kernel):
        return "podman"
    if inside == "docker" or ("/.dockerenv" in machine.marks and not machine.own_kernel):
        return "docker desktop" if "linuxkit" in kernel or "microsoft" in kernel else "docker"
    if (
        machine.environment.get("GITHUB_ACTIONS") == "true"
        and machine.environment.get("RUNNER_ENVIRONMENT") != "self-hosted"
    ):
        return "github runner"
    if "microsoft" in kernel:  # WSL 1 has no Linux kernel and no namespaces; the same remedies apply
        return "wsl2"
    family = [machine.os_release.get("ID", ""), *machine.os_release.get("ID_LIKE", "").split()]
    for name in family:
        if name in ("ubuntu", "debian", "fedora"):
            return name  # type: ignore[return-value]
        if name in ("rhel", "centos"):
            return "fedora"
    return "linux"


_FIXED = "a kernel without modules"
_CONTAINER = "a container"
_ELSE = "else"
_RELAY_OR_GUEST = f"use --engine relay, or run it in the guest kernel: {GUEST}"
_PRIVILEGED = "start the container with: --privileged --device /dev/net/tun"

_TABLE: Mapping[Problem, Mapping[str, str]] = {
    "not root": {_ELSE: "sudo {testbed} ..."},
    "namespaces": {
        _CONTAINER: _PRIVILEGED,
        _ELSE: f"this kernel was built without network namespaces; use another kernel, or the guest kernel: {GUEST}",
    },
    "veth": {
        "docker": "on the host: sudo modprobe veth",
        "podman": "on the host: sudo modprobe veth",
        _FIXED: f"this kernel was built without veth; use another kernel, or the guest kernel: {GUEST}",
        _ELSE: "sudo modprobe veth",
    },
    "netem": {
        "debian": "sudo modprobe sch_netem",
        "debian cloud": "sudo apt install linux-image-{architecture} && sudo apt remove linux-image-{release}"
        " && sudo reboot",
        "ubuntu": "sudo apt install linux-modules-extra-{release} && sudo modprobe sch_netem",
        "fedora": "sudo dnf install kernel-modules-extra-{release} && sudo modprobe sch_netem",
        "github runner": "sudo apt-get install linux-modules-extra-{release} && sudo modprobe sch_netem"
        " (if that package is gone: --engine relay, or python -m testbed vm -- COMMAND)",
        "docker": "on the host: sudo modprobe sch_netem",
        "podman": "on the host (podman machine ssh): sudo modprobe sch_netem",
        "docker desktop": f"its kernel has none; {_RELAY_OR_GUEST}",
        "wsl2": f"its kernel has none; {_RELAY_OR_GUEST}",
        _FIXED: f"this kernel loads no modules; {_RELAY_OR_GUEST}",
        _ELSE: "sudo modprobe sch_netem",
    },
    "old netem": {_ELSE: f"it needs Linux 6.6 or newer; {_RELAY_OR_GUEST}"},
    "tun": {
        _CONTAINER: _PRIVILEGED,
        _FIXED: f"this kernel was built without TUN; use --engine netem, or the guest kernel: {GUEST}",
        _ELSE: "sudo modprobe tun",
    },
    "real-time": {
        _CONTAINER: "start the container with: --cap-add SYS_NICE --ulimit rtprio=99",
        _ELSE: "run as root: sudo {testbed} ...",
    },
    "congestion control": {
        "docker": "on the host: sudo modprobe -a tcp_bbr tcp_cubic",
        "docker desktop": "choose an available one: --set congestion_control=cubic",
        "podman": "on the host: sudo modprobe -a tcp_bbr tcp_cubic",
        "wsl2": "choose an available one: --set congestion_control=cubic",
        _FIXED: "choose an available one: --set congestion_control=cubic",
        _ELSE: "sudo modprobe -a tcp_bbr tcp_cubic",
    },
    "user namespaces": {
        _CONTAINER: _PRIVILEGED,
        "debian": "run as root, or: sudo sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=10000",
        "apparmor": "run as root, or install an AppArmor profile that allows {python} user namespaces:"
        " see docs/virtual-machines.md",
        _ELSE: "run as root, or: sudo sysctl -w user.max_user_namespaces=10000",
    },
    "tun for users": {_ELSE: "run as root, or: sudo chmod 0666 /dev/net/tun"},
    "unreadable program": {_ELSE: "sudo chmod -R a+rX {prefix} (and each folder above it, and above its Python)"},
    "late timers": {
        "wsl2": "stop other programs; give WSL at least two processors (processors= in .wslconfig)",
        _ELSE: "stop other programs; dedicate processors to a virtual machine;"
        " a certificate will show whether it matters",
    },
    "other load": {_ELSE: "stop other programs: `top` lists them"},
    "disk": {_ELSE: "free disk space, or write elsewhere: --results FOLDER"},
}
"""Remedies by platform, with `a container` for other containers and `else` for the rest.

A row about kernel features may have an entry for kernels without loadable modules.
"""


def remedy(problem: Problem, machine: Facts) -> str:
    """Return the remedy for `problem` on a machine: one command, or one choice."""
    row = _TABLE[problem]
    where: str = platform(machine)
    if _FIXED in row and "/proc/modules" not in machine.marks:
        where = _FIXED
    elif where == "debian" and "debian cloud" in row and "-cloud-" in machine.release:
        where = "debian cloud"
    elif problem == "user namespaces" and MARKS[3] in machine.marks:
        where = "apparmor"
    fallback = _CONTAINER if where in ("docker", "docker desktop", "podman") and _CONTAINER in row else _ELSE
    text = row.get(where, row[fallback])
    fields = {
        "python": sys.executable,
        "testbed": paths.script(),
        "prefix": sys.prefix,
        "release": machine.release,
        "architecture": machine.architecture,
    }
    return text.format(**fields)
