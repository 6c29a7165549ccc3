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

pytestmark = pytest.mark.root


def _testbed(*arguments: str, stdin: str = "", folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "testbed", *arguments],
        cwd=folder,
        env={**os.environ, **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


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
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
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
    return _testbed("shell", "--pid", str(lab.pid), *arguments, folder=folder, **options)


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
    done = _shell(lab, tmp_path, "node-0", stdin="ip -brief address; exit 3\n", SHELL="/bin/sh")
    assert "10.77.1.2" in done.stdout
    assert done.returncode == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nod-1", "--", "true"), "did you mean 'node-1'?"),
        (("node-0", "--", "no-such-program"), "cannot run 'no-such-program'"),
    ],
)
def test_a_slip_is_answered_with_what_there_is(
    lab: subprocess.Popen[str], tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    done = _shell(lab, tmp_path, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_where_no_lab_runs_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from testbed.commands import lab as commands
    from testbed.errors import UserError

    monkeypatch.setattr(directory, "running_labs", list)
    with pytest.raises(UserError, match="start one with: python -m testbed lab cable"):
        commands.shell()
    done = _testbed("shell", "--pid", "1", "node-0", folder=tmp_path)
    assert done.returncode == 2
    assert "no lab" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("cable", "--topology", "ring"), "topology 'ring'"),
        (("cable", "--nodes", "0"), "nodes"),
        (("cabel",), "did you mean 'cable'?"),
    ],
)
def test_a_lab_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = _testbed("lab", *arguments, "--engine", "relay", folder=tmp_path, XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2, done
    assert words in done.stderr
    assert "Traceback" not in done.stderr
