"""Start programs of ours as forks of a process that has loaded what they need, so that each starts at once.

To import torch and the models takes five seconds of a processor. `popen` is called like subprocess.Popen, with a
command of `process.start_program`. Its first call starts the server, `python -m testbed.forks`, which loads them once
and forks each program from itself. The server dies with the process that started it, and with the server all that it
forked.

A request is one packet of a Unix SOCK_SEQPACKET pair. With it travel a pipe's end, on which the server says the
program's pid and later its status, and the descriptors that the program gets.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from testbed.errors import CapabilityError, StageError, TestbedError
from testbed.frozen import Frozen
from testbed.process import READABLE, ROOT, die_with_parent, start_program

LOADS: Final = "testbed.pipeline.host"
"""The module whose `preload` loads what every program needs."""
_LARGEST_BYTES = 1 << 17
_MOST_FDS = 64
_LAST_WORDS = 2000
_GRACE_S = 5.0
_NUMBER: Final = struct.Struct("=i")
_SPARE = 900
"""Descriptors are first moved beyond this number, so that none is overwritten before it is where it belongs."""
_NEW_NETWORK = 0x40000000
_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


class _Request(Frozen):
    """The program to be forked."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    """To work in, and the first to import from."""
    user: int | None
    group: int | None
    inside: bool
    """Whether the last descriptor is a network namespace to run in."""
    numbers: tuple[int, ...]
    """What the program calls its descriptors."""


# ------------------------------------------------------------------ for whoever starts programs
def popen(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    namespace: int | None = None,
    user: int | None = None,
    group: int | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: IO[bytes] | int,
    stderr: IO[bytes],
    pass_fds: Sequence[int] = (),
    **_: Any,
) -> subprocess.Popen[bytes]:
    """Start a program; from the main thread only. It has no input, a session of its own, and runs as `user` if given.

    `namespace`: the descriptor of a network namespace to run in. StageError when the server is gone.
    """
    assert stdin == subprocess.DEVNULL
    start(env)
    module, *arguments = command[command.index("testbed.process") + 2 :]
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
            inside=namespace is not None,
            numbers=tuple(given),
        )
        forked = _servers[0].fork(request, [*given.values(), *([] if namespace is None else [namespace])])
    forked.stdout = reads
    return forked  # type: ignore[return-value]  # a Popen as far as those who start programs here need one


class Forked:
    """A program that was forked."""

    returncode: int | None = None
    stdout: IO[bytes] | None = None

    def __init__(self, pid: int, status: int) -> None:
        """`status`: the pipe that says how it ended."""
        self.pid = pid
        self._status = status
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._handle = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return its status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. subprocess.TimeoutExpired as in Popen."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
            status = _read_number(self._status)
            os.close(self._status)
            if self._handle is not None:
                os.close(self._handle)
            self.returncode = -signal.SIGKILL if status is None else status  # the server is gone, and it with it
        return self.returncode

    def kill(self) -> None:
        """Kill it, if it still runs."""
        if self.returncode is None and self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)


def _read_number(pipe: int) -> int | None:
    """Read a number from the server; None when it is gone."""
    content = os.read(pipe, _NUMBER.size)
    number: int | None = _NUMBER.unpack(content)[0] if len(content) == _NUMBER.size else None
    return number


class _Server:
    """The server. It loads while this process goes on, and what is asked for meanwhile waits."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.circumstances = _circumstances(env)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = os.fdopen(os.memfd_create("errors"), "rb")
        with theirs:
            self._process = start_program(
                "testbed.forks",
                *("--control-fd", str(theirs.fileno())),
                attempt="start the process that programs are forked from",
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
        try:
            with contextlib.suppress(BrokenPipeError):  # then nobody writes to the pipe either
                socket.send_fds(self._channel, [request.model_dump_json().encode()], [theirs, *fds])
        finally:
            os.close(theirs)
        try:
            pid = _read_number(status)
        except BaseException:  # Ctrl-C: a pipe that nobody reads tells the server to end what it forks
            os.close(status)
            raise
        if pid is None:
            os.close(status)
            self._process.wait(_GRACE_S)
            words = os.pread(self._errors.fileno(), 1 << 16, 0).decode(errors="replace").strip()
            raise StageError(
                f"cannot start {request.module}: the process that programs are forked from ended with status "
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
"""The one of this process, if it has any."""


def start(env: Mapping[str, str]) -> None:
    """Start the server where there is none that runs and imports from the same places; it loads meanwhile."""
    assert threading.current_thread() is threading.main_thread()  # it dies with the thread that started it
    if _servers and (not _servers[0].runs() or _servers[0].circumstances != _circumstances(env)):
        close()
    if not _servers:
        _servers.append(_Server(env))
        atexit.register(close)


def _circumstances(env: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a fork cannot change any more; a fork of this process is another one, without a server."""
    return os.getpid(), Path("/proc/self/ns/user").stat().st_ino, env.get("PYTHONPATH")


def server() -> int | None:
    """Return the pid of the server of this process, if it has one."""
    return _servers[0].pid if _servers else None


def close() -> None:
    """End the server, and with it all that it forked. Safe to call twice."""
    while _servers:
        server = _servers.pop()
        if server.circumstances[0] == os.getpid():
            server.close()
    atexit.unregister(close)


# ------------------------------------------------------------------ the server
def _serve(channel: socket.socket) -> None:
    """Fork what is asked for, and say how it ended, until whoever asks is gone."""
    running: dict[int, tuple[int, int]] = {}  # by their handles: pids, and pipes for their status
    while True:
        ready, _, _ = select.select([channel.fileno(), *running], [], [])
        for handle in set(ready) & running.keys():
            pid, status = running.pop(handle)
            os.close(handle)
            _say(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os.close(status)
        if channel.fileno() not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(channel, _LARGEST_BYTES, _MOST_FDS)
        if not data:
            return
        status, *given = fds
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(_Request.model_validate_json(data), given, server)
        for fd in given:
            os.close(fd)
        running[os.pidfd_open(pid)] = pid, status
        if not _say(status, pid):
            os.kill(pid, signal.SIGKILL)


def _say(pipe: int, number: int) -> bool:
    """Write a number; whether somebody reads."""
    try:
        os.write(pipe, _NUMBER.pack(number))
    except BrokenPipeError:
        return False
    return True


# ------------------------------------------------------------------ the program
def _become(request: _Request, given: Sequence[int], server: int) -> NoReturn:
    """Be the program, in the fork, and never return into the server's code."""
    status = 1
    try:
        os.setsid()
        _take(request, given)
        if request.user is not None and request.group is not None:
            os.setgroups([])
            os.setgid(request.group)
            os.setuid(request.user)
            _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else its own files in /proc stay root's
        die_with_parent(server)  # after setuid, which forgets it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(request.environment)
        if not os.access(sys.executable, os.X_OK) or not os.access(ROOT / "testbed", os.R_OK | os.X_OK):
            raise CapabilityError(f"cannot start {request.module}: user {os.getuid()} may not read it; {READABLE}")
        os.chdir(request.folder)
        if not sys.flags.safe_path:
            sys.path[0] = request.folder
        sys.argv[:] = [request.module, *request.arguments]
        importlib.import_module(request.module).main()
        status = 0
    except TestbedError as error:
        sys.stderr.write(f"{error}\n")
        status = error.exit_status
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _take(request: _Request, given: Sequence[int]) -> None:
    """Enter the namespace, put the descriptors where they belong, and close all others."""
    if request.inside and _libc.setns(given[-1], _NEW_NETWORK) != 0:
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


def main() -> None:
    """Load, and serve."""
    parser = argparse.ArgumentParser(description="Forks programs; started by the controller, not by hand.")
    parser.add_argument("--control-fd", type=int, required=True)
    channel = socket.socket(fileno=parser.parse_args().control_fd)
    channel.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    importlib.import_module(LOADS).preload()
    _serve(channel)
    os._exit(0)  # at once: taking an interpreter with torch apart needs half a second


if __name__ == "__main__":
    main()
