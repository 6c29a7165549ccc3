"""Which labs run on this machine, and where their namespaces are: for `testbed shell`.

A lab's namespaces have no names in the file system, so that nothing can be left behind. Instead a lab keeps a file in memory
open, with a list of its namespaces' descriptors; others find it by its name under /proc, and it ends with the process.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from testbed.errors import LabError
from testbed.net.kernel.namespace import Namespace

_NAME = "testbed-lab"
_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class RunningLab:
    """A lab that stands in some process."""

    pid: int
    started: str
    """UTC, ISO 8601, to the microsecond."""
    namespaces: Mapping[str, int]
    """Descriptors of that process by the namespaces' names: open /proc/PID/fd/N to enter one."""


@contextmanager
def publish(namespaces: Mapping[str, Namespace]) -> Iterator[None]:
    """While this is open, `find` lists the lab that has these namespaces."""
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


def find() -> list[RunningLab]:
    """Every lab of processes that the caller may look into, the oldest first. Other users' labs take root to see."""
    found = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is somebody else's
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(entry.readlink()).startswith(f"/memfd:{_NAME} ") and (
                        lab := _read(entry, int(process.name))
                    ):
                        found.append(lab)
    return sorted(found, key=lambda lab: lab.started)


def _read(entry: Path, pid: int) -> RunningLab | None:
    with entry.open("rb") as file:
        content = file.read(_LARGEST_BYTES)
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):  # anyone may give a file that name
        told = json.loads(content)
        namespaces = {str(name): int(descriptor) for name, descriptor in told["namespaces"].items()}
        if told["pid"] == pid:  # else a child that inherited it
            return RunningLab(pid=pid, started=str(told["started"]), namespaces=namespaces)
    return None
