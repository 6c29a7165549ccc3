"""List the labs on this machine, and enter one: for `testbed shell`.

A lab's namespaces have no names in the file system, so that nothing can be left behind. Instead a lab keeps an
in-memory file open, which lists its namespaces' descriptors; other processes find it by name under /proc, and it ends
with the process.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from testbed.errors import CapabilityError, LabError, UserError
from testbed.net.kernel.namespace import NEW_USER, Namespace, enter

_NAME = "testbed-lab"
_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RunningLab:
    """A running lab of some process."""

    pid: int
    started: str
    """UTC, ISO 8601, to the microsecond."""
    namespaces: Mapping[str, int]
    """That process's descriptors by the namespaces' names: open /proc/PID/fd/N to enter one."""


@contextmanager
def publish(namespaces: Mapping[str, Namespace]) -> Iterator[None]:
    """Make `running_labs` list the lab with these namespaces, as long as this is open."""
    try:
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    except OSError as error:
        raise LabError(f"cannot keep the lab's list of namespaces in memory: {error.strerror}") from None
    try:
        content = {
            "pid": os.getpid(),
            "started": datetime.now(UTC).isoformat(),
            "namespaces": {name: space.fd for name, space in namespaces.items()},
        }
        os.write(descriptor, json.dumps(content).encode())
        yield
    finally:
        os.close(descriptor)


def running_labs() -> list[RunningLab]:
    """List the labs of all processes that the caller may inspect, oldest first.

    Other users' labs are visible only to root.
    """
    labs = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()).startswith(f"/memfd:{_NAME} ") and (
                        lab := _read(entry, int(process.name))
                    ):
                        labs.append(lab)
    return sorted(labs, key=lambda lab: lab.started)


def _read(entry: Path, pid: int) -> RunningLab | None:
    with entry.open("rb") as file:
        content = file.read(_LARGEST_BYTES)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # any file may have that name
        told = json.loads(content)
        namespaces = {str(name): int(descriptor) for name, descriptor in told["namespaces"].items()}
        if told["pid"] == pid:  # otherwise a child inherited it
            return RunningLab(pid=pid, started=str(told["started"]), namespaces=namespaces)
    return None


def run_inside(pid: int, descriptor: int, command: Sequence[str]) -> NoReturn:
    """Replace this process by `command`, in the network namespace that process `pid` holds as `descriptor`.
    Single-threaded callers only.

    A rootless lab is in a user namespace, which a caller without root joins first. CapabilityError where that is not
    permitted, UserError where the lab has ended or the command cannot be started.
    """
    try:
        network = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        if os.geteuid() != 0 and _user_namespace(pid) != _user_namespace(os.getpid()):
            enter(os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC), NEW_USER)
        enter(network)
    except PermissionError:
        raise CapabilityError(
            f"not permitted to enter the lab of process {pid}; run as root (sudo .venv/bin/testbed ...), or as the "
            "user who started the lab"
        ) from None
    except FileNotFoundError:
        raise UserError(f"the lab of process {pid} has ended") from None
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise UserError(f"cannot run {command[0]!r}: {error.strerror}") from None


def _user_namespace(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/user").stat().st_ino
