"""A forked program is what the same program, started by itself, would be; and nothing of it outlives who started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed import forks
from testbed.errors import StageError
from testbed.process import ROOT, start_program
from testbed.runtime.control_plane import host_environment
from tests.forked import is_gone
from tests.known import known

pytestmark = pytest.mark.slow  # the server loads torch

PROGRAM = "tests.forks_program"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test works in a folder of its own; a server that runs before does not know that folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def errors() -> Iterator[Any]:
    with tempfile.TemporaryFile() as file:
        yield file


def start(errors: Any, module: str, *arguments: str, env: dict[str, str] | None = None, **options: Any) -> Any:
    options |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": errors}
    environment = {**host_environment(), **(env or {})}
    return start_program(module, *arguments, attempt="try it", popen=forks.popen, env=environment, **options)


def test_it_has_what_it_was_given_and_nothing_else(errors: Any, tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as other:
        process = start(errors, PROGRAM, "show", "a", "b c", env={"OURS": "1"}, pass_fds=(one.fileno(), other.fileno()))
        kept = {one.fileno(), other.fileno()}
    said = json.loads(process.stdout.read())
    assert process.wait(20) == 0
    process.stdout.close()
    assert said["loaded"]
    assert said["arguments"] == ["a", "b c"]
    assert said["input"] == ""
    assert said["folder"] == str(tmp_path)
    assert str(tmp_path) not in said["path"], "only code that the user names is looked for there"
    assert said["environment"] == {**host_environment(), "OURS": "1"}
    assert set(said["fds"]) == {0, 1, 2, *kept}
    assert said["session"]
    assert said["net"] == str(Path("/proc/self/ns/net").readlink())
    errors.seek(0)
    assert errors.read() == b"said\n"


@pytest.mark.root
def test_an_environment_may_be_as_large_as_a_program_s(errors: Any) -> None:
    process = start(errors, PROGRAM, "show", env={f"OURS_{number}": "1" * 60_000 for number in range(8)})
    said = json.loads(process.stdout.read())
    process.stdout.close()
    assert process.wait(20) == 0
    assert sum(len(value) for name, value in said["environment"].items() if name.startswith("OURS")) == 480_000


def test_it_runs_inside_a_namespace_as_somebody_else(errors: Any) -> None:
    from testbed.net.kernel.namespace import Namespace

    with Namespace("ours") as namespace:
        process = start(errors, PROGRAM, "show", namespaces=[namespace.fd], user=12345, group=54321, extra_groups=[])
        output = process.stdout.read()
        process.stdout.close()
        inside = str(Path(f"/proc/self/fd/{namespace.fd}").readlink())
    if process.wait(20) != 0:  # the folder of this Python is root's own
        errors.seek(0)
        assert b"user 12345 may not read it; under sudo" in errors.read()
        return
    said = json.loads(output)
    assert said["net"] == inside != str(Path("/proc/self/ns/net").readlink())
    assert said["user"] == [12345] * 3
    assert said["groups"] == []


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('so it is')", 1, "so it is"),
        ("raise SpecError('not so')", 2, "not so"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV, ""),
    ],
)
def test_it_ends_as_it_would_by_itself(errors: Any, code: str, status: int, words: str) -> None:
    process = start(errors, PROGRAM, code)
    assert process.wait(20) == process.wait() == process.poll() == status
    process.stdout.close()
    errors.seek(0)
    assert words in errors.read().decode()


def test_what_is_imported_ahead_makes_no_folder_that_a_kill_would_leave(tmp_path: Path) -> None:
    watch = (
        "import sys\n"
        "made = []\n"
        "sys.addaudithook(lambda event, of: made.append(str(of[0])) if event == 'os.mkdir' else None)\n"
        "from testbed import forks\n"
        "forks.preload(['torch', 'torch._inductor.config', 'torch._dynamo'])\n"
        "print([path for path in made if path.startswith(sys.argv[1])], '/proc' in made)\n"
    )
    places = {**host_environment(), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", watch, str(tmp_path)]
    assert subprocess.check_output(command, env=places, cwd=ROOT, text=True) == "[] True\n"
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_waited_for_and_killed(errors: Any) -> None:
    process = start(errors, PROGRAM, "time.sleep(600)")
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(20) == -signal.SIGKILL
    process.kill()
    process.stdout.close()


def test_where_the_server_is_killed_so_is_the_program_and_the_next_has_another(errors: Any) -> None:
    process = start(errors, PROGRAM, "time.sleep(600)")
    first = known(forks.server())
    os.kill(first, signal.SIGKILL)
    assert process.wait(20) == -signal.SIGKILL
    assert is_gone(process.pid)
    process.stdout.close()
    last = start(errors, PROGRAM, "sys.exit(7)")
    assert last.wait(60) == 7
    last.stdout.close()
    assert forks.server() not in (None, first)


def test_a_server_that_cannot_load_says_why(errors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('a torch of somebody else')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(
        StageError, match=r"(?s)cannot start tests.forks_program: .* status 1: .*a torch of somebody else"
    ):
        start(errors, PROGRAM, "pass")
    forks.close()


CONTROLLER = """
import subprocess, sys, tempfile, time
from testbed import forks
from testbed.runtime.control_plane import host_environment
from testbed.process import start_program
process = start_program(
    "tests.forks_program", sys.argv[1], attempt="try it", popen=forks.popen, env=host_environment(),
    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=tempfile.TemporaryFile(),
)
print(process.pid, forks.server(), flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("killed", [True, False])
def test_nothing_outlives_who_started_it(killed: bool) -> None:
    command = [sys.executable, "-c", CONTROLLER, "time.sleep(600)", "600" if killed else "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}) as controller:
        pids = [int(word) for word in known(controller.stdout).readline().split()]
        if killed:
            controller.kill()
    assert all(map(is_gone, pids))
