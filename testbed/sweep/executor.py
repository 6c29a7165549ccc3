"""Runs testbed programs in parallel, one per core, as many as memory allows: tasks in, results out.

`execute` runs them on this machine. A `Cluster` runs them on many (`ray_cluster`): same tasks, same results, in any
order.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

from testbed.errors import StageError, TestbedError
from testbed.process import failed, start_program
from testbed.training.memory_need import available_memory
from testbed.units import format_size

_SHARE = 0.9
"""Share of the memory available before the first task that all tasks may use together."""


class Task(NamedTuple):
    """A program to run: `python -m MODULE ARGUMENTS`. It writes its results to files."""

    name: str
    """Identifies the task within one call of `execute`."""
    module: str
    arguments: tuple[str, ...]
    memory_bytes: int
    """Predicted peak memory."""
    attempt: str
    """Purpose of the task, as in "cannot ATTEMPT"."""
    reads: tuple[Path, ...] = ()
    """All files that it reads, for machines that share no folder. Those among `arguments` are jobs in JSON."""
    writes: Path | None = None
    """Folder that it makes, for the same machines; None: its result is what it prints."""
    guest: bool = False
    """Whether it boots a guest, rather than load torch."""
    device_bytes: int = 0
    """Predicted peak memory on a device that tasks share."""


class TaskResult(NamedTuple):
    """Outcome of a task."""

    task: Task
    error: TestbedError | None
    """None on success. SpecError for a user error, otherwise StageError with the end of the task's stderr."""
    said: str
    """Its standard output."""
    node: str = ""
    """Name of the machine of a cluster where it ran."""


class Cluster(Protocol):
    """Machines that run tasks in place of this one."""

    @property
    def cores(self) -> int:
        """Number of cores of all machines."""
        ...

    def execute(
        self, tasks: Sequence[Task], *, note: Callable[[str], None], measured: bool = False
    ) -> Generator[TaskResult]:
        """Run tasks, like `executor.execute`. `measured`: only on machines of the kind that `machine` returned."""
        ...

    def machine(self, before: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
        """Choose the kind of machine that durations are measured on, that of `before` if there is one; describe it as
        `environment.describe_machine` does.
        """
        ...


@dataclass
class _Running:
    task: Task
    process: subprocess.Popen[bytes]
    errors: IO[bytes]
    said: bytearray = field(default_factory=bytearray)


def execute(
    tasks: Sequence[Task],
    *,
    at_once: int | None = None,
    note: Callable[[str], None] = lambda message: None,
    options: Mapping[str, Any] | None = None,
    available_bytes: Callable[[], int] | None = None,
    device_bytes: int = 0,
) -> Generator[TaskResult]:
    """Run tasks in processes, started in order; yield each result as its task ends.

    Engines that run tasks elsewhere replace this function: results must not depend on where, when or alongside which
    others a task runs, and tasks share nothing but files.

    `at_once`: maximum number in parallel; None: one per core that this process may use. Fewer run if their predicted
    memory exceeds what is available, on the host or, of `device_bytes`, on their device; `note` receives one message
    about that. `options` go to `process.start_program`.
    A task that dies loses only its own result. All tasks end when the iterator is closed, e.g. by Ctrl-C, and when the
    thread that runs it ends for any reason.
    """
    limit = at_once or len(os.sched_getaffinity(0))
    host_bytes = (available_bytes or available_memory)()
    available = {"memory_bytes": int(host_bytes * _SHARE), "device_bytes": int(device_bytes * _SHARE)}
    waiting, running = list(tasks), dict[int, _Running]()
    told = False
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        stack.callback(lambda: _end(running.values()))
        while waiting or running:
            while waiting and len(running) < limit:
                begun = [one.task for one in running.values()]
                if begun and (lack := _too_little(waiting[0], begun, available)):
                    if not told:
                        note(f"{lack}: fewer than {limit} run at once")
                        told = True
                    break
                one = _start(waiting.pop(0), options or {})
                assert one.process.stdout is not None
                running[one.process.pid] = one
                selector.register(one.process.stdout, selectors.EVENT_READ, one)
            for key, _ in selector.select():
                one = key.data
                if content := os.read(key.fd, 1 << 16):
                    one.said += content
                    continue
                selector.unregister(key.fileobj)
                result = _finished(one)
                del running[one.process.pid]
                yield result


def _too_little(task: Task, running: Sequence[Task], available: Mapping[str, int]) -> str:
    """Return which memory a task lacks beside others; empty if none. `available`: bytes, by field of tasks."""
    for name, kind in (("memory_bytes", "memory"), ("device_bytes", "the device's memory")):
        need, free = getattr(task, name), available[name] - sum(getattr(one, name) for one in running)
        if need > free:
            beside = f"but {len(running)} running tasks leave {format_size(max(0, free))}"
            return f"{task.name} is predicted to need {format_size(need)} of {kind}, {beside}"
    return ""


def _start(task: Task, options: Mapping[str, Any]) -> _Running:
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - a pipe could fill up and halt the program; closed at its end
    try:
        process = start_program(
            task.module,
            *task.arguments,
            attempt=task.attempt,
            **{**options, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors},
        )
    except BaseException:
        errors.close()
        raise
    return _Running(task, process, errors)


def _finished(one: _Running) -> TaskResult:
    """Wait for a process that has closed its output; return its outcome."""
    status = one.process.wait()
    assert one.process.stdout is not None
    one.process.stdout.close()
    with one.errors:
        words = os.pread(one.errors.fileno(), os.fstat(one.errors.fileno()).st_size, 0)
    error = failed(one.task.attempt, StageError, status, words) if status else None
    return TaskResult(one.task, error, one.said.decode(errors="replace"))


def _end(running: Any) -> None:
    for one in running:
        one.process.kill()
    for one in running:
        one.process.wait()
        one.process.stdout.close()
        one.errors.close()
