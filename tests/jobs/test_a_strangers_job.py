"""docs/jobs.md: its example runs as it stands there, as a reader would run it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testbed import results

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "jobs.md").read_text(encoding="utf8")


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with the page's two files."""
    home = tmp_path_factory.mktemp("stranger")
    (home / "my_job.py").write_text(block("python"), encoding="utf8")
    (home / "mine").mkdir()
    (home / "mine" / "sweep.toml").write_text(block("toml"), encoding="utf8")
    return home


def run_testbed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "testbed", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_its_plan_names_every_cell(folder: Path) -> None:
    planned = run_testbed(folder, "plan", "mine/sweep.toml")
    assert planned.returncode == 0, planned.stderr
    assert "3 nodes" in planned.stdout


@pytest.mark.slow
def test_an_unknown_kind_is_refused_by_name(folder: Path) -> None:
    refused = run_testbed(folder, "plan", "mine/sweep.toml", "--set", "job.kind=my_jobs:SplitLearning")
    assert refused.returncode == 2
    assert "cannot import my_jobs:SplitLearning" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.clock_kernel
def test_it_is_trained_once_per_codec_and_played_over_both_networks(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = run_testbed(folder, "sweep", "mine/sweep.toml", "--results", "results")
    assert swept.returncode == 0, swept.stderr
    home = folder / "results" / "mine"
    assert (home / "report.html").exists()
    assert len(list((home / "trained").iterdir())) == 2
    elsewhere = run_testbed(tmp_path, "report", str(home))
    assert elsewhere.returncode == 2
    assert "cannot import my_job:SplitLearning" in elsewhere.stderr, "no run is called altered because of that"
    monkeypatch.syspath_prepend(folder)
    steps: dict[tuple[str, str], float] = {}
    losses: dict[str, set[float]] = {}
    for name in results.last_sweep(home).cells:
        (run,) = results.finished_runs(home, name)
        stated = json.loads((run.folder / "cell.json").read_text(encoding="utf8"))
        summary = json.loads((run.folder / "summary.json").read_text(encoding="utf8"))
        assert summary["certificate"] == "PASS"
        assert 0.9 < summary["efficiency"] <= 1
        steps[stated["codec"], stated["profiles"][0]["name"]] = summary["step_s"]
        losses.setdefault(stated["codec"], set()).add(run.steps(2)[-1].loss or 0.0)
    assert all(len(seen) == 1 for seen in losses.values())
    assert all(steps["int8", network] < steps["fp32", network] for network in ("consumer-80mbps", "cable"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clock", "cost"),
    [
        pytest.param("virtual", "zero", marks=pytest.mark.clock_kernel),
        pytest.param("real", "host", marks=pytest.mark.root),
    ],
)
def test_live_it_is_the_same_training_and_as_long(
    folder: Path, clock: str, cost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    asked = block("toml").replace('codec_cost = "zero"', f'codec_cost = "{cost}"')
    asked = re.sub(
        r"(?<=\[axes\]\n)(.*\n)+", 'timing = ["played", "live"]\nprofile = ["cable"]\ncodec = ["int8"]\n', asked
    )
    (folder / clock).mkdir()
    (folder / clock / "sweep.toml").write_text(asked, encoding="utf8")
    swept = run_testbed(folder, "sweep", f"{clock}/sweep.toml", "--results", "results", "--clock", clock)
    assert swept.returncode == 0, swept.stderr
    home = folder / "results" / clock
    played, live = (results.finished_runs(home, name)[0] for name in results.last_sweep(home).cells)
    assert (played.cell.timing, live.cell.timing, live.cell.clock) == ("played", "live", clock)
    assert [step.loss for step in live.steps(2)] == [step.loss for step in played.steps(2)]
    assert len(live.steps(2)) == 5
    if clock == "virtual":  # on the real one a busy machine takes longer
        assert live.summary.step_s == pytest.approx(played.summary.step_s, rel=0.01)
