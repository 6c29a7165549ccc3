"""A lab without root: in a user namespace of one's own, where an ordinary user may make network namespaces, links and
shapers.

What it lacks: real-time priorities (the certificate judges what that costs), and of the kernel's settings those that
belong to the whole machine. Everything else is the same code.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from testbed.errors import CapabilityError
from testbed.net.kernel.namespace import NEW_NETWORK, NEW_USER, unshare

_SETTINGS = Path("/proc/sys")
_SWITCHES = (
    # Not by switching it off, which would open it for every program.
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "docs/virtual-machines.md has a profile for this Python alone",
    ),
    ("kernel/unprivileged_userns_clone", "0", "allow it: sudo sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "allow it: sudo sysctl -w user.max_user_namespaces=15000"),
)
"""Settings that forbid it: name, the value that does, what to do."""
_WHOLE_RANGE = 2**32 - 1


def inside() -> bool:
    """Say whether this process lives in a user namespace that is not the machine's first."""
    mapped = [line.split() for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()]
    return mapped != [["0", "0", str(_WHOLE_RANGE)]]


def enter() -> None:
    """Move this process into a new user and network namespace, in which it is root. It must have one thread only.

    Files that it makes still belong to the user outside. CapabilityError, which says what to do, where this machine
    forbids it.
    """
    assert threading.active_count() == 1
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(NEW_USER | NEW_NETWORK)
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            (Path("/proc/self") / name).write_text(content, encoding="ascii")
    except OSError as error:  # AppArmor lets the namespace be made, and takes every capability in it away
        raise CapabilityError(_refused(error.errno or errno.EPERM)) from None


def _refused(number: int) -> str:
    why = f"cannot make a user namespace, which a lab without root stands in: {os.strerror(number)}"
    return f"{why}{_hint(number)}; or run it as root (sudo), or in the guest kernel: python -m testbed vm -- COMMAND"


def _hint(number: int) -> str:
    for setting, forbids, remedy in _SWITCHES:
        try:
            value = (_SETTINGS / setting).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if value == forbids:
            return f" ({setting.replace('/', '.')} is {value}; {remedy})"
    if number == errno.ENOSPC:
        return " (there are as many as user.max_user_namespaces allows)"
    return " (in a container: start it with --privileged)" if number == errno.EPERM else ""
