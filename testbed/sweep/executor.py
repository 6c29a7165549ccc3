"""Run programs of ours side by side, one per core, as many as memory allows: tasks in, results out.

`execute` is the one place that decides where tasks run. An engine for a cluster stands in its place: same tasks, same
results, in any order.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

from testbed.errors import StageError, TestbedError
from testbed.pipeline.memory import available_memory
from testbed.process import failed, start_program
from testbed.units import format_size

_SHARE = 0.9
"""Of the memory that is available before the first task starts, what tasks may take."""


class Task(NamedTuple):
    """A program to be run: `python -m MODULE ARGUMENTS`. What it makes, it leaves in files."""

    name: str
    """Names the task among those of one call."""
    module: str
    arguments: tuple[str, ...]
    memory_bytes: int
    """What it is predicted to need at most."""
    attempt: str
    """What it is for, as in "cannot ATTEMPT"."""


class TaskResult(NamedTuple):
    """How a task ended."""

    task: Task
    error: TestbedError | None
    """None: it ended well. SpecError where the user can mend it, else StageError with its last words."""
    said: str
    """What it printed."""


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
) -> Generator[TaskResult]:
    """Run tasks in processes, started in their order; yields each one's result as it ends.

    This is the seam for engines that run tasks elsewhere: what they compute must not depend on where, when or beside
    what they ran, and nothing is shared but files.

    `at_once`: how many at most; None: one per core that this process may use. Fewer run where predicted memory does
    not fit into what is available, which `note` is told once. `options` go to
    `process.start_program`. A task that dies costs its own result only. All end when the iterator is closed, by
    Ctrl-C for instance, and when the thread that runs it ends, however that happens.
    """
    limit = at_once or len(os.sched_getaffinity(0))
    memory_bytes = int((available_bytes or available_memory)() * _SHARE)
    waiting, running = list(tasks), dict[int, _Running]()
    told = False
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        stack.callback(lambda: _end(running.values()))
        while waiting or running:
            while waiting and len(running) < limit:
                free = memory_bytes - sum(one.task.memory_bytes for one in running.values())
                if running and waiting[0].memory_bytes > free:
                    if not told:
                        note(_too_little(waiting[0], len(running), limit, free))
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


def _too_little(task: Task, running: int, limit: int, free: int) -> str:
    return (
        f"{task.name} needs {format_size(task.memory_bytes)} of memory as predicted, and {format_size(max(0, free))} "
        f"are left beside {running} that run: fewer than {limit} run at once"
    )


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
    """Wait for a process that has closed its output, and say how it ended."""
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
