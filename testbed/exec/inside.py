"""The program that holds the lab of an `ExecOrder`: `python -m testbed.exec.inside FILE`, in a guest or on this
machine.

On this machine (`--alone`) it runs in a process namespace: when it ends, even if killed, the kernel ends all processes
that programs have started. It also ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from testbed import paths, results
from testbed.errors import CapabilityError, LabError, UserError, status_of
from testbed.exec.nodes import Programs
from testbed.exec.order import COUNTERS, RESULT, ExecOrder, ExecResult
from testbed.exec.talks import Talks
from testbed.net.kernel.namespace import NEW_MOUNTS, NEW_PROCESSES, unshare
from testbed.net.lab import Lab
from testbed.net.meters import Counters
from testbed.net.sampler import Sampler
from testbed.player.play_in_guest import ONE_PAGE
from testbed.process import die_with_parent, set_timer_slack, shell_status
from testbed.records import Certificate, LinkCounters
from testbed.runtime.pacing import wait_for_the_grid

_WRITTEN: Final = Path("/run/testbed-written")
"""In a guest: files written outside the shared folders."""
_PASSING: Final = ("tmp", "run", "var/tmp", "dev", "root/.cache")
_MOST_FILES: Final = 20
MESSAGE_BYTES: Final = 256 * 1024
"""Size of the messages that links are certified with."""
_MS_BIND: Final = 0x1000
_MS_REC_PRIVATE: Final = 0x4000 | 0x40000
_HOSTS: Final = Path("/etc/hosts")


def execute(order: ExecOrder) -> ExecResult:
    """Build the lab, certify it on the real clock, run the programs, take it down."""
    folder = Path(order.folder)
    certificates: list[Certificate] = []
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(order.lab))
        if order.certify:
            certificates.append(_certify(lab))
        _name_nodes({node.address: node.name for node in lab.nodes}, folder)
        talks = stack.enter_context(Talks(lab))
        sampler = Sampler(lab, folder / COUNTERS)

        def check() -> None:
            sampler.check()
            talks.note()  # the kernel keeps some hundred announcements

        programs = Programs(order, lab, folder, check)
        programs.load()
        if order.clock == "virtual":
            wait_for_the_grid()
        before = lab.counters()  # the certificates' traffic
        started_ns = lab.play()
        with sampler:
            status, reason = programs.run(started_ns)
            lasted_ns = time.monotonic_ns() - started_ns
            nodes = programs.end()
        awaited = [nodes[index] for index in order.ends_with]
        if all(node.status is not None for node in awaited):  # an agent of torchrun stays after its end
            lasted_ns = max(node.ended_ns for node in awaited)
        total, counters = talks.total(), _since(before, lab.counters())
        lab.hold()
        if order.certify:
            certificates.append(_certify(lab))
        record = lab.record
    return ExecResult(
        order=order,
        status=status,
        reason=reason,
        lasted_ns=lasted_ns,
        started_at_ns=started_ns,
        nodes=tuple(nodes),
        links={name: dict(ways) for name, ways in counters.items()},
        talks=total,
        lost_files=tuple(_lost_files()),
        lab=record if order.clock == "real" else record.model_copy(update={"build_seconds": 0.0}),
        certificates=tuple(certificates),
    )


def _name_nodes(names: Mapping[str, str], folder: Path) -> None:
    """Make nodes resolvable by name, and addresses to names: in a guest, or in this process's mounts only."""
    known = _HOSTS.read_text(encoding="utf8", errors="replace") if _HOSTS.exists() else ""
    own = folder.resolve() / "hosts"
    with os.fdopen(paths.create(own), "w", encoding="utf8") as file:
        file.write(known + "".join(f"{address} {name}\n" for address, name in names.items()))
    libc = ctypes.CDLL(None, use_errno=True)
    if _HOSTS.exists() and libc.mount(str(own).encode(), str(_HOSTS).encode(), None, _MS_BIND, None):
        raise LabError(f"cannot write the nodes' names to {_HOSTS}: {os.strerror(ctypes.get_errno())}")


def _since(before: Counters, now: Counters) -> Counters:
    """Return the difference of counters that only grow, with the present backlog."""

    def less(a: LinkCounters, b: LinkCounters) -> LinkCounters:
        losses = None if a.dropped_loss is None or b.dropped_loss is None else b.dropped_loss - a.dropped_loss
        grown = {name: getattr(b, name) - getattr(a, name) for name in ("packets", "bytes", "dropped_buffer")}
        return b.model_copy(update=grown | {"dropped_loss": losses})

    return {name: {way: less(before[name][way], count) for way, count in ways.items()} for name, ways in now.items()}


def _certify(lab: Lab) -> Certificate:
    """Measure all links; if all are equal, judge them by their effect on a step of one message."""
    from testbed.sweep.bounded_steps import reference_step  # it imports numpy, which only this function needs

    profile, *others = lab.spec.distinct
    step = None if others else reference_step(profile, lab.spec.engine, MESSAGE_BYTES)
    return lab.certify("quick", [MESSAGE_BYTES], step=step)


def _lost_files() -> list[str]:
    """Return the files that programs wrote in a guest and that are lost at its end, except temporary ones."""
    if not _WRITTEN.is_dir():
        return []
    lost = []
    for path in sorted(_WRITTEN.rglob("*")):
        name = path.relative_to(_WRITTEN)
        if path.is_file() and not str(name).startswith(_PASSING) and "__pycache__" not in name.parts:
            lost.append(f"/{name}")
    return lost[:_MOST_FILES]


def main() -> None:
    """Run the order in the file, and write its result beside it."""
    status = status_of(lambda: _obey(Path(sys.argv[1]), alone=sys.argv[2:] == ["--alone"]))
    sys.stdout.flush()
    os._exit(status)


def _obey(file: Path, *, alone: bool) -> None:
    if alone:
        _enter_a_world_of_our_own()
    order = ExecOrder.model_validate_json(file.read_text(encoding="utf8"))
    set_timer_slack()
    if order.clock == "virtual":
        ONE_PAGE.write_text("1", encoding="ascii")
    # A program may put a link in the folder's place: root writes to the one that was there before.
    held = os.open(order.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    result = execute(order)
    folder = Path(f"/proc/self/fd/{held}")
    results.write_json(folder / RESULT, result)
    for path in folder.iterdir():
        about = path.lstat()
        if about.st_nlink == 1 or stat.S_ISDIR(about.st_mode):
            paths.give_to_user(path)


def _enter_a_world_of_our_own() -> None:
    """Continue as a process whose end also ends all processes that it and its children have started.

    Three processes: this one, which waits; the first of a new process namespace, which adopts orphans; and its child,
    in which this returns. UserError if the machine does not allow it.
    """
    parent = os.getppid()
    die_with_parent(parent)
    try:
        unshare(NEW_PROCESSES | NEW_MOUNTS)
    except OSError as error:
        raise UserError(
            f"cannot make a process namespace for the programs: {error.strerror}; run it as root (sudo), or on the "
            "virtual clock"
        ) from None
    _stay_until_it_ends(os.fork())
    die_with_parent(0)  # the parent is in another process namespace and has no number here
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) or libc.mount(b"proc", b"/proc", b"proc", 0, None):
        raise CapabilityError(f"cannot mount /proc for the lab's processes: {os.strerror(ctypes.get_errno())}")
    _stay_until_it_ends(os.fork())


def _stay_until_it_ends(child: int) -> None:
    """Return in the child; in the parent, wait for it, reap other processes meanwhile, and exit with its status."""
    if child == 0:
        return
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while True:
        pid, ended = os.wait()
        if pid == child:
            os._exit(shell_status(os.waitstatus_to_exitcode(ended)))


if __name__ == "__main__":
    main()
