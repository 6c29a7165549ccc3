"""A lab without root, in a user namespace where an ordinary user may create network namespaces, links and shapers.

It lacks real-time priorities (certificates show the cost) and machine-wide kernel settings. All other code is the same.
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
    # Do not advise disabling it, which would open it for every program.
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "see docs/virtual-machines.md for a profile for this Python only",
    ),
    ("kernel/unprivileged_userns_clone", "0", "allow it: sudo sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "allow it: sudo sysctl -w user.max_user_namespaces=15000"),
)
"""Settings that forbid it: name, forbidding value, remedy."""
_WHOLE_RANGE = 2**32 - 1


def inside() -> bool:
    """Return whether this process is in a user namespace other than the initial one."""
    mapped = [line.split() for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()]
    return mapped != [["0", "0", str(_WHOLE_RANGE)]]


def enter() -> None:
    """Move this process into a new user and network namespace, in which it is root. It must be single-threaded.

    Files that it creates still belong to the user outside. CapabilityError with advice where this machine forbids it.
    """
    assert threading.active_count() == 1
    uid, gid = os.geteuid(), os.getegid()
    try:
        unshare(NEW_USER | NEW_NETWORK)
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            (Path("/proc/self") / name).write_text(content, encoding="ascii")
    except OSError as error:  # AppArmor allows the namespace but removes all its capabilities
        raise CapabilityError(_refused(error.errno or errno.EPERM)) from None


def _refused(number: int) -> str:
    why = f"cannot create a user namespace, which a lab without root needs: {os.strerror(number)}"
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
        return " (user.max_user_namespaces is exhausted)"
    return " (in a container: start it with --privileged)" if number == errno.EPERM else ""
