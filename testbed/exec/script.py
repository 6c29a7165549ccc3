"""Runs a user's Python program as a fork of a process that has already imported torch, so that it starts at once.

Importing torch takes three to five seconds of processor time, and torchrun does it twice per node. `forks` imports it
once, and every program is a fork: `torchrun ...`, `python SCRIPT ...`, `python -m MODULE ...` of this interpreter's
environment. torchrun's agent starts its workers by requesting forks from `nodes` over a socket. All other programs, and
all programs under --separate, are started normally.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import itertools
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from testbed.process import drop_capabilities
from testbed.torch import autoload

PRELOADED: Final = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.run",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.registry",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
)
"""Modules that `forks` imports, so that programs share them."""
_TORCHRUN: Final = "torch.distributed.run"
_IMPORTS_TORCH: Final = re.compile(rb"^\s*(import|from)\s+torch\b", re.MULTILINE)
_LARGEST_BYTES: Final = 1 << 17
_STAY_S: Final = 5.0
"""The first agent hosts the store through which agents agree to end. Behind a slow link the other agents would query it
after its end, and print a page of errors."""


class PythonProgram(NamedTuple):
    """A program for this interpreter: a file or module, and its arguments."""

    module: str | None
    file: str | None
    arguments: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """Its description as arguments of `main`."""
        return [*(["-m", self.module] if self.module is not None else [str(self.file)]), *self.arguments]


def recognise(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> PythonProgram | None:
    """Return a command as a forkable program; None if it must be started normally.

    Forkable are torchrun, and scripts that import torch, run by this interpreter without options.
    """
    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        return None
    if Path(program).name == "torchrun" and _is_of_this_environment(Path(program)):
        return PythonProgram(_TORCHRUN, None, tuple(command[1:]))
    if not _is_this_interpreter(Path(program).absolute()):
        return None
    words = list(command[1:])
    while words[:1] == ["-u"]:  # output is always unbuffered here
        words.pop(0)
    if words[:1] == ["-m"] and len(words) > 1:
        return PythonProgram(_TORCHRUN, None, tuple(words[2:])) if words[1] == _TORCHRUN else None
    if not words or words[0].startswith("-"):
        return None
    try:
        imports_torch = _IMPORTS_TORCH.search((folder / words[0]).read_bytes())
    except OSError:
        return None  # started normally, it reports the error itself
    return PythonProgram(None, words[0], tuple(words[1:])) if imports_torch else None


def _is_of_this_environment(script: Path) -> bool:
    """Whether the first line of a console script names this interpreter."""
    try:
        with script.open("rb") as file:
            return _is_this_interpreter(Path(os.fsdecode(file.readline().strip().removeprefix(b"#!"))))
    except OSError:
        return False


def _is_this_interpreter(program: Path) -> bool:
    """Whether a program is this environment's interpreter, by any of its names: python, python3, python3.11."""
    return program.parent == Path(sys.executable).parent and program.samefile(sys.executable)


def main() -> None:
    """Run the program that the arguments describe: `[--spawn FD] [--drop] (-m MODULE | FILE) ARGUMENT...`."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--spawn", type=int)
    parser.add_argument("--drop", action="store_true")
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    if asked.drop:
        drop_capabilities()
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if not asked.module:
        autoload.load()  # `import torch` called it before the fork, without settings
    if asked.spawn is not None:
        _ask_for_workers(socket.socket(fileno=asked.spawn))
    status: Any = 0
    if not asked.words:  # this call only checks that all modules are loaded
        return
    try:
        _run(asked.words, as_module=asked.module)
    except SystemExit as error:
        status = error.code
    except BaseException as error:
        _print(error)
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
    try:  # as an interpreter exits: threads first, then exit functions
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        sys.exit(status)


def _run(words: Sequence[str], *, as_module: bool) -> None:
    name, *arguments = words
    if as_module:
        sys.argv[:] = [importlib.import_module(name).__file__ or name, *arguments]
        importlib.import_module(name).main()  # all recognised modules have one
        return
    sys.argv[:] = [name, *arguments]
    sys.path.insert(0, str(Path(name).resolve().parent))  # as the interpreter does for a script
    runpy.run_path(name, run_name="__main__")


def _print(error: BaseException) -> None:
    """Print the traceback that the program would have printed in its own interpreter."""
    frames = error.__traceback__
    ours = {__file__, runpy.__file__, f"<frozen {runpy.__name__}>"}
    while frames is not None and frames.tb_frame.f_code.co_filename in ours:
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames)


# ------------------------------------------------------------------ torchrun's workers
class _ForkedWorker:
    """A worker's process for torchrun's agent: the methods of Popen that it uses."""

    returncode: int | None = None

    def __init__(self, channel: _AgentChannel, number: int, pid: int) -> None:
        self._channel, self._number, self.pid = channel, number, pid

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        self.returncode = self._channel.status(self._number, wait_s=0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. subprocess.TimeoutExpired as in Popen."""
        self.returncode = self._channel.status(self._number, wait_s=timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, if it still runs."""
        self.send_signal(signal.SIGKILL)


class _AgentChannel:
    """The agent's end of the socket to `nodes`."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._numbers, self._lock = sock, itertools.count(), threading.RLock()
        self._pids: dict[int, int] = {}
        self._statuses: dict[int, int] = {}

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]) -> _ForkedWorker:
        with self._lock:
            number = next(self._numbers)
            asked = {
                "number": number,
                "command": list(arguments),
                "environment": dict(environment),
                "cwd": str(Path.cwd()),
            }
            socket.send_fds(self._socket, [json.dumps(asked).encode()], list(fds))
            while number not in self._pids:
                self._read(None)
            if self._pids[number] < 0:
                raise OSError(f"cannot start {arguments[0]} in this node")
            return _ForkedWorker(self, number, self._pids[number])

    def leave(self) -> None:
        """Say that the job is over for this agent, although it stays."""
        self._socket.send(json.dumps({"left": True}).encode())

    def status(self, number: int, wait_s: float | None) -> int | None:
        with self._lock:
            while number not in self._statuses and self._read(wait_s):
                pass
            return self._statuses.get(number)

    def _read(self, wait_s: float | None) -> bool:
        """Receive one message; False if none arrived in time."""
        self._socket.settimeout(wait_s)
        try:
            data = self._socket.recv(_LARGEST_BYTES)
        except (BlockingIOError, TimeoutError):
            return False
        finally:
            self._socket.settimeout(None)
        if not data:
            raise ConnectionError("the process that holds the lab has ended")
        message = json.loads(data)
        kept = self._pids if "pid" in message else self._statuses
        kept[message["number"]] = message.get("pid", message.get("status"))
        return True


def _ask_for_workers(sock: socket.socket) -> None:
    """Make torchrun's agent in this process start its workers as forks."""
    from torch.distributed.elastic.agent.server import local_elastic_agent
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    channel, outputs = _AgentChannel(sock), (sys.stdout.fileno(), sys.stderr.fileno())

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> _ForkedWorker:
        files = (handler._stdout, handler._stderr)
        given = [file.fileno() if file else ours for file, ours in zip(files, outputs, strict=True)]
        return channel.start(args, env, given)

    if not hasattr(subprocess_handler.SubprocessHandler, "_popen"):
        raise RuntimeError("torchrun of this torch version starts its workers differently; run with --separate")
    subprocess_handler.SubprocessHandler._popen = popen  # type: ignore[assignment]
    agent: Any = local_elastic_agent.LocalElasticAgent
    meet = agent._exit_barrier

    def meet_and_stay(self: Any) -> None:
        meet(self)
        channel.leave()
        time.sleep(_STAY_S)

    if os.environ.get("PET_NODE_RANK") == "0":
        agent._exit_barrier = meet_and_stay
