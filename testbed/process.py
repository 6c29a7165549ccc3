"""Start programs of ours as processes of their own, and do what such a program does first: die with whoever started it.

start_program  starts `python -m MODULE ARGUMENTS`; the other ways are made of it
run_program    waits for such a program and returns the lines that it prints
Child          starts a program that is told what to do in JSON and answers in JSON; ask() does so for a single answer
Parent         the other end of a Child, in the program that it started

A program ends when the thread that started it does, however that ends: the kernel kills it. What it writes to standard
error becomes part of the message when it fails.
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
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.closing import Closing
from testbed.errors import CapabilityError, SpecError, TestbedError, UserError

ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds the package. A program started there imports nothing that lies in the user's folder."""
READABLE = "under sudo it runs as the person behind it, who must be able to read the checkout and its .venv"
_LAST_WORDS = 2000
_GRACE_S = 2.0
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAPBSET_DROP = 24
_LINUX_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


# ------------------------------------------------------------------ in the parent
def start_program(
    module: str,
    *arguments: str,
    attempt: str,
    popen: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE ARGUMENTS` in a session of its own, where no Ctrl-C reaches it; it dies with this thread.

    `popen` is called like subprocess.Popen, with `options`; a namespace has one that starts programs inside. `attempt`
    is what this is for, as in "cannot ATTEMPT". CapabilityError when the program cannot be started.
    """
    command = [sys.executable, "-m", "testbed.process", str(os.getpid()), module, *arguments]
    try:
        return popen(command, **{"start_new_session": True, **options})
    except OSError as error:  # in the child, before the program began: as a rule the user may not read it
        hint = f"; {READABLE}" if isinstance(error, PermissionError) else ""
        raise CapabilityError(f"cannot {attempt}: cannot start {sys.executable}: {error.strerror}{hint}") from None


def run_program(module: str, *arguments: str, attempt: str, failure: type[TestbedError], **options: Any) -> list[str]:
    """Run a program to its end and return the lines that it printed.

    SpecError with its message when it ends with a UserError's status; a `failure` with its last words when it fails
    in another way.
    """
    options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_program(module, *arguments, attempt=attempt, **options) as process:
        try:
            output, errors = process.communicate()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise failed(attempt, failure, process.returncode, errors)
    return output.decode(errors="replace").splitlines()


def failed(attempt: str, failure: type[TestbedError], status: int, said: bytes) -> TestbedError:
    """Return what became of a program that did not end well: SpecError where the user can mend it, else a `failure`.
    `said`: what it wrote to standard error.
    """
    words = said.decode(errors="replace").strip().removeprefix("testbed: error: ")[-_LAST_WORDS:]
    if status == UserError.exit_status:
        return SpecError(f"cannot {attempt}: {words}")
    by = f" ({signal.Signals(-status).name})" if status < 0 else ""
    return failure(f"cannot {attempt}: its process ended with status {status}{by}: {words or 'no message'}")


class Child(Closing):
    """A running program that is told what to do, and answers, in lines of JSON. A context manager that ends it.

    It answers only when it is asked, or at the end of its input.
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

        Whatever ends it is a `failure`, or a SpecError as in `run_program`; CapabilityError when it cannot be started.
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
        """Send a request, which is for `attempt`, and wait for the answer to it."""
        self._send(request)
        return self.answer(attempt)

    def answer(self, attempt: str | None = None) -> Any:
        """Wait for the next answer."""
        try:
            line = b"" if self._answers.closed else self._answers.readline()
        except BaseException:  # Ctrl-C: whoever asked next would take this answer for theirs
            self.close()
            raise
        if line.endswith(b"\n"):  # else it ended, perhaps within a line
            return json.loads(line)
        raise self._ended(attempt)

    def last_answer(self, timeout_s: float | None = None) -> Any:
        """End its input, wait for the answer that it gives to that, and for its end. It is killed after `timeout_s`."""
        try:
            output, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise self._failure(f"cannot {self._attempt}: its process was not done after {timeout_s:.0f} s") from None
        except BaseException:
            self._process.kill()
            raise
        if self._process.returncode or not output:
            raise self._ended()
        return json.loads(output)

    def close(self) -> None:
        """End it: by the end of its input or, if it takes longer than two seconds, by force. Safe to call twice."""
        for stream in (self._requests, self._answers):
            with contextlib.suppress(BrokenPipeError):  # it died before: its end is what is wanted
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
        with contextlib.suppress(BrokenPipeError):  # it died: whoever waits for its answer finds out
            self._requests.write((json.dumps(request, separators=(",", ":")) + "\n").encode())
            self._requests.flush()

    def _ended(self, attempt: str | None = None) -> TestbedError:
        self.close()
        return failed(attempt or self._attempt, self._failure, self._process.returncode, self._words)


def ask(module: str, request: Mapping[str, Any], *, timeout_s: float | None = None, **options: Any) -> Any:
    """Run a program for its one answer; `options` are those of a `Child`."""
    with Child(module, request, **options) as child:
        return child.last_answer(timeout_s)


# ------------------------------------------------------------------ in the program
class Parent:
    """Whoever started this program as a `Child`."""

    request: dict[str, Any]
    """What it asked for first."""
    requests_fd = 0
    """Where it asks for more, a line at a time."""
    answers_fd: int
    """Where it reads the answers."""

    def __init__(self) -> None:
        """Wait for the first request. What this program and its libraries print from now on goes to standard error."""
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):  # unbuffered: others may read on from `requests_fd`
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
    """Have the kernel send `by` when the thread that started this process ends; exit if `parent` (a pid) is gone."""
    _prctl(_PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this one, is gone")


def drop_capabilities() -> None:
    """Give up every capability for good, for this process and its children. A plain user may do so too."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):  # EINVAL past the last one that this kernel knows; EPERM for a user who has none
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    if _libc.capset(header, nothing) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def run_module(parent: int, module: str, arguments: Sequence[str]) -> None:
    """Become the program that `start_program` names. Errors of ours end it with their message and exit status."""
    die_with_parent(parent)
    sys.argv[:] = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except TestbedError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_status)


if __name__ == "__main__":
    from testbed import process  # under its own name: the program imports it too, and errors have one class each

    process.run_module(int(sys.argv[1]), sys.argv[2], sys.argv[3:])


def process_group(leader: int) -> Iterator[int]:
    """Yield the ids of the processes of a group."""
    for name in (folder.name for folder in Path("/proc").iterdir()):
        with contextlib.suppress(ProcessLookupError):
            if name.isdigit() and os.getpgid(int(name)) == leader:
                yield int(name)
