"""Run Python as forks of a process that has loaded torch, the models and the command line: they take five seconds.

What such a program starts is started as ever, but for the server of `testbed.forks`, which loads the same: it is a fork
too.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from testbed import forks
from testbed.process import die_with_parent

_server = forkserver.ForkServer()
_server.set_forkserver_preload(["tests.forked_loaded"])


class Program:
    """`python ARGUMENTS`, which are `-m MODULE ...` or `FILE ...`, in a session of its own. It is used as a Popen."""

    def __init__(
        self, arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None, merged: bool = False
    ) -> None:
        """Start it. `merged`: its errors are part of its output."""
        self._said = tempfile.TemporaryDirectory()
        self._files = [Path(self._said.name, name) for name in (("output",) * 2 if merged else ("output", "errors"))]
        for file in self._files:
            file.touch()
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_become, args=(list(arguments), cwd or Path.cwd(), dict(env), self._files)
        )
        with mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end and return what it said. TimeoutExpired, as in Popen; then its session is killed."""
        self._process.join(timeout)
        late = self.returncode is None
        if late:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.join()
        output, errors = (file.read_text(errors="replace") for file in self._files)
        if late:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0, output, errors)
        return output, errors

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.communicate()


Started = Program | subprocess.Popen[str]


def run(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as subprocess.run does."""
    program = Program(arguments, env=env, cwd=cwd)
    output, errors = program.communicate(280)
    assert program.returncode is not None
    return subprocess.CompletedProcess([*arguments], program.returncode, output, errors)


def in_child(work: Callable[[], Any], *, seconds: float) -> Any:
    """Return the result of `work`, or raise its exception, from a fork of this process with one thread for torch."""
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, fork, torch.set_num_threads, (1,)) as pool:
        return pool.submit(work).result(seconds)


def command_line(pid: int) -> str:
    """Return what a process was started with. OSError where it is gone."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def is_running(pid: int) -> bool:
    """Say whether a process is there, and not only its last status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def is_gone(pid: int, within_s: float = 20) -> bool:
    """Say whether a process ends within this time."""
    deadline = time.monotonic() + within_s
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def servers() -> set[int]:
    """Return the processes that stand for as long as this one."""
    pids = (_server._forkserver_pid, resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    return {pid for pid in pids if pid is not None}


def _become(arguments: list[str], folder: Path, env: dict[str, str], files: list[Path]) -> None:
    """Be the program, in the fork."""
    os.setsid()
    for number, path in enumerate(files, 1):
        with path.open("ab") as file:
            os.dup2(file.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    forks.start_program = _fork_the_server  # type: ignore[attr-defined, assignment]
    warnings.filterwarnings("ignore", "'.*' found in sys.modules after import", RuntimeWarning)
    try:
        if arguments[0] == "-m":
            sys.path[0] = str(folder)
            sys.argv[:] = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(arguments[0]).parent)
            sys.argv[:] = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


class _Server(forks.Forked):
    """A forked server of `testbed.forks`, as the Popen that it is elsewhere."""

    _handle: int

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            assert self._handle is not None
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked server", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._handle)
        return self.returncode


def _fork_the_server(
    module: str, *arguments: str, pass_fds: Sequence[int], stderr: Any, env: Mapping[str, str], **_: Any
) -> _Server:
    assert module == forks.__name__
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return _Server(pid)
    try:
        os.setsid()
        die_with_parent(parent)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number, fd in enumerate((nothing, nothing, stderr.fileno())):
            os.dup2(fd, number)
        (control,) = pass_fds
        os.closerange(3, control)
        os.closerange(control + 1, 1 << 10)
        os.environ.clear()
        os.environ.update(env)
        sys.argv[:] = [module, *arguments]
        forks.main()
    finally:
        os._exit(1)
