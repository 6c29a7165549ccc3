"""Starts testbed programs as separate processes, which die with the process that started them.

command_line   returns the command of such a program, which imports nothing of the folder where it runs
start_program  starts it; the others build on it
run_program    waits for such a program and returns the lines it prints
Child          starts a program that receives requests and answers in JSON; ask() makes a single request
Parent         the other end of a Child, in the program that it started

When the thread that started a program ends for any reason, the kernel kills the program. If a program fails, its
standard error becomes part of the error message.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.closing import Closing
from testbed.errors import CapabilityError, SpecError, TestbedError, UserError, status_of

ROOT = Path(__file__).resolve().parents[1]
"""The folder of the package."""
READABLE = "under sudo it runs as the user who called sudo, who must be able to read the checkout and its .venv"
Heard = Callable[[str], None]
"""Receives a line that a program printed."""
_LAST_WORDS = 2000
_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAPBSET_DROP = 24
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


# ------------------------------------------------------------------ in the parent
def command_line(module: str, *arguments: str, parent: int = 0) -> list[str]:
    """Return the command that runs `python -m MODULE ARGUMENTS` from this package, without the current folder.

    Modules of the current folder are the user's; `paths.import_named` finds them. `parent`: the pid of
    the process that it dies with; 0: none.
    """
    flags = "-PB" if sys.dont_write_bytecode else "-P"
    return [sys.executable, flags, str(ROOT / "testbed" / "program.py"), str(parent), module, *arguments]


def program_of(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the module and the arguments of a command of `command_line`."""
    return command[4], list(command[5:])


def start_program(
    module: str,
    *arguments: str,
    attempt: str,
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start a program of `command_line` in a new session, out of reach of Ctrl-C; it dies with this thread.

    `popen` is called like subprocess.Popen, with `options`; a namespace's own one starts programs inside it. `attempt`:
    the purpose, as in "cannot ATTEMPT". CapabilityError if the program cannot be started.
    """
    command = command_line(module, *arguments, parent=os.getpid())
    try:
        return popen(command, **{"start_new_session": True, **options})
    except OSError as error:  # in the child, before the program began: usually the user may not read it
        hint = f"; {READABLE}" if isinstance(error, PermissionError) else ""
        raise CapabilityError(f"cannot {attempt}: cannot start {sys.executable}: {error.strerror}{hint}") from None


def run_program(
    module: str, *arguments: str, attempt: str, failure: type[TestbedError], heard: Heard | None = None, **options: Any
) -> list[str]:
    """Run a program to its end and return the lines it printed, each of which `heard` receives at once.

    SpecError with its message if it ends with the status of a UserError; a `failure` with the end of its standard error
    if it fails in another way.
    """
    lines = list[str]()
    with tempfile.TemporaryFile() as errors:  # a pipe could fill up
        options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
        with start_program(module, *arguments, attempt=attempt, **options) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    lines += line.decode(errors="replace").splitlines()
                    if heard is not None:
                        heard(lines[-1])
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            errors.seek(0)
            raise failed(attempt, failure, process.returncode, errors.read())
    return lines


def failed(attempt: str, failure: type[TestbedError], status: int, said: bytes) -> TestbedError:
    """Return the error of a failed program: SpecError for a user error, otherwise a `failure`. `said`: its standard
    error.
    """
    words = said.decode(errors="replace").strip().removeprefix("testbed: error: ")[-_LAST_WORDS:]
    if status == UserError.exit_status:
        return SpecError(f"cannot {attempt}: {words}")
    by = f" ({signal.Signals(-status).name})" if status < 0 else ""
    return failure(f"cannot {attempt}: its process ended with status {status}{by}: {words or 'no message'}")


class Child(Closing):
    """A running program that receives requests and answers in lines of JSON. A context manager that ends it.

    It answers only to a request, or to the end of its input.
    """

    def __init__(
        self,
        module: str,
        request: Mapping[str, Any],
        *,
        attempt: str,
        failure: type[TestbedError],
        fds: Sequence[int] = (),
        **options: Any,
    ) -> None:
        """Start it from the main thread and send the first request. It inherits `fds` under their numbers.

        If it ends, a `failure` is raised, or a SpecError as in `run_program`; CapabilityError if it cannot be started.
        """
        assert threading.current_thread() is threading.main_thread()  # it dies with the thread that started it
        self._attempt, self._failure = attempt, failure
        self._errors = os.fdopen(os.memfd_create("errors"), "rb")  # a pipe could fill up and halt the program
        try:
            self._process = start_program(
                module,
                attempt=attempt,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                pass_fds=sorted(set(fds)),
                **{"cwd": ROOT, **options},
            )
        except BaseException:
            self._errors.close()
            raise
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        self._send(request)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any], attempt: str) -> Any:
        """Send a request and wait for its answer. `attempt`: the purpose, as in `start_program`."""
        self._send(request)
        return self.answer(attempt)

    def answer(self, attempt: str | None = None) -> Any:
        """Wait for the next answer."""
        try:
            line = b"" if self._answers.closed else self._answers.readline()
        except BaseException:  # Ctrl-C: this answer would be mistaken for that to the next request
            self.close()
            raise
        if line.endswith(b"\n"):  # otherwise it ended, possibly within a line
            return json.loads(line)
        raise self._ended(attempt)

    def last_answer(self, timeout_s: float | None = None) -> Any:
        """Close its input, wait for its final answer and for its end. It is killed after `timeout_s`."""
        try:
            output, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise self._failure(f"cannot {self._attempt}: its process did not end within {timeout_s:.0f} s") from None
        except BaseException:
            self._process.kill()
            raise
        if self._process.returncode or not output:
            raise self._ended()
        return json.loads(output)

    def close(self) -> None:
        """End it by closing its input; kill it after two seconds. Safe to call twice."""
        for stream in (self._requests, self._answers):
            with contextlib.suppress(BrokenPipeError):  # it already died, which is the goal here
                stream.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if not self._errors.closed:
            self._words = os.pread(self._errors.fileno(), os.fstat(self._errors.fileno()).st_size, 0)
            self._errors.close()

    def _send(self, request: Mapping[str, Any]) -> None:
        if self._requests.closed:
            return
        with contextlib.suppress(BrokenPipeError):  # it died: the wait for its answer will report that
            self._requests.write((json.dumps(request, separators=(",", ":")) + "\n").encode())
            self._requests.flush()

    def _ended(self, attempt: str | None = None) -> TestbedError:
        self.close()
        return failed(attempt or self._attempt, self._failure, self._process.returncode, self._words)


def ask(module: str, request: Mapping[str, Any], *, timeout_s: float | None = None, **options: Any) -> Any:
    """Run a program for a single answer; `options` are those of a `Child`."""
    with Child(module, request, **options) as child:
        return child.last_answer(timeout_s)


# ------------------------------------------------------------------ in the program
class Parent:
    """The process that started this program as a `Child`."""

    request: dict[str, Any]
    """The first request."""
    requests_fd = 0
    """File descriptor of further requests, one per line."""
    answers_fd: int
    """File descriptor for the answers."""

    def __init__(self) -> None:
        """Wait for the first request. From now on, the output of this program and its libraries goes to stderr."""
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):  # unbuffered: others may read further requests
            parts.append(os.read(self.requests_fd, 1 << 20))
            if not parts[-1]:
                sys.exit("the input ended before the first request")
        self.request = json.loads(b"".join(parts))
        self.answers_fd = os.dup(1)
        os.dup2(2, 1)

    def answer(self, value: Any) -> None:
        """Send one answer."""
        content = memoryview((json.dumps(value, separators=(",", ":")) + "\n").encode())
        while content:
            content = content[os.write(self.answers_fd, content) :]


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send `by` when the thread that started this process ends; exit if `parent` (a pid) is gone."""
    _prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, is gone")


def set_timer_slack() -> None:
    """Make sleeps exact, for the calling thread and the threads it starts from now on."""
    _prctl(_PR_SET_TIMERSLACK, 1)  # ns; 0 would mean the default, 50 us


def become_user(uid: int, gid: int) -> None:
    """Permanently become another user without capabilities, as root. Resets `die_with_parent`."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Permanently drop all capabilities of this process and its children. Also works without privileges."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):  # EINVAL beyond this kernel's last one; EPERM for an unprivileged user
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if _libc.capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def shell_status(returncode: int) -> int:
    """Return a Popen's return code as a shell reports it: 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def run_module(parent: int, module: str, arguments: Sequence[str]) -> None:
    """Run the module that `command_line` names. An error ends it with its message and exit status."""
    if parent:
        die_with_parent(parent)
    sys.argv[:] = [module, *arguments]
    sys.exit(status_of(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)))


def process_group(leader: int) -> Iterator[int]:
    """Yield the ids of the processes of a group."""
    for name in (folder.name for folder in Path("/proc").iterdir()):
        with contextlib.suppress(ProcessLookupError):
            if name.isdigit() and os.getpgid(int(name)) == leader:
                yield int(name)
