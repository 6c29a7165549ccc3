"""Starting programs of ours: what they are told and answer, how they end, and what is said when they fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from testbed import process
from testbed.errors import CapabilityError, LabError, SpecError, StageError, TestbedError
from testbed.process import READABLE, ROOT, Child, run_program
from tests.forked import is_gone, is_running
from tests.known import known

PROGRAM = "tests.child_program"


def child(do: str, failure: type[TestbedError] = LabError, **request: Any) -> Child:
    return Child(PROGRAM, {"do": do, **request}, attempt="try it", failure=failure)


def test_a_child_answers_in_turn_whatever_it_prints_and_ends_with_its_input() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with child("answer", numbers=[1, 2.5], text="ü") as asked:
        surroundings = {"pid": asked.pid, "arguments": [], "folder": str(ROOT)}
        assert asked.answer() == {"do": "answer", "numbers": [1, 2.5], "text": "ü", **surroundings}
        assert asked.ask({"more": True}, "try more") == '{"more":true}'
        assert asked.last_answer(30) == "the last answer"
    assert not is_running(asked.pid)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_request_larger_than_a_pipe_arrives_whole() -> None:
    text = "0123456789" * 30_000
    with child("answer", text=text) as asked:
        assert asked.answer()["text"] == text


def test_what_a_child_writes_to_standard_error_never_halts_it() -> None:
    with child("chatter") as asked:
        assert asked.answer() == "done"


@pytest.mark.parametrize(
    ("do", "kind", "message"),
    [
        ("refuse", SpecError, r"^cannot try it: a reason$"),
        ("fail", StageError, r"^cannot try it: its process ended with status 1: a reason$"),
        (
            "crash",
            StageError,
            r"(?s)^cannot try it: its process .* 1: Traceback.*RuntimeError: a reason$",
        ),
        ("die", StageError, r"^cannot try it: its process ended with status -9 \(SIGKILL\): no message$"),
        ("stop short", StageError, r"^cannot try it: its process ended with status -9 \(SIGKILL\): no message$"),
    ],
)
def test_the_end_of_a_child_is_an_error_that_says_why(do: str, kind: type[Exception], message: str) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with child(do, StageError, why="a reason") as asked:
        for _ in range(2):  # whoever asks again is told the same
            with pytest.raises(kind, match=message):
                asked.answer()
        with pytest.raises(kind, match=message.replace("try it", "try again")):
            asked.ask({}, "try again")
    with pytest.raises(kind, match=message):
        process.ask(PROGRAM, {"do": do, "why": "a reason"}, attempt="try it", failure=StageError)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_a_child_that_takes_too_long_is_killed() -> None:
    with child("sleep") as asked:
        asked.answer()
        with pytest.raises(LabError, match=r"^cannot try it: its process did not end within 0 s$"):
            asked.last_answer(0.1)
    assert not is_running(asked.pid)


@pytest.mark.slow
def test_a_ctrl_c_while_an_answer_is_awaited_ends_the_child() -> None:
    """Half-built owners of a child have nothing to close yet, and the next question must not get the old answer."""
    before = set(Path("/proc/self/fd").iterdir())
    asked = child("sleep")
    asked.answer()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        asked.ask({}, "try again")
    timer.join()
    assert not is_running(asked.pid)
    with pytest.raises(LabError, match=r"^cannot try it: its process ended with status -9 \(SIGKILL\): no message$"):
        asked.answer()
    assert set(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.slow
def test_a_child_that_does_not_end_with_its_input_is_killed_when_it_is_closed() -> None:
    with child("sleep") as asked:
        asked.answer()
    assert not is_running(asked.pid)


A_CHILD = f"""
import time
from testbed.errors import LabError
from testbed.process import Child
asked = Child({PROGRAM!r}, {{"do": "sleep"}}, attempt="sleep", failure=LabError)
print(asked.pid, asked.answer(), flush=True)
time.sleep(60)
"""
A_CODEC = """
import time
from testbed.codecs.check.apart import Ends
with Ends(["fp32"]) as ends:
    print(ends.pids["decoder"], flush=True)
    time.sleep(60)
"""
"""It may never end: the kit's time limit dies with the kit."""


@pytest.mark.slow
@pytest.mark.parametrize("code", [A_CHILD, A_CODEC], ids=["a child", "a process that holds a codec"])
def test_what_was_started_dies_with_a_killed_parent(code: str) -> None:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT) as parent:
        pid = int(known(parent.stdout).readline().split()[0])
        parent.kill()
    assert is_gone(pid, 5)


A_FOLDER = """
import sys, time
from pathlib import Path
from testbed import paths
with paths.scratch_folder("held-", Path(sys.argv[1])) as folder:
    (folder / "inside").mkdir()
    (folder / "inside" / "file").write_text("something")
    print(folder, flush=True)
    if sys.argv[2] == "waits":
        time.sleep(60)
"""


@pytest.mark.parametrize("how", ["waits", "ends"])
def test_a_scratch_folder_goes_with_its_process_however_that_ends(how: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", A_FOLDER, str(tmp_path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        folder = Path(known(holder.stdout).readline().strip())
        if how == "waits":
            assert (folder / "inside" / "file").is_file()
            holder.kill()
    deadline = time.monotonic() + 20
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(tmp_path.iterdir()) == []
    assert holder.returncode == (-signal.SIGKILL if how == "waits" else 0)


def test_a_program_whose_parent_is_gone_does_not_begin() -> None:
    command = process.command_line(PROGRAM, parent=1)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, input='{"do":"chatter"}\n', check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "process 1, which started this one, is gone" in ended.stderr


def test_a_program_is_run_with_its_arguments_and_its_lines_are_returned(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": [1]}', encoding="utf8")
    assert run_program("json.tool", "--indent", "0", str(file), attempt="format it", failure=LabError) == [
        "{", '"a": [', "1", "]", "}",
    ]  # fmt: skip
    file.write_text("{", encoding="utf8")
    with pytest.raises(LabError, match=r"^cannot format it: its process ended with status 1: Expecting property name"):
        run_program("json.tool", str(file), attempt="format it", failure=LabError)
    with pytest.raises(SpecError, match=r"^cannot format it: usage: .*"):
        run_program("json.tool", "--indent", "x", attempt="format it", failure=LabError)


def test_children_are_started_from_the_main_thread_with_which_they_die() -> None:
    with ThreadPoolExecutor() as another, pytest.raises(AssertionError):
        another.submit(child, "answer").result()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (PermissionError(13, "Permission denied"), f"Permission denied; {READABLE}"),
        (OSError(12, "Cannot allocate memory"), "Cannot allocate memory"),
    ],
)
def test_a_program_that_cannot_be_started_says_why_and_what_to_do(error: OSError, says: str) -> None:
    def refuse(*_: object, **__: object) -> subprocess.Popen[bytes]:
        raise error

    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(CapabilityError) as raised:
        Child(PROGRAM, {}, attempt="try it", failure=LabError, popen=refuse)
    assert str(raised.value) == f"cannot try it: cannot start {sys.executable}: {says}"
    assert set(Path("/proc/self/fd").iterdir()) == before
