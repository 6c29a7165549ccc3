"""Run one command inside a guest kernel: boot it, pass its output on, come back with its exit status, leave nothing.

Nothing of a guest lies in a file: its memory is a file without a name, and plan, output and status go through pipes
that it sees as serial lines. It dies with this process, however that ends.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.errors import GuestKernelError, SpecError
from testbed.process import ROOT, start_program
from testbed.vm.init import READY
from testbed.vm.kernel import LOADER_FD, GuestKernel

TIME_LIMIT_STATUS = 124
"""What `run_in_guest` returns when the time limit ended the guest, as timeout(1) does."""

GUEST_VARIABLE = "TESTBED_GUEST"
"""Environment variable that is 1 inside a guest."""

_LEFT_OUT = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS", "SSH_AUTH_SOCK")  # all lie in /run, which is empty inside
# A page fault costs 10 us inside. C library: keep freed memory instead of giving it back to be faulted in again; with
# it a training step takes a quarter of the time.
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_MAX_": "0"}
_MEMORY = re.compile(r"(\d+)([MG])", re.ASCII)
_CONSOLE_BYTES = 8192
_SILENCE_S = 20.0  # how long a guest says nothing before its processes are looked at
_PIECE_BYTES = 4096  # PIPE_BUF: a pipe that select calls writable takes this much without blocking


def run_in_guest(
    kernel: GuestKernel,
    command: Sequence[str],
    *,
    memory: str = "4G",
    time_limit_s: float | None = None,
    share: Sequence[Path] = (),
    seccomp: bool = True,
) -> int:
    """Run `command` inside and return its exit status.

    The status is 128 + n for signal n, 126 or 127 where the command cannot be started, 124 when the time limit ended
    it. Inside, the command is root and sees this machine's files. What it writes is forgotten, except in the current
    directory and in the folders of `share`: there it is written for real. Environment and current directory are carried
    over; standard input is empty; standard output and error are passed on byte by byte. `memory`: like "4G" or "512M";
    the host gives what is touched. `seccomp`: how the guest's system calls are caught; False (ptrace) works where a
    sandbox forbids seccomp. Call it from the main thread. SpecError: a value that cannot be accepted. GuestKernelError:
    the guest died.
    """
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    if os.environ.get(GUEST_VARIABLE):
        raise GuestKernelError("this is a guest already, and a guest cannot run another; run the command itself")
    if not command:
        raise SpecError("no command to run in the guest; write it after --")
    folder = memory_folder(memory_bytes(memory))
    plan = {
        "command": list(command),
        "directory": str(Path.cwd()),
        "environment": _environment(),
        "one_output": os.path.sameopenfile(1, 2),
        "shares": [str(path) for path in shared_folders([Path.cwd(), *share])],
        "modules": str(kernel.modules),
        "python": str(_python()),
        "hostname": socket.gethostname(),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    with _booted(kernel, folder, kernel_arguments(memory, seccomp)) as guest:
        try:
            guest.attend(json.dumps(plan).encode() + b"\n", deadline)
        except TimeoutError:
            sys.stderr.write(f"testbed vm: the guest was ended at its time limit of {time_limit_s:g} s\n")
            return TIME_LIMIT_STATUS
        except BrokenPipeError:  # whoever read our output has gone: end as a program that writes to it would
            return 128 + signal.SIGPIPE
        return guest.status()


def memory_bytes(text: str) -> int:
    """Read `4G`, `512M` (binary, as the kernel does) as bytes. SpecError for anything else, or under 128M."""
    match = _MEMORY.fullmatch(text)
    if match is None or (size := int(match[1]) << {"M": 20, "G": 30}[match[2]]) < 128 << 20:
        raise SpecError(f"guest memory {text!r} is not a size of 128M or more; write for example '4G' or '512M'")
    return size


def memory_folder(size: int) -> str:
    """Choose a folder for the file that is the guest's memory: in RAM if possible, with room for `size` bytes.

    Programs must be allowed to run from it. GuestKernelError where there is none.
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
    raise GuestKernelError(
        f"no place for {size >> 20} MiB of guest memory: {'; '.join(tried)}; ask for less with --memory, or set TMPDIR "
        "to a folder with room, on a file system that is not mounted noexec"
    )


def shared_folders(folders: Sequence[Path]) -> list[Path]:
    """Return absolute paths, each once, outer before inner. SpecError for what is not a folder or cannot be shared."""
    resolved = sorted({folder.resolve() for folder in folders}, key=lambda path: (len(path.parts), path))
    for folder in resolved:
        if not folder.is_dir():
            raise SpecError(f"cannot share {folder} with the guest: it is not a folder")
        if folder == Path("/") or folder.parts[1] in ("proc", "sys") or folder == Path("/dev"):
            raise SpecError(f"cannot share {folder} with the guest, which has its own; run from a folder of yours")
    return resolved


def kernel_arguments(memory: str, seccomp: bool) -> list[str]:
    """Return the guest kernel's command line; the descriptors are numbered as `_booted` hands them to launch.py."""
    console, stdout, stderr, control_in, control_out = range(LOADER_FD + 1, LOADER_FD + 6)
    return [
        f"mem={memory}",
        f"seccomp={'on' if seccomp else 'off'}",
        # No folder for pid file and control socket: it can make none here, says so on its console, and goes on without.
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
        f"ssl2=fd:{control_in},fd:{control_out}",
        f"PYTHONPATH={_quoted(ROOT)}",  # what the kernel does not know goes into init's environment
        f"init={_quoted(_python())}",
        "--",
        "-SB",
        "-m",
        "testbed.vm.init",
    ]


def _environment() -> dict[str, str]:
    carried = {key: value for key, value in os.environ.items() if key not in _LEFT_OUT}
    return _KEEP_MEMORY | carried | {GUEST_VARIABLE: "1"}


def _python() -> Path:
    return Path(sys.executable).resolve()


def _quoted(path: Path) -> str:
    if re.search(r'["\n]', str(path)):
        raise GuestKernelError(
            f"the path {str(path)!r} cannot stand on a kernel's command line; install testbed elsewhere"
        )
    return f'"{path}"'


@dataclass
class _Guest:
    """A guest that is running, and our ends of its pipes."""

    process: subprocess.Popen[bytes]
    plan: int
    report: int
    console: int
    stdout: int
    stderr: int

    def __post_init__(self) -> None:
        self._said: dict[int, bytearray] = {self.report: bytearray(), self.console: bytearray()}

    def attend(self, plan: bytes, deadline: float | None) -> None:
        """Hand over the plan and pass output on until the guest has ended.

        TimeoutError at the deadline. GuestKernelError when one of its processes can never go on.
        """
        unsent = memoryview(plan)
        full: set[int] = set()
        ended = os.pidfd_open(self.process.pid)
        try:
            with selectors.DefaultSelector() as selector:
                for fd in (ended, self.report, self.console, self.stdout, self.stderr):
                    selector.register(fd, selectors.EVENT_READ)
                while True:
                    left = _left(deadline)
                    ready = [
                        key.fd for key, _ in selector.select(_SILENCE_S if left is None else min(left, _SILENCE_S))
                    ]
                    if not ready:
                        full = self._at_the_map_limit(full)
                    if self.plan in ready:
                        try:
                            unsent = unsent[os.write(self.plan, unsent) :]
                        except BrokenPipeError:  # it died before it had read the plan; `status` says so
                            unsent = unsent[:0]
                        if not unsent:
                            selector.unregister(self.plan)
                    for fd in (self.stdout, self.stderr, self.report, self.console):
                        if fd in ready and not self._pass_on(fd, deadline):
                            selector.unregister(fd)
                    if unsent and self.plan not in selector.get_map() and self._said[self.report] == READY:
                        selector.register(self.plan, selectors.EVENT_WRITE)
                    if ended in ready:
                        break
            for fd in (self.stdout, self.stderr, self.report, self.console):
                while self._pass_on(fd, deadline):
                    pass
        finally:
            os.close(ended)

    def _at_the_map_limit(self, before: set[int]) -> set[int]:
        """Return the guest's processes that hold as many mappings as this machine allows a process.

        GuestKernelError for one that was so `before` too.

        Each page of a guest's process that lies apart from its neighbours is a mapping of its own here. Where the host
        refuses another, the guest's kernel tries the same page fault again, for ever and without a word.
        """
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
        full = {pid for pid in _group(self.process.pid) if _mappings(pid) >= limit}
        if full & before:
            raise GuestKernelError(
                "a process in the guest holds as many memory mappings as this machine allows one process "
                f"(vm.max_map_count = {limit}) and cannot go on: each page of its memory may be one; do less in one "
                f"process, or allow more: sudo sysctl vm.max_map_count={16 * limit}"
            )
        return full

    def _pass_on(self, fd: int, deadline: float | None) -> bool:
        """Pass one read from a pipe on. False when there is nothing more, for now or for good."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if fd in self._said:
            self._said[fd] += data
            del self._said[fd][:-_CONSOLE_BYTES]
        else:
            _write(1 if fd == self.stdout else 2, data, deadline)
        return bool(data)

    def status(self) -> int:
        """Return the status that init reported before the guest ended. GuestKernelError for a failure, or no report."""
        report = bytes(self._said[self.report]).removeprefix(READY)
        if report.endswith(b"\n"):
            reported: dict[str, Any] = json.loads(report)
            if "status" in reported:
                return int(reported["status"])
            raise GuestKernelError(f"the guest could not be set up: {reported['failure']}")
        lines = self._said[self.console].decode(errors="replace").split("\n")
        last = "\n".join(line.rstrip() for line in lines[-40:] if line.strip())
        raise GuestKernelError(
            f"the guest kernel died (exit status {self.process.wait()}) before the command had ended; it may need "
            f"more --memory. Its last lines:\n{last or '(none)'}"
        )


@contextmanager
def _booted(kernel: GuestKernel, folder: str, arguments: Sequence[str]) -> Iterator[_Guest]:
    ours, theirs = {}, {}
    loader = os.open(kernel.loader, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for name in ("console", "stdout", "stderr", "plan", "report"):
            reading, writing = os.pipe()
            ours[name], theirs[name] = (writing, reading) if name == "plan" else (reading, writing)
            os.set_blocking(ours[name], False)
        fds = [loader, *theirs.values()]
        process = start_program(  # in a session of its own: the whole guest is one process group
            "testbed.vm.launch",
            *(str(kernel.linux), folder, *map(str, fds), "--", *arguments),
            attempt="boot the guest kernel",
            env={"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=theirs["console"],
            stderr=theirs["console"],
            pass_fds=fds,
        )
        try:
            for fd in theirs.values():
                os.close(fd)
            theirs.clear()
            yield _Guest(process=process, **ours)
        finally:
            with suppress(ProcessLookupError):  # it ended by itself, whole
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        for fd in (loader, *ours.values(), *theirs.values()):
            os.close(fd)


def _group(leader: int) -> Iterator[int]:
    """Yield the processes of a process group."""
    for name in (folder.name for folder in Path("/proc").iterdir()):
        with suppress(ProcessLookupError):
            if name.isdigit() and os.getpgid(int(name)) == leader:
                yield int(name)


def _mappings(pid: int) -> int:
    try:
        return Path(f"/proc/{pid}/maps").read_bytes().count(b"\n")
    except OSError:  # it has ended, or its memory is not ours to look at
        return 0


def _left(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


def _write(fd: int, data: bytes, deadline: float | None) -> None:
    rest = memoryview(data)
    while rest:
        with selectors.SelectSelector() as selector:  # epoll refuses regular files
            selector.register(fd, selectors.EVENT_WRITE)
            selector.select(_left(deadline))
        rest = rest[os.write(fd, rest[:_PIECE_BYTES]) :]
