"""The command line as its user meets it: one message for a mistake, the nearest name, status 2, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed import profiles
from testbed.cli import make_app
from testbed.codecs.catalogue.table import CODECS
from testbed.commands.lab import readiness
from testbed.errors import UserError
from testbed.process import ROOT
from tests.commands import run_testbed


def _refused(folder: Path, *arguments: str, **environment: str) -> str:
    done = run_testbed(*arguments, folder=folder, **environment)
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    return done.stderr


def test_lists_are_complete(tmp_path: Path) -> None:
    listed = run_testbed("profiles", folder=tmp_path).stdout
    assert all(name in listed for name in profiles.profile_files())
    listed = run_testbed("codecs", folder=tmp_path).stdout
    assert all(name in listed for name in CODECS)
    rows = {line.split()[0]: line for line in listed.splitlines() if line}
    for name, row in CODECS.items():  # one line each, whole, however long its formula is
        assert all(said in rows[name] for said in (row.size, row.state, row.summary, row.source))


@pytest.mark.slow
def test_a_codec_is_shown_with_its_parameters_and_what_its_code_says(tmp_path: Path) -> None:
    for name, entry in CODECS.items():
        shown = CliRunner().invoke(make_app(), ["codecs", "show", name])
        assert shown.exit_code == 0, shown.output
        assert all(one.name in shown.output for one in entry.parameters)
        assert entry.forward in shown.output
    shown = CliRunner().invoke(make_app(), ["codecs", "show", "1: fwd=int8(),bwd=bf16; rest: fp32"])
    assert "1: fwd=int8, bwd=bf16; rest: fp32: about 32 bits per element" in shown.output
    assert "did you mean 'int8'?" in _refused(tmp_path, "codecs", "show", "int9")


@pytest.mark.slow
def test_a_slip_of_the_pen_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    assert "'sweep'" in _refused(tmp_path, "swep")
    assert "--quick" in _refused(tmp_path, "sweep", "--qick")
    assert "did you mean 'cable'?" in _refused(tmp_path, "link", "cabel")
    assert "did you mean 'relay'?" in _refused(tmp_path, "plan", "--engine", "rely")
    assert "did you mean 'default'?" in _refused(tmp_path, "plan", "defautl")


@pytest.mark.slow
def test_what_would_be_ignored_or_lost_at_the_end_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    durations = ROOT / "experiments" / "default" / "calibration.json"
    asked = ("--model", "gpt2-xl", "--device", "a100", "--nodes", 8, "--profile", "cable", "--batch", 512)
    for arguments, said in (
        (("record", "--host", "-o", "a.toml"), "omit -o"),
        (("reproduce", "topk_knee", "--device", "gpu"), "did you mean 'cpu'"),
        (("predict", "last_mile", "--results", tmp_path / "file"), "choose another with --results"),
        (("sweep", "default", "--calibration", durations, "--recalibrate"), "pass one of them"),
        (("report", tmp_path, "--output", "a.html", "--gantt", "b"), "pass one of them"),
        (("advise", *asked, "--toml", "plan.txt"), "ends in .toml"),
        (("link", "cable", "--clock", "virtual", "--engine", "bogus"), "another engine"),
        (("bench", "all", "--json", tmp_path), "is a directory"),
        (("bench", "clock", "-o", tmp_path / "file" / "a.csv"), "name another file"),
        (("bench", "links", "--compare", tmp_path / "none"), "does not exist"),
        (("trace", "import", tmp_path, "-o", "x"), "is a directory"),
    ):
        told = CliRunner().invoke(make_app(), list(map(str, arguments)))
        assert told.exit_code == 2 or isinstance(told.exception, UserError), (arguments, told)
        assert said in f"{told.output} {told.exception}", arguments


def test_what_is_not_there_yet_is_said_with_how_to_get_it(tmp_path: Path) -> None:
    assert "run a sweep first" in _refused(tmp_path, "report")


@pytest.mark.root
def test_a_user_who_cannot_read_the_program_is_told_so(tmp_path: Path) -> None:
    nobody = 65534
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    python = locked / "python"
    python.symlink_to(sys.executable)
    code = (
        f"import sys; sys.executable = {str(python)!r}; from testbed.cli import main; "
        "sys.argv[1:] = ['run', '--engine', 'relay', '--set', 'training.steps=5']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "SUDO_UID": str(nobody), "SUDO_GID": str(nobody), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert "must be able to read the checkout and its .venv" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("missing", "virtual_clock", "ready", "said"),
    [
        ([], True, True, "--clock auto chooses virtual"),
        ([], False, True, "--clock auto chooses real"),
        (["TUN device"], True, True, "live runs, link and lab lack: TUN device"),
        (["TUN device"], False, False, "not ready: TUN device"),
        (["the invoking user"], True, False, "not ready: the invoking user"),
    ],
)
def test_doctor_is_content_where_sweeps_can_be_played(
    missing: list[str], virtual_clock: bool, ready: bool, said: str
) -> None:
    verdict = readiness(missing, virtual_clock=virtual_clock)
    assert verdict[0] == ready
    assert said in verdict[1]
