"""Start a program in every node of a lab, forward its output, and monitor it until it ends. One loop, no threads.

The caller is the first process of its own process namespace (`inside`), so all leftovers of programs end with it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pwd
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol

from testbed import forks, paths
from testbed.errors import UserError, printable_line, without_colours
from testbed.exec import script
from testbed.exec.order import ExecOrder, NodeOutcome, fill_in, node_environment
from testbed.net.kernel.namespace import Hostname
from testbed.net.lab import Lab, LabNode
from testbed.process import drop_capabilities, shell_status, start_program
from testbed.torch.autoload import VARIABLE

TIME_LIMIT_STATUS: Final = 124
_LAST_LINES: Final = 12
_GRACE_S: Final = 30.0
"""In the lab's time: after the first failure, other nodes have this long to report before they are terminated."""
_END_S: Final = 5.0
"""Time between SIGTERM and SIGKILL."""
_DRAIN_S: Final = 0.2
_LOOK_S: Final = 1.0
_LARGEST_BYTES: Final = 1 << 17
_DEFAULTS: Final = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Defaults for unset variables: nodes share the cores, and c10d warns of every address without a name."""
_COLOURS: Final = (36, 33, 32, 35, 34, 31)


class _Process(Protocol):
    pid: int

    def poll(self) -> int | None: ...


class _Node:
    """One node's program."""

    def __init__(
        self, lab_node: LabNode, command: Sequence[str], program: script.PythonProgram | None, log: IO[str]
    ) -> None:
        """`program`: the command as a forkable Python program; None: start the command itself."""
        self.name, self.index, self.address = lab_node.name, lab_node.index, lab_node.address
        self.namespace, self.hostname = lab_node.namespace, Hostname(lab_node.name)
        self.command, self.program, self.log = tuple(command), program, log
        self.process: _Process
        self.output = -1
        self.partial = b""
        self.last_words: deque[str] = deque(maxlen=_LAST_LINES)
        self.steps_ns: list[int] = []
        self.status: int | None = None
        self.ended_ns: int | None = None
        self.channel: socket.socket | None = None


class Programs:
    """The programs of all nodes; create it, then run it once."""

    def __init__(self, order: ExecOrder, lab: Lab, folder: Path, check: Callable[[], None]) -> None:
        """`check` is called every second, and raises an error if the lab is faulty."""
        self._order, self._lab, self._check = order, lab, check
        self._addresses = [node.address for node in lab.nodes]
        self._pattern = re.compile(order.step_pattern) if order.step_pattern else None
        self._selector = selectors.DefaultSelector()
        self._workers: list[tuple[_Process, _Node, int]] = []
        # Files that another run left in this machine's temporary folder would affect the job's times.
        own = {"TMPDIR": "/dev/shm"} if order.clock == "virtual" else {}
        self._base = {**_DEFAULTS, **os.environ, **own, **order.environment}
        # So that torchrun is found if testbed was called by its path, such as .venv/bin/testbed.
        self._base["PATH"] = os.pathsep.join([self._base.get("PATH", os.defpath), str(Path(sys.executable).parent)])
        # Under sudo the fork server is root until a program is given to it, and would be started again with what an
        # agent asks for.
        separate = order.separate or (order.clock == "real" and paths.invoking_user() is not None)
        self._nodes = []
        for node, command in zip(lab.nodes, order.commands, strict=True):
            log = os.fdopen(paths.create(folder / f"{node.name}.log"), "w", encoding="utf8", buffering=1)
            paths.give_to_user(folder / f"{node.name}.log")
            filled = fill_in(command, node.index, self._addresses)
            program = None if separate else script.recognise(filled, self._base, Path.cwd())
            self._nodes.append(_Node(node, filled, program, log))

    def load(self) -> None:
        """Wait until the fork server has imported its modules, so that the job's time excludes that."""
        if any(node.program for node in self._nodes):
            forks.start(self._base, loads=script.__name__)
            with Path(os.devnull).open("wb") as nothing:
                options: Any = {"env": self._base, "stdout": nothing, "stderr": nothing, "popen": forks.popen}
                start_program(script.__name__, attempt="load torch", **options).wait()

    # -------------------------------------------------------------- starting
    def _start(self, node: _Node) -> None:
        device = self._lab.nodes[node.index].devices[0]
        environment = self._base | node_environment(node.index, self._addresses, device)
        environment |= {VARIABLE: json.dumps(self._order.torch)} if self._order.torch else {}
        if (user := paths.invoking_user()) is not None and "HOME" not in self._order.environment:
            with contextlib.suppress(KeyError):  # a user without a name
                environment["HOME"] = pwd.getpwuid(user[0]).pw_dir  # ours is root's
        node.output, theirs = os.pipe()
        os.set_blocking(node.output, False)
        with os.fdopen(theirs, "wb", 0) as output:
            if node.program is None:
                node.process = self._start_as_it_is(node, node.command, environment, output, output)
            else:
                node.process = self._fork(node, node.program, environment, output)
        self._selector.register(node.output, selectors.EVENT_READ, functools.partial(self._read, node))

    def _start_as_it_is(
        self,
        node: _Node,
        command: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        folder: str | None = None,
    ) -> _Process:
        """Start a program in a node. UserError if it cannot be started."""
        options: dict[str, Any] = {}
        if self._order.clock == "real":
            options = {**paths.as_invoking_user(), "preexec_fn": drop_capabilities}
        try:
            with node.namespace.entered(), node.hostname.entered():
                process = subprocess.Popen(
                    command,
                    env=environment,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                    **options,
                )
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(f"{node.name} cannot run {command[0]!r}: {error}") from None
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, None)
        return process

    def _fork(
        self, node: _Node, program: script.PythonProgram, environment: Mapping[str, str], output: IO[bytes]
    ) -> _Process:
        words, given = program.words, list[int]()
        theirs: socket.socket | None = None
        if program.module is not None:
            node.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            given = [theirs.fileno()]
            words = ["--spawn", str(given[0]), *words]
            self._selector.register(node.channel, selectors.EVENT_READ, functools.partial(self._start_worker, node))
        forked = self._popen(node, words, environment, output, output, given)
        if theirs is not None:
            theirs.close()
        return forked

    def _popen(
        self,
        node: _Node,
        words: Sequence[str],
        environment: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
        given: Sequence[int] = (),
    ) -> forks.Forked:
        real = self._order.clock == "real"
        user = paths.as_invoking_user() if real else {}
        popen = functools.partial(forks.popen, namespaces=[node.namespace.fd, node.hostname.fd], **user)
        forked: Any = start_program(
            script.__name__,
            *(["--drop"] if real else []),
            *words,
            attempt=f"start the program of {node.name}",
            popen=popen,
            env=environment,
            stdout=stdout,
            stderr=stderr,
            pass_fds=given,
        )
        self._selector.register(forked, selectors.EVENT_READ, None)
        return forked  # type: ignore[no-any-return]

    def _start_worker(self, node: _Node) -> None:
        """Fork a worker requested by torchrun's agent in this node, and send the agent the worker's pid."""
        assert node.channel is not None
        data, fds, _, _ = socket.recv_fds(node.channel, _LARGEST_BYTES, 2)
        if not data:
            self._selector.unregister(node.channel)
            return
        asked = json.loads(data)
        if "left" in asked:
            node.ended_ns = time.monotonic_ns() - self._started_ns
            return
        command, environment, folder = asked["command"], asked["environment"], asked["cwd"]
        answer = -1
        with os.fdopen(fds[0], "wb", 0) as stdout, os.fdopen(fds[1], "wb", 0) as stderr, contextlib.suppress(UserError):
            program = script.recognise(command, environment, Path(folder))
            if program is None:  # not Python, or without torch: start a separate interpreter
                worker = self._start_as_it_is(node, command, environment, stdout, stderr, folder)
            else:
                worker = self._popen(node, program.words, environment, stdout, stderr)
            self._workers.append((worker, node, asked["number"]))
            answer = worker.pid
        node.channel.send(json.dumps({"number": asked["number"], "pid": answer}).encode())

    # -------------------------------------------------------------- watching
    def run(self, started_ns: int) -> tuple[int, str]:
        """Start all programs; return the job's exit status and the reason for its end.

        The status is that of the first node to fail; 124 if the time limit ended the job.
        """
        self._started_ns = started_ns
        for node in self._nodes:
            self._start(node)
        limit_s = self._order.time_limit_s
        over_s, failed = limit_s, None
        while True:
            self._wait(min(over_s - self._now_s(), _LOOK_S))
            self._reap()
            first = min(
                (node for node in self._nodes if node.status), key=lambda node: node.ended_ns or 0, default=None
            )
            if first is not None and failed is None:
                failed, over_s = first, min(limit_s, self._now_s() + _GRACE_S)
            running = [node for node in self._nodes if node.status is None]
            awaited = [node for node in running if node.index in self._order.ends_with]
            if not awaited or self._now_s() >= over_s:
                break
            self._check()
        self._drain()
        left = ", ".join(node.name for node in running)
        was = "was" if len(running) == 1 else "were"
        if failed is not None:
            reason = f"{failed.name} ended with status {failed.status}"
            reason += f"; {left} still ran {_GRACE_S:.0f} s later and {was} terminated" if awaited else ""
            return failed.status or 1, reason
        if awaited:
            return TIME_LIMIT_STATUS, f"stopped at the time limit of {limit_s:g} s: {left} still ran"
        return 0, f"all succeeded; {left} {was} then terminated" if running else "all succeeded"

    def _now_s(self) -> float:
        return (time.monotonic_ns() - self._started_ns) / 1e9

    def _wait(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(max(0.0, timeout_s)):
            if key.data is not None:
                key.data()
            else:  # a program has ended
                self._selector.unregister(key.fileobj)
                if isinstance(key.fileobj, int):
                    os.close(key.fileobj)

    def _reap(self) -> None:
        for worker in list(self._workers):
            process, node, number = worker
            if (status := self._poll(process)) is not None:
                self._workers.remove(worker)
                with contextlib.suppress(OSError):  # its agent has ended
                    assert node.channel is not None
                    node.channel.send(json.dumps({"number": number, "status": status}).encode())
        for node in self._nodes:
            if node.status is None and (status := self._poll(node.process)) is not None:
                node.status = shell_status(status)
                node.ended_ns = node.ended_ns or time.monotonic_ns() - self._started_ns
                self._read(node)

    def _poll(self, process: Any) -> int | None:
        """Return a process's status once it has ended; this closes its descriptor and frees its number."""
        status: int | None = process.poll()
        if status is not None and any(key.fileobj is process for key in self._selector.get_map().values()):
            self._selector.unregister(process)  # it ended after the last check
        return status

    def _drain(self) -> None:
        """Read the programs' last output, without waiting for daemons that hold a pipe open."""
        until_s = self._now_s() + _DRAIN_S
        while self._now_s() < until_s and self._selector.get_map():
            self._wait(until_s - self._now_s())
        for node in self._nodes:
            if node.partial:
                self._line(node, node.partial)
                node.partial = b""

    def _read(self, node: _Node) -> None:
        while True:
            try:
                data = os.read(node.output, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                if node.output in self._selector.get_map():
                    self._selector.unregister(node.output)
                return
            *lines, node.partial = (node.partial + data).split(b"\n")
            for line in lines:
                self._line(node, line)

    def _line(self, node: _Node, line: bytes) -> None:
        at_ns = time.monotonic_ns() - self._started_ns
        text = line.decode(errors="replace").rstrip("\r")
        plain = without_colours(text)
        node.last_words.append(plain)
        node.log.write(f"{at_ns / 1e9:.9f} {text}\n")
        if self._pattern is not None and self._pattern.search(plain):
            node.steps_ns.append(at_ns)
        prefix = f"{node.name} {at_ns / 1e9:9.3f} |"
        if self._order.coloured:
            prefix = f"\x1b[{_COLOURS[node.index % len(_COLOURS)]}m{prefix}\x1b[0m"
        sys.stdout.write(f"{prefix} {printable_line(text)}\n")
        sys.stdout.flush()

    # -------------------------------------------------------------- the end
    def end(self) -> list[NodeOutcome]:
        """Terminate the remaining programs, and return the outcome of every node's program."""
        left = {node.index: _processes_in(node.namespace.fd) for node in self._nodes}
        self._reap()
        terminated = {node.index for node in self._nodes if node.status is None}
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [pid for node in self._nodes for pid in _processes_in(node.namespace.fd)]
            if not running:
                break
            for pid in running:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            until_s = time.monotonic() + _END_S
            while time.monotonic() < until_s and any(_processes_in(node.namespace.fd) for node in self._nodes):
                self._wait(0.05)
                self._reap()
        now_ns = time.monotonic_ns() - self._started_ns
        outcomes = []
        for node in self._nodes:
            node.log.close()
            node.hostname.close()
            outcomes.append(
                NodeOutcome(
                    name=node.name,
                    address=node.address,
                    command=node.command,
                    status=None if node.index in terminated else node.status,
                    ended_ns=now_ns if node.ended_ns is None else node.ended_ns,
                    steps_ns=tuple(node.steps_ns),
                    last_words=tuple(node.last_words),
                    left=tuple(name for pid, name in left[node.index].items() if pid != node.process.pid),
                )
            )
        forks.close()
        return outcomes


def _processes_in(namespace: int) -> dict[int, str]:
    """Return the names of the processes in a network namespace, by pid, except this one."""
    wanted = os.fstat(namespace)
    names = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            about = (entry / "ns" / "net").stat()
            if (about.st_dev, about.st_ino) == (wanted.st_dev, wanted.st_ino):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    names[int(entry.name)] = (entry / "comm").read_text().strip()
        except OSError:
            continue
    return names
