"""Enter a namespace of a lab that another process holds."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from testbed.errors import CapabilityError, UserError

_NEWNET, _NEWUSER = 0x40000000, 0x10000000
_libc = ctypes.CDLL(None, use_errno=True)


def visit(pid: int, descriptor: int, command: Sequence[str]) -> NoReturn:
    """Become `command`, inside the network namespace that process `pid` holds as `descriptor`. From one thread only.

    A lab without root stands in a user namespace; whoever is not root joins that first. CapabilityError where that is not
    permitted, UserError where the lab has ended meanwhile or the command cannot be started.
    """
    try:
        network = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        if os.geteuid() != 0 and _user_namespace(pid) != _user_namespace(os.getpid()):
            _join(os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC), _NEWUSER)
        _join(network, _NEWNET)
    except PermissionError:
        raise CapabilityError(
            f"not permitted to enter the lab of process {pid}; be root (sudo python -m testbed ...), or the user whose lab it is"
        ) from None
    except FileNotFoundError:
        raise UserError(f"the lab of process {pid} has ended") from None
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise UserError(f"cannot run {command[0]!r}: {error.strerror}") from None


def _user_namespace(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/user").stat().st_ino


def _join(descriptor: int, kind: int) -> None:
    if _libc.setns(descriptor, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
