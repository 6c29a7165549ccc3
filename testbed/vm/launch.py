"""Become the guest kernel: guest.py runs `testbed.vm.launch LINUX MEMORY_FOLDER USER FD... -- ARGUMENT...`.

The kernel runs as USER: a user and a group id, or as this process's own user if empty. It inherits the FDs as
descriptors 3, 4, 5 ... in order, and one more that reserves its processor.
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

from testbed.process import become_user, die_with_parent
from testbed.processors import ProcessorTicks, read_processors

FIRST_FD = 3
_ASIDE_FD = 64
_LOOK_S = 0.1


def main() -> None:
    """Start the kernel, which takes over this process, so this never returns."""
    split = sys.argv.index("--")
    linux, memory_folder, user, *given = sys.argv[1:split]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would be as large as the guest's memory
    # The guest has one processor, made of processes that take turns: they run 2 to 3 times as fast on one of our
    # processors as on two.
    before = read_processors()
    time.sleep(_LOOK_S)
    processor, hold = choose_processor(idlest_first(before, read_processors(), os.sched_getaffinity(0)))
    os.sched_setaffinity(0, {processor})
    if not any(argument.startswith("time-travel=") for argument in sys.argv[split:]):
        _come_before_programs()  # a virtual clock is exact without it
    aside = [fcntl.fcntl(int(fd), fcntl.F_DUPFD_CLOEXEC, _ASIDE_FD) for fd in given]
    if hold is not None:
        fcntl.fcntl(hold.detach(), fcntl.F_DUPFD, _ASIDE_FD)  # the kernel keeps the reservation
    os.closerange(FIRST_FD, _ASIDE_FD)
    for number, fd in enumerate(aside, FIRST_FD):
        os.dup2(fd, number)
    if user:  # code that escapes from the guest has the rights of this process
        parent = os.getppid()
        become_user(*map(int, user.split(",")))
        die_with_parent(parent)  # a change of user resets it
    # The guest's memory is a file in this folder, unlinked at once.
    os.execve(linux, [linux, *sys.argv[split + 1 :]], {"TMPDIR": memory_folder})


def _come_before_programs() -> None:
    """Let the guest's kernel take the processor from the guest's programs at once, when a timer wakes it.

    At equal priority it waited for the end of a time slice: with two busy programs, packets left up to 5 ms late. The
    processes that run the programs keep the normal priority. Requires root; without it, only an idle guest keeps time.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def idlest_first(
    before: Mapping[str, ProcessorTicks], after: Mapping[str, ProcessorTicks], allowed: Collection[int]
) -> list[int]:
    """Return the processors of `allowed`, the most idle between two readings first; ties are in random order."""
    names = {cpu: f"cpu{cpu}" for cpu in allowed if f"cpu{cpu}" in after}
    idle = {cpu: after[name].idle - (before[name].idle if name in before else 0) for cpu, name in names.items()}
    return sorted(random.sample(sorted(idle), len(idle)), key=lambda cpu: -idle[cpu])


def choose_processor(candidates: Sequence[int]) -> tuple[int, socket.socket | None]:
    """Return the first processor that no other guest has reserved, with the reservation; otherwise the first one, with
    None.

    Guests that start together would all choose the same idle processor. An abstract socket's name can be bound only
    once, and is released when its owner ends for any reason.
    """
    for cpu in candidates:
        hold = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            hold.bind(f"\0testbed guest on processor {cpu}")
        except OSError:
            hold.close()
        else:
            hold.shutdown(socket.SHUT_RD)  # no process may fill its queue
            return cpu, hold
    return candidates[0], None


if __name__ == "__main__":
    main()
