"""Remedies for missing capabilities, by platform: one command each, from remedies.toml. Pure, except for `facts`.

capabilities.py detects missing capabilities by trial. Only the remedy depends on the platform.
"""

from __future__ import annotations

import functools
import os
import platform as python_platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from testbed import paths
from testbed.frozen import read_toml

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


_FIXED, _CONTAINER, _ELSE = "a kernel without modules", "a container", "else"
_TEXTS = {
    "guest": GUEST,
    "relay_or_guest": f"use --engine relay, or run it in the guest kernel: {GUEST}",
    "privileged": "start the container with: --privileged --device /dev/net/tun",
}


@functools.cache
def table() -> dict[str, dict[str, str]]:
    """Return the remedies of each problem by platform, from remedies.toml."""
    return read_toml(Path(__file__).with_suffix(".toml"))


def remedy(problem: Problem, machine: Facts) -> str:
    """Return the remedy for `problem` on a machine: one command, or one choice."""
    row = table()[problem]
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
        **_TEXTS,
        "python": sys.executable,
        "testbed": paths.script(),
        "prefix": sys.prefix,
        "release": machine.release,
        "architecture": machine.architecture,
    }
    return text.format(**fields)
