"""Become the guest kernel: guest.py runs `python -m testbed.vm.launch LINUX MEMORY_FOLDER FD... -- ARGUMENT...`.

The kernel gets the FDs under the numbers 3, 4, 5 ... in their order, and one that holds its processor.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import resource
import socket
import sys
import time
from collections.abc import Collection, Mapping, Sequence

from testbed.processors import ProcessorTicks, read_processors

FIRST_FD = 3
_ASIDE_FD = 64
_LOOK_S = 0.1


def main() -> None:
    """Start the kernel, which takes over this process, so this never returns."""
    split = sys.argv.index("--")
    linux, memory_folder, *given = sys.argv[1:split]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would be as large as the guest's memory
    # The guest has one processor, made of processes that take turns: on one of our processors they are 2 to 3 times as
    # fast as on two.
    before = read_processors()
    time.sleep(_LOOK_S)
    processor, hold = choose_processor(idlest_first(before, read_processors(), os.sched_getaffinity(0)))
    os.sched_setaffinity(0, {processor})
    if not any(argument.startswith("time-travel=") for argument in sys.argv[split:]):
        _come_before_programs()  # a virtual clock is exact without
    aside = [fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, _ASIDE_FD) for fd in given]
    if hold is not None:
        fcntl.fcntl(hold.detach(), fcntl.F_DUPFD, _ASIDE_FD)  # the kernel holds it, and with it the processor
    os.closerange(FIRST_FD, _ASIDE_FD)
    for number, fd in enumerate(aside, FIRST_FD):
        os.dup2(fd, number)
    # The file that is the guest's memory lies in this folder, and is unlinked at once.
    os.execve(linux, [linux, *sys.argv[split + 1 :]], {"TMPDIR": memory_folder})


def _come_before_programs() -> None:
    """Let the guest's kernel take the processor from the guest's programs at once, when a timer wakes it.

    As their equal it waited for the end of a turn: beside two busy programs packets left up to 5 ms late. The processes
    in which the programs run keep the ordinary priority. Not permitted without root; then only a guest that is not busy
    keeps time.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def idlest_first(
    before: Mapping[str, ProcessorTicks], after: Mapping[str, ProcessorTicks], allowed: Collection[int]
) -> list[int]:
    """Return the processors of `allowed`, those first that idled most between two readings; ties stand at random."""
    names = {cpu: f"cpu{cpu}" for cpu in allowed if f"cpu{cpu}" in after}
    idle = {cpu: after[name].idle - (before[name].idle if name in before else 0) for cpu, name in names.items()}
    return sorted(random.sample(sorted(idle), len(idle)), key=lambda cpu: -idle[cpu])


def choose_processor(candidates: Sequence[int]) -> tuple[int, socket.socket | None]:
    """Return the first processor that no other guest holds, and what holds it for this one; else the first, unheld.

    Guests that start together would all find the same one idle. A name of an abstract socket can be taken once, and is
    free again when its owner ends, however that ends.
    """
    for cpu in candidates:
        hold = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            hold.bind(f"\0testbed guest on processor {cpu}")
        except OSError:
            hold.close()
        else:
            return cpu, hold
    return candidates[0], None


if __name__ == "__main__":
    main()
