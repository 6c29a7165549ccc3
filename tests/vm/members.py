"""Which processes a guest consists of, for tests that end it."""

from __future__ import annotations

from pathlib import Path

from testbed import forks
from tests.forked import command_line


def guest_of(runner: int) -> set[int]:
    """Return the guest of a runner: the process group of its child."""
    groups = {int(pid) for pid in Path(f"/proc/{runner}/task/{runner}/children").read_text().split()}
    groups -= {forks.server()}  # it forks programs, no guest
    groups -= {pid for pid in groups if "testbed.codecs.check" in command_line(pid)}  # the kit's, as long as tests run
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[2]) in groups and fields[0] != "Z":
                found.add(int(folder.name))
    return found
