"""Run one command inside a guest kernel: boot it, forward its output, return its exit status, leave nothing behind.

A guest uses no named file: its memory is unlinked, and its kernel loads the plan as an initial RAM disk. Output and
status go through pipes, which are serial lines inside. It dies with this process, for whatever reason that ends.
"""

from __future__ import annotations

import compileall
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from testbed import paths
from testbed.closing import Closing
from testbed.errors import CapabilityError, GuestKernelError, SpecError
from testbed.process import ROOT, process_group, start_program
from testbed.vm.guest_plan import archive
from testbed.vm.kernel import GuestKernel
from testbed.vm.launch import FIRST_FD

TIME_LIMIT_STATUS = 124
"""Exit status of a guest stopped at its time limit, as of timeout(1)."""

GUEST_VARIABLE = "TESTBED_GUEST"
"""Environment variable that is 1 inside a guest."""

_LEFT_OUT = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "SSH_AUTH_SOCK")  # all lie in /run, which is empty inside
# A page fault costs 10 us inside. So the C library keeps freed memory instead of returning it, which cuts a training
# step to a quarter of the time.
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_MAX_": "0"}
_VIRTUAL_START_NS = 1_767_225_600_000_000_000
"""The date at which a virtual clock starts, in nanoseconds of Unix time: 2026-01-01T00:00:00Z."""

_MEMORY = re.compile(r"(\d+)([MG])", re.ASCII)
_CONSOLE_BYTES = 1 << 16
_SILENCE_S = 20.0  # silence of a guest after which its processes are inspected
_NO_PTRACE = b"check_ptrace :"  # start of the kernel's last output if ptrace is refused; it tries seccomp first
_TRY_LIMIT_S = 60.0
_REAP_S = 2.0
_PIECE_BYTES = 4096  # PIPE_BUF: a pipe that select calls writable takes this much without blocking


@cache
def _compile_modules() -> None:
    """Compile the package, as the invoking user.

    A guest forgets compiled modules, so every boot of a fresh checkout would compile them again until the host does it.
    That changes times: a missing file costs time, and memory use decides which packets are lost.
    """
    if user := paths.as_invoking_user():
        start_program("compileall", "-qq", str(ROOT / "testbed"), attempt="compile testbed's modules", **user).wait()
    else:
        compileall.compile_dir(ROOT / "testbed", quiet=2)


def start_guest(
    kernel: GuestKernel,
    command: Sequence[str],
    *,
    memory: str = "4G",
    time_limit_s: float | None = None,
    share: Sequence[Path] = (),
    share_current: bool = True,
    virtual_clock: bool = False,
    stdout: int = 1,
    stderr: int = 2,
) -> Guest:
    """Boot a guest that runs `command`, and return without waiting for it. Several may run at once.

    Inside, the command is root, and accesses this machine's files with the rights of the invoking user. Its writes are
    discarded, except in the folders of `share` and, with `share_current`, in the current directory: those reach the
    host. Without `share_current` the current directory is read-only. Environment and current directory are the
    caller's; standard input is empty; standard output and error are forwarded byte by byte to the descriptors `stdout`
    and `stderr`, which must stay open until the guest has ended. `memory`: like "4G" or "512M"; the host allocates
    touched pages only. `time_limit_s` is measured on this machine's clock from the call on, even if no caller waits for
    the guest. The guest's system calls are intercepted by seccomp filters or, where a sandbox forbids these, by ptrace,
    which is slower.
    `virtual_clock`: the guest's time stops while any of its processes computes, and jumps when all sleep.

    Call it from the main thread: the guest dies with the thread that started it. SpecError: an invalid value,
    or an altered kernel. GuestKernelError: the guest cannot be started.
    """
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    if os.environ.get(GUEST_VARIABLE):
        raise GuestKernelError("this is already a guest, which cannot run another; run the command directly")
    if not command:
        raise SpecError("no command to run in the guest; write it after --")
    kernel.check()
    folder = memory_folder(memory_bytes(memory))
    if virtual_clock:
        _compile_modules()
    current, shared = Path.cwd(), shared_folders(share)
    plan = {
        "command": list(command),
        "directory": str(current),
        "environment": _environment(virtual_clock),
        "one_output": os.path.sameopenfile(stdout, stderr),
        "shares": [str(path) for path in shared_folders([current, *shared])],
        # Mounted in any case: one mount less would change the guest's memory, which affects lossy links.
        "read_only": [] if share_current or current in shared else [str(current)],
        "hostname": socket.gethostname(),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    process, ends = _boot(kernel, folder, kernel_arguments(memory, virtual_clock=virtual_clock), plan)
    return Guest(process, ends, deadline=deadline, time_limit_s=time_limit_s, stdout=stdout, stderr=stderr)


def try_kernel(kernel: GuestKernel) -> None:
    """Boot a kernel with a virtual clock and run `true`. GuestKernelError if it does not work here."""
    with start_guest(kernel, ["true"], memory="128M", time_limit_s=_TRY_LIMIT_S, virtual_clock=True) as guest:
        status = guest.wait()
    if status != 0:
        raise GuestKernelError(f"the guest kernel in {kernel.folder} was tried with `true`, which ended with {status}")


def memory_bytes(text: str) -> int:
    """Parse `4G`, `512M` (binary, as in the kernel) into bytes. SpecError for anything else, or below 128M."""
    match = _MEMORY.fullmatch(text)
    if match is None or (size := int(match[1]) << {"M": 20, "G": 30}[match[2]]) < 128 << 20:
        raise SpecError(f"guest memory {text!r} is not a size of 128M or more; write for example '4G' or '512M'")
    return size


def memory_folder(size: int) -> str:
    """Choose a folder for the file that is the guest's memory: in RAM if possible, with room for `size` bytes.

    It must permit execution. CapabilityError if there is none.
    """
    tried = []
    for folder in dict.fromkeys(("/dev/shm", tempfile.gettempdir(), "/var/tmp")):
        try:
            about = os.statvfs(folder)
        except FileNotFoundError:
            continue
        free = about.f_bavail * about.f_frsize
        if not about.f_flag & os.ST_NOEXEC and free >= size and os.access(folder, os.W_OK):
            return folder
        tried.append(f"{folder} has {free >> 20} MiB free{', noexec' if about.f_flag & os.ST_NOEXEC else ''}")
    raise CapabilityError(
        f"no place for {size >> 20} MiB of guest memory: {'; '.join(tried)}; request less with --memory, or set TMPDIR "
        "to a folder with room, on a file system that is not mounted noexec"
    )


def shared_folders(folders: Sequence[Path]) -> list[Path]:
    """Return absolute paths without duplicates, parents first. SpecError for a path that is no folder or cannot be
    shared.
    """
    resolved = sorted({folder.resolve() for folder in folders}, key=lambda path: (len(path.parts), path))
    for folder in resolved:
        if not folder.is_dir():
            raise SpecError(f"cannot share {folder} with the guest: it is not a folder")
        if folder == Path("/") or folder.parts[1] in ("proc", "sys") or folder == Path("/dev"):
            raise SpecError(f"cannot share {folder} with the guest, which has its own; run from a folder of yours")
    return resolved


def kernel_arguments(memory: str, *, virtual_clock: bool = False) -> list[str]:
    """Return the guest kernel's command line; descriptors are numbered as `_boot` passes them to launch.py."""
    console, stdout, stderr, report, plan = range(FIRST_FD, FIRST_FD + 5)
    return [
        f"mem={memory}",
        "seccomp=auto",
        # The date is part of the kernel's random seed, which must be the same in every boot.
        *(["time-travel=inf-cpu", f"time-travel-start={_VIRTUAL_START_NS}"] if virtual_clock else []),
        f"initrd=/proc/self/fd/{plan}",
        "retain_initrd",
        # No folder for pid file and control socket: the kernel reports that on its console and continues without them.
        "uml_dir=/proc/self/",
        "umid=none",
        "root=/dev/root",
        "rootfstype=hostfs",
        "rootflags=/",
        "ro",
        "loglevel=4",
        "panic=-1",
        "noreboot",
        "con=null",
        f"con0=null,fd:{console}",
        "con1=null",
        "ssl=null",
        f"ssl0=null,fd:{stdout}",
        f"ssl1=null,fd:{stderr}",
        f"ssl2=null,fd:{report}",
        "PYTHONHASHSEED=0",
        f"PYTHONPATH={_quoted(ROOT)}",  # the kernel passes unknown arguments to init's environment
        f"init={_quoted(Path(sys.executable).resolve())}",
        "--",
        "-SBP",
        "-m",
        "testbed.vm.init",
    ]


def _environment(virtual_clock: bool) -> dict[str, str]:
    carried = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    # The same order of sets in every boot, and no compiled modules in shared folders that the next boot would find.
    repeatable = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"} if virtual_clock else {}
    return _KEEP_MEMORY | carried | repeatable | {GUEST_VARIABLE: "1"}


def _quoted(path: Path) -> str:
    if re.search(r'["\n]', str(path)):
        raise GuestKernelError(
            f"the path {str(path)!r} cannot be part of a kernel's command line; install testbed elsewhere"
        )
    return f'"{path}"'


class _Ends(NamedTuple):
    """Our ends of a guest's pipes."""

    console: int
    stdout: int
    stderr: int
    report: int


class _Stopped(Exception):
    """`Guest.kill` was called."""


class Guest(Closing):
    """A running guest, created by `start_guest`. A context manager that ends it.

    Its thread forwards its output and monitors it: it is ended at its time limit, and if one of its processes can no
    longer make progress.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        ends: _Ends,
        *,
        deadline: float | None,
        time_limit_s: float | None,
        stdout: int,
        stderr: int,
    ) -> None:
        self._process, self._ends = process, ends
        self._deadline, self._time_limit_s = deadline, time_limit_s
        self._outputs = {ends.stdout: stdout, ends.stderr: stderr}
        self._said: dict[int, bytearray] = {ends.report: bytearray(), ends.console: bytearray()}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._status: int | None = None
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"guest {process.pid}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        """The process of the guest's kernel, and the process group of all processes of the guest."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status, or None while the guest runs. Errors as in `wait`."""
        return self.wait() if self._over.is_set() else None

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the guest's end and return the exit status of its command.

        The status is 128 + n for signal n, 126 or 127 if the command cannot be started, 124 at the time limit, 137
        after `kill`. TimeoutError if the guest still runs after `timeout_s`. GuestKernelError: the guest died, or could
        not be set up. CapabilityError: this machine forbids an operation that the guest needs.
        """
        if not self._over.wait(timeout_s):
            raise TimeoutError(f"the guest (process {self.pid}) still runs after {timeout_s:g} s")
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._status is not None
        return self._status

    def kill(self) -> None:
        """End the guest now, and wait until all its processes are gone. Safe to call twice, and after its end."""
        if not self._over.is_set():
            os.eventfd_write(self._stop, 1)
        self._thread.join()

    def close(self) -> None:
        """End it if it still runs, and close the monitor's descriptors."""
        self.kill()
        if self._stop >= 0:
            os.close(self._stop)
            self._stop = -1

    def _run(self) -> None:
        """Serve the guest until its end, and store its outcome for `wait`."""
        try:
            self._attend()
            self._status = self._reported_status()
        except TimeoutError:
            self._status = TIME_LIMIT_STATUS
            note = f"testbed vm: the guest was stopped at its time limit of {self._time_limit_s:g} s\n"
            with suppress(OSError):
                os.write(self._outputs[self._ends.stderr], note.encode())
        except BrokenPipeError:  # our output has no reader any more: end as a program that writes to it would
            self._status = 128 + signal.SIGPIPE
        except _Stopped:
            self._status = 128 + signal.SIGKILL
        except Exception as error:
            self._error = error
        finally:
            with suppress(ProcessLookupError):  # all of it has ended by itself
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            _wait_for_group(self._process.pid)
            for fd in self._ends:
                os.close(fd)
            self._over.set()

    def _attend(self) -> None:
        """Forward output until the guest has ended.

        TimeoutError at the time limit, _Stopped after `kill`, GuestKernelError if one of its processes can no longer
        make progress.
        """
        full: set[int] = set()
        ended = os.pidfd_open(self._process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                for fd in (ended, self._stop, *self._ends):
                    selector.register(fd, selectors.EVENT_READ)
                while True:
                    left = self._left()
                    ready = [
                        key.fd for key, _ in selector.select(_SILENCE_S if left is None else min(left, _SILENCE_S))
                    ]
                    if self._stop in ready:
                        raise _Stopped
                    if not ready:
                        full = self._at_the_map_limit(full)
                    for fd in self._ends:
                        if fd in ready and not self._pass_on(fd):
                            selector.unregister(fd)
                    if ended in ready:
                        break
            for fd in self._ends:
                while self._pass_on(fd):
                    pass
        finally:
            os.close(ended)

    def _at_the_map_limit(self, before: set[int]) -> set[int]:
        """Return the guest's processes that have reached this machine's limit of memory mappings.

        GuestKernelError if one of them was also in `before`.

        Each page of a guest's process that is not adjacent to its neighbours is a separate mapping here. If the host
        refuses another mapping, the guest's kernel retries the same page fault forever, silently.
        """
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        full = {pid for pid in process_group(self._process.pid) if _mappings(pid) >= limit}
        if full & before:
            raise GuestKernelError(
                "a process in the guest has reached this machine's limit of memory mappings per process "
                f"(vm.max_map_count = {limit}) and cannot continue: each page of its memory may be one; use less "
                f"memory per process, or raise the limit: sudo sysctl vm.max_map_count={16 * limit}"
            )
        return full

    def _pass_on(self, fd: int) -> bool:
        """Forward one read from a pipe. False if there is no more data, now or ever."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if fd in self._said:
            self._said[fd] += data
            del self._said[fd][:-_CONSOLE_BYTES]
        else:
            self._write(self._outputs[fd], data)
        return bool(data)

    def _write(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            with selectors.SelectSelector() as selector:  # epoll refuses regular files
                selector.register(fd, selectors.EVENT_WRITE)
                selector.register(self._stop, selectors.EVENT_READ)
                if any(key.fd == self._stop for key, _ in selector.select(self._left())):
                    raise _Stopped
            rest = rest[os.write(fd, rest[:_PIECE_BYTES]) :]

    def _left(self) -> float | None:
        if self._deadline is None:
            return None
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        return min(1e6, left)  # infinity is no timeout

    def _reported_status(self) -> int:
        """Return the status that init reported before the guest ended. GuestKernelError for a failure or a missing
        report.

        CapabilityError if the kernel reports that it is not permitted to run.
        """
        report = bytes(self._said[self._ends.report])
        if report.endswith(b"\n"):
            reported: dict[str, Any] = json.loads(report)
            if "status" in reported:
                return int(reported["status"])
            raise GuestKernelError(f"the guest could not be set up: {reported['failure']}")
        if _NO_PTRACE in self._said[self._ends.console]:
            raise CapabilityError(
                "cannot boot the guest kernel: this machine permits neither seccomp filters nor ptrace, and the guest "
                "needs one of them to intercept system calls; permit them (Docker, Podman: start the container with "
                "--security-opt seccomp=unconfined), or use another machine"
            )
        last = last_lines(self._said[self._ends.console].decode(errors="replace"))
        raise GuestKernelError(
            f"the guest kernel died (exit status {self._process.wait()}) before the command ended; it may need "
            f"more --memory. Its last lines:\n{last or '(none)'}"
        )


def last_lines(console: str) -> str:
    """Return the last 40 lines of a dead kernel's console, or more if its panic is further back."""
    lines = [line.rstrip() for line in console.split("\n") if line.strip()]
    panics = [number for number, line in enumerate(lines) if "Kernel panic" in line]
    start = min([*panics[:1], max(len(lines) - 40, 0)])
    return "\n".join(lines[start : start + 40])


def _boot(
    kernel: GuestKernel, folder: str, arguments: Sequence[str], plan: Mapping[str, Any]
) -> tuple[subprocess.Popen[bytes], _Ends]:
    """Start the guest's kernel; return its process and our ends of its pipes."""
    ours: dict[str, int] = {}
    theirs: dict[str, int] = {}
    try:
        for name in ("console", "stdout", "stderr", "report"):
            ours[name], theirs[name] = os.pipe()
            os.set_blocking(ours[name], False)
        theirs["plan"] = os.memfd_create("plan")
        with open(theirs["plan"], "wb", closefd=False) as file:
            file.write(archive(plan))
        process = start_program(  # in its own session: the whole guest is one process group
            "testbed.vm.launch",
            *(str(kernel.linux), folder, ",".join(map(str, paths.invoking_user() or ())), *map(str, theirs.values())),
            *("--", *arguments),
            attempt="boot the guest kernel",
            env={"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=theirs["console"],
            stderr=theirs["console"],
            pass_fds=list(theirs.values()),
        )
    except BaseException:
        for fd in ours.values():
            os.close(fd)
        raise
    finally:
        for fd in theirs.values():
            os.close(fd)
    return process, _Ends(**ours)


def _wait_for_group(leader: int) -> None:
    """Wait, within a limit, until all processes of a killed group have ended.

    Zombies do not count: reaping them is up to the machine's first process.
    """
    deadline = time.monotonic() + _REAP_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(leader, 0)
            if not any(_runs(pid) for pid in process_group(leader)):
                return
            time.sleep(0.005)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _mappings(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
    except OSError:  # it has ended, or we may not inspect its memory
        return 0
