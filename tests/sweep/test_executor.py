"""Tasks side by side: what becomes of each, how many run at once, and that nothing outlives whoever started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from testbed.errors import SpecError, StageError
from testbed.process import ROOT
from testbed.sweep.executor import Task, execute
from tests.forked import is_gone, is_running


def a_task(folder: Path, name: str, action: str = "nothing", memory_bytes: int = 1, device_bytes: int = 0) -> Task:
    arguments = (action, str(folder), name)
    return Task(name, "tests.sweep.task_program", arguments, memory_bytes, f"try {name}", device_bytes=device_bytes)


OPTIONS = {"cwd": ROOT}


def test_a_task_that_fails_costs_its_own_result_only(tmp_path: Path) -> None:
    actions = {"one": "nothing", "two": "refuse", "three": "crash", "four": "die", "five": "nothing"}
    tasks = [a_task(tmp_path, name, action) for name, action in actions.items()]
    results = list(execute(tasks, at_once=2, options=OPTIONS))
    errors = {result.task.name: result.error for result in results}
    assert errors.keys() == actions.keys()
    assert errors["one"] is errors["five"] is None
    assert isinstance(errors["two"], SpecError)
    assert str(errors["two"]) == "cannot try two: this cannot be"
    assert isinstance(errors["three"], StageError)
    assert str(errors["three"]).endswith("RuntimeError: a bug")
    assert "status -9 (SIGKILL)" in str(errors["four"])
    assert all(result.said == f"hello from {result.task.name}\n" for result in results)


def test_tasks_run_side_by_side(tmp_path: Path) -> None:
    tasks = [a_task(tmp_path, name, "meet") for name in ("one", "two")]
    assert [result.error for result in execute(tasks, at_once=2, options=OPTIONS)] == [None, None]


def test_fewer_run_at_once_where_memory_does_not_suffice(tmp_path: Path) -> None:
    notes: list[str] = []
    tasks = [a_task(tmp_path, name, memory_bytes=600) for name in ("one", "two", "three")]
    ended = execute(tasks, at_once=2, note=notes.append, options=OPTIONS, available_bytes=lambda: 1000)
    for number, result in enumerate(ended, 1):
        assert result.error is None
        assert len(list(tmp_path.glob("*.began"))) == number, "one at a time"
    assert len(notes) == 1
    assert "fewer than 2 run at once" in notes[0]
    alone = execute([a_task(tmp_path, "large", memory_bytes=10**15)], options=OPTIONS)
    assert [result.error for result in alone] == [None], "too large for any machine: it is tried alone"


def test_a_device_has_memory_of_its_own(tmp_path: Path) -> None:
    notes: list[str] = []
    tasks = [a_task(tmp_path, name, device_bytes=600) for name in ("one", "two")]
    tasks.append(a_task(tmp_path, "on the host"))
    ended = execute(tasks, at_once=3, note=notes.append, options=OPTIONS, device_bytes=1000)
    next(ended)
    assert len(list(tmp_path.glob("*.began"))) == 1, "tasks start in order"
    assert [result.error for result in ended] == [None, None]
    need = "two is predicted to need 600 B of the device's memory"
    assert notes == [f"{need}, but 1 running tasks leave 300 B: fewer than 3 run at once"]
    together = [a_task(tmp_path / "meeting", name, "meet", device_bytes=400) for name in ("one", "two")]
    (tmp_path / "meeting").mkdir()
    assert [result.error for result in execute(together, at_once=2, options=OPTIONS, device_bytes=1000)] == [None, None]


def test_closing_ends_all(tmp_path: Path) -> None:
    tasks = [a_task(tmp_path, "one"), a_task(tmp_path, "two", "sleep"), a_task(tmp_path, "three", "sleep")]
    with closing(execute(tasks, at_once=2, options=OPTIONS)) as results:
        next(results)
    assert not any(is_running(int(path.read_text() or 1)) for path in tmp_path.glob("t*.began"))
    assert not list(tmp_path.glob("t*.ended"))


_PROGRAM = """
import sys
from pathlib import Path
from tests.sweep.test_executor import OPTIONS, a_task, execute
tasks = [a_task(Path(sys.argv[1]), name, "sleep") for name in ("one", "two")]
for result in execute(tasks, at_once=2, options=OPTIONS): pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_program_ends_its_tasks(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as program:
        while len([path for path in tmp_path.glob("*.began") if path.read_text()]) < 2:
            time.sleep(0.02)
        os.kill(program.pid, number)
        program.wait(20)
    pids = [int(path.read_text()) for path in tmp_path.glob("*.began")]
    assert len(pids) == 2
    assert all(is_gone(pid, 5) for pid in pids)
