"""`testbed lab` stands until it is told to go, and `testbed shell` enters it, as two people would use them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.net import directory
from tests.commands import run_testbed
from tests.known import known

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    folder = tmp_path_factory.mktemp("lab")
    process = subprocess.Popen(
        [sys.executable, "-m", "testbed", "lab", "cable", "--nodes", "2", "--engine", "relay"],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A shell that starts something in the background lets it ignore SIGINT, which would reach this one too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    seen = []
    for line in known(process.stdout):
        seen.append(line)
        if "open a shell" in line:
            break
    else:
        pytest.fail("".join(seen))
    yield process
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=10)
    assert "taken down" in told
    assert process.returncode == 0
    assert process.pid not in [one.pid for one in directory.running_labs()]


def _shell(
    lab: subprocess.Popen[str], folder: Path, *arguments: str, **options: str
) -> subprocess.CompletedProcess[str]:
    return run_testbed("shell", "--pid", str(lab.pid), *arguments, folder=folder, **options)


def test_without_a_node_the_labs_are_listed(lab: subprocess.Popen[str], tmp_path: Path) -> None:
    listed = _shell(lab, tmp_path).stdout
    assert str(lab.pid) in listed
    assert "hub node-0 node-1" in listed


def test_a_command_runs_inside_and_its_exit_status_is_kept(lab: subprocess.Popen[str], tmp_path: Path) -> None:
    done = _shell(lab, tmp_path, "node-1", "--", "ip", "-json", "address")
    addresses = [address["local"] for device in json.loads(done.stdout) for address in device["addr_info"]]
    assert "10.77.2.2" in addresses
    assert _shell(lab, tmp_path, "hub", "--", "sh", "-c", "exit 7").returncode == 7


def test_a_shell_is_the_user_s_own(lab: subprocess.Popen[str], tmp_path: Path) -> None:
    (own := tmp_path / "shell").write_text("#!/bin/sh\nip -brief address; exit 3\n", encoding="utf8")
    own.chmod(0o755)
    done = _shell(lab, tmp_path, "node-0", SHELL=str(own))
    assert "10.77.1.2" in done.stdout
    assert done.returncode == 3


def test_where_no_lab_runs_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from testbed.commands import lab as commands
    from testbed.errors import UserError

    monkeypatch.setattr(directory, "running_labs", list)
    with pytest.raises(UserError, match="start one with: python -m testbed lab cable"):
        commands.shell()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("shell --pid {pid} nod-1 -- true", "did you mean 'node-1'?"),
        ("shell --pid {pid} node-0 -- no-such-program", "cannot run 'no-such-program'"),
        ("shell --pid 1 node-0", "no lab"),
        ("lab cable --topology ring --engine relay", "topology 'ring'"),
        ("lab cable --nodes 0 --engine relay", "nodes"),
        ("lab cabel --engine relay", "did you mean 'cable'?"),
    ],
)
def test_a_slip_is_answered_in_a_sentence(lab: subprocess.Popen[str], tmp_path: Path, words: str, message: str) -> None:
    done = run_testbed(*words.format(pid=lab.pid).split(), folder=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2, done
    assert message in done.stderr
    assert "Traceback" not in done.stderr
