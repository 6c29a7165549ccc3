"""Starts testbed programs instantly, as forks of a process that has already imported what they need.

Importing torch and the models takes five seconds of processor time. `popen` is called like subprocess.Popen, with a
command of `process.start_program`. Its first call starts the server, `python -m testbed.forks`, which imports them once
and forks each program. The server dies with the process that started it, and all forked programs die with the server.

A request is one packet of a Unix SOCK_SEQPACKET pair. It carries the end of a pipe on which the server reports the
program's pid and later its status, a file that describes the program, and the program's file descriptors.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from testbed.errors import CapabilityError, StageError, explained
from testbed.frozen import Frozen
from testbed.process import READABLE, ROOT, become_user, die_with_parent, program_of, start_program

LOADS: Final = "testbed.runtime.host"
"""The default module whose `PRELOADED` names what every program needs."""
_MOST_FDS = 64
_LAST_WORDS = 2000
_GRACE_S = 5.0
_NUMBER: Final = struct.Struct("=i")
_SPARE = 900
"""Descriptors are first moved beyond this number, so that none is overwritten before it is in its final place."""
_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


class _Request(Frozen):
    """The program to fork."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    """Working folder."""
    user: int | None
    group: int | None
    namespaces: int
    """Number of descriptors, at the end of the list, that are namespaces to enter."""
    numbers: tuple[int, ...]
    """Numbers of the descriptors in the program."""


# ------------------------------------------------------------------ in the parent
def popen(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    namespaces: Sequence[int] = (),
    user: int | None = None,
    group: int | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: IO[bytes] | int,
    stderr: IO[bytes],
    pass_fds: Sequence[int] = (),
    **_: Any,
) -> subprocess.Popen[bytes]:
    """Start a program, without input, in a new session, as `user` if given. Main thread only.

    `namespaces`: descriptors of the namespaces to run in. StageError if the server has died.
    """
    assert stdin == subprocess.DEVNULL
    start(env, loads=_servers[0].loads if _servers else LOADS)
    module, arguments = program_of(command)
    reads: IO[bytes] | None = None
    with contextlib.ExitStack() as stack:
        output = stdout if isinstance(stdout, int) else stdout.fileno()
        if output == subprocess.PIPE:
            ours, output = os.pipe()
            stack.callback(os.close, output)
            reads = os.fdopen(ours, "rb", 0)
        given = {1: output, 2: stderr.fileno(), **{fd: fd for fd in pass_fds}}
        request = _Request(
            module=module,
            arguments=tuple(arguments),
            environment=dict(env),
            folder=str(Path.cwd()),
            user=user,
            group=group,
            namespaces=len(namespaces),
            numbers=tuple(given),
        )
        forked = _servers[0].fork(request, [*given.values(), *namespaces])
    forked.stdout = reads
    return forked  # type: ignore[return-value]  # a Popen as far as those who start programs here need one


class Forked:
    """A forked program."""

    returncode: int | None = None
    stdout: IO[bytes] | None = None

    def __init__(self, pid: int, status: int) -> None:
        """`status`: the pipe that reports its exit status."""
        self.pid = pid
        self._status = status
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._handle = os.pidfd_open(pid)

    def fileno(self) -> int:
        """Return a descriptor that can be read once it has ended, until `wait` or `poll` has returned its status."""
        return self._status

    def poll(self) -> int | None:
        """Return its status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for it to end. subprocess.TimeoutExpired as in Popen."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
            status = _read_number(self._status)
            os.close(self._status)
            if self._handle is not None:
                os.close(self._handle)
            self.returncode = -signal.SIGKILL if status is None else status  # the server died, and killed it
        return self.returncode

    def kill(self) -> None:
        """Kill it, if it still runs."""
        if self.returncode is None and self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def _read_number(pipe: int) -> int | None:
    """Read a number from the server; None if the server has died."""
    content = os.read(pipe, _NUMBER.size)
    return int.from_bytes(content, sys.byteorder, signed=True) if len(content) == _NUMBER.size else None


class _Server:
    """The server. It imports in the background; requests wait until it is done."""

    def __init__(self, env: Mapping[str, str], loads: str) -> None:
        self.circumstances, self.loads = _circumstances(env), loads
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = os.fdopen(os.memfd_create("errors"), "rb")
        with theirs:
            self._process = start_program(
                "testbed.forks",
                *("--control-fd", str(theirs.fileno()), "--loads", loads),
                attempt="start the fork server",
                pass_fds=(theirs.fileno(),),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def runs(self) -> bool:
        return self._process.poll() is None

    def fork(self, request: _Request, fds: Sequence[int]) -> Forked:
        status, theirs = os.pipe()
        with os.fdopen(os.memfd_create("request"), "wb", 0) as asked:  # an environment may exceed a packet
            asked.write(request.model_dump_json().encode())
            try:
                with contextlib.suppress(BrokenPipeError):  # the reader of the status sees the closed pipe
                    socket.send_fds(self._channel, [b"fork"], [theirs, asked.fileno(), *fds])
            finally:
                os.close(theirs)
        try:
            pid = _read_number(status)
        except BaseException:  # Ctrl-C: closing the pipe makes the server kill the program
            os.close(status)
            raise
        if pid is None:
            os.close(status)
            self._process.wait(_GRACE_S)
            words = os.pread(self._errors.fileno(), 1 << 16, 0).decode(errors="replace").strip()
            raise StageError(
                f"cannot start {request.module}: the fork server ended with status "
                f"{self._process.returncode}: {words[-_LAST_WORDS:] or 'no message'}"
            )
        return Forked(pid, status)

    def close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


_servers: list[_Server] = []
"""The server of this process, if any."""


def start(env: Mapping[str, str], loads: str = LOADS) -> None:
    """Start the server, unless one with the same import paths is running; it imports in the background.

    `loads`: the module whose `PRELOADED` names what programs need.
    """
    assert threading.current_thread() is threading.main_thread()  # it dies with the thread that started it
    if _servers and (not _servers[0].runs() or _servers[0].circumstances != _circumstances(env)):
        close()
    if not _servers:
        _servers.append(_Server(env, loads))
        atexit.register(close)


def _circumstances(env: Mapping[str, str]) -> tuple[object, ...]:
    """Return the settings that a fork cannot change, with the pid: a fork of this process has no server."""
    return os.getpid(), Path("/proc/self/ns/user").stat().st_ino, env.get("PYTHONPATH")


def server() -> int | None:
    """Return the pid of the server of this process, if it has one."""
    return _servers[0].pid if _servers else None


def close() -> None:
    """End the server, and with it all forked programs. Safe to call twice."""
    while _servers:
        server = _servers.pop()
        if server.circumstances[0] == os.getpid():
            server.close()
    atexit.unregister(close)


# ------------------------------------------------------------------ the server
def _serve(channel: socket.socket) -> None:
    """Fork the requested programs and report their status, until the client is gone."""
    running: dict[int, tuple[int, int]] = {}  # by handle: pid, and pipe for its status
    while True:
        ready, _, _ = select.select([channel.fileno(), *running], [], [])
        for handle in set(ready) & running.keys():
            pid, status = running.pop(handle)
            os.close(handle)
            _say(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os.close(status)
        if channel.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(channel, _NUMBER.size, _MOST_FDS)
        if not data:
            return
        status, asked, *given = fds
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(_Request.model_validate_json(os.pread(asked, os.fstat(asked).st_size, 0)), given, server)
        for fd in (asked, *given):
            os.close(fd)
        running[os.pidfd_open(pid)] = pid, status
        if not _say(status, pid):
            os.kill(pid, signal.SIGKILL)


def _say(pipe: int, number: int) -> bool:
    """Write a number; return whether the pipe is still read."""
    try:
        os.write(pipe, _NUMBER.pack(number))
    except BrokenPipeError:
        return False
    return True


# ------------------------------------------------------------------ the program
def _become(request: _Request, given: Sequence[int], server: int) -> NoReturn:
    """Run the program in the fork; never returns to the server's code."""
    status = 1
    try:
        os.setsid()
        _take(request, given)
        if request.user is not None and request.group is not None:
            become_user(request.user, request.group)
            _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise its files in /proc stay root's
        die_with_parent(server)  # after setuid, which resets it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(request.environment)
        if not os.access(sys.executable, os.X_OK) or not os.access(ROOT / "testbed", os.R_OK | os.X_OK):
            raise CapabilityError(f"cannot start {request.module}: user {os.getuid()} may not read it; {READABLE}")
        os.chdir(request.folder)
        sys.argv[:] = [request.module, *request.arguments]
        importlib.import_module(request.module).main()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException as error:
        if (told := explained(error)) is None:
            traceback.print_exc()
        else:
            sys.stderr.write(f"{told}\n")
            status = told.exit_status
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _take(request: _Request, given: Sequence[int]) -> None:
    """Enter the namespaces, move the descriptors to their numbers, and close all others."""
    for namespace in given[len(request.numbers) :]:
        if _libc.setns(namespace, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter a namespace of the lab: {os.strerror(number)}")
    assert max(request.numbers) < _SPARE
    moved = [os.dup2(fd, _SPARE + place) for place, fd in enumerate(given)]
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.closerange(3, _SPARE)
    for fd, number in zip(moved, request.numbers, strict=False):
        os.dup2(fd, number)
    os.closerange(_SPARE, _SPARE + len(given))


def preload(modules: Iterable[str]) -> None:
    """Import modules, so that forks of this process share them."""
    # Importing torch creates its compiler's cache folder, which would here belong to root, not to the user. A temporary
    # folder would stay behind where this process is killed; /proc exists, and nothing can be made there.
    key = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(key)
    os.environ[key] = "/proc"
    for module in modules:
        importlib.import_module(module)
    del os.environ[key]
    if before is not None:
        os.environ[key] = before
    gc.collect()
    gc.freeze()


def main() -> None:
    """Import everything, then serve."""
    parser = argparse.ArgumentParser(description="Forks programs; started by the controller, not by hand.")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--loads", required=True)
    asked = parser.parse_args()
    channel = socket.socket(fileno=asked.control_fd)
    channel.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    preload(importlib.import_module(asked.loads).PRELOADED)
    _serve(channel)
    os._exit(0)  # at once: finalising an interpreter with torch takes half a second


if __name__ == "__main__":
    main()
