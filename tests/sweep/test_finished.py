"""A finished run proves itself: what is altered or half-written is named, believed by nobody, and made again."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed import export, results
from testbed.cli import make_app
from testbed.commands import sweep
from testbed.errors import ResultsError, UserError
from testbed.metrics.live_checks import checks
from testbed.report import collect, tables
from testbed.results import FINISHED_BY, Run, write_json
from testbed.sweep import conduct, plan
from testbed.sweep.environment import hold_folder, hold_machine
from tests.altered import ALTERATIONS
from tests.commands import PLAYED_EXPERIMENT, sets
from tests.known import known
from tests.synthetic import ENVIRONMENT, Pipeline, cell, pipe, profile, record_sweep, write_run

CELL, OTHER = cell("int8"), cell("int4", profile("other", pipe(20_000_000, 0)), steps=9)
_KEPT = tempfile.TemporaryDirectory()
"""Removed when the interpreter ends."""
FILES = (
    "cell.json",
    "environment.json",
    "lab.json",
    "certificate.json",
    "steps-0.jsonl",
    "steps-1.jsonl",
    "steps-2.jsonl",
    "counters.jsonl",
    "summary.json",
    "manifest.json",
)


@functools.cache
def pretended() -> Path:
    """Return a folder with a run of each of the two cells, made once."""
    folder = Path(_KEPT.name)
    for cores, (what, verdict) in enumerate(((CELL, "PASS"), (OTHER, "FAIL"))):  # no two files of theirs are equal
        run = write_run(folder, what, Pipeline(what.profiles[0]), verdict=verdict)
        summary = known(run.summary)
        write_json(run.folder / "environment.json", {**ENVIRONMENT, "cores": cores, FINISHED_BY: FILES[-1]})
        run.finish(summary)
    return record_sweep(folder, [CELL, OTHER])


def made(folder: Path, *, old: bool = False) -> tuple[Run, Run]:
    """Copies of these runs. `old`: as an older testbed left them, without a manifest."""
    shutil.copytree(pretended(), folder, dirs_exist_ok=True)
    pair = Run(folder / CELL.id / "run-1"), Run(folder / OTHER.id / "run-1")
    for run in pair if old else ():
        (run.folder / FILES[-1]).unlink()
        write_json(run.folder / "environment.json", ENVIRONMENT)
    return pair


def alter(folder: Path, name: str, alteration: str, *, old: bool = False) -> Run:
    """Alter a file of the run of CELL; return that run."""
    run, other = made(folder, old=old)
    ALTERATIONS[alteration](run.folder / name, other.folder / name)
    return run


def believed_by_nobody(folder: Path, run: Run) -> str:
    """Check that no reader uses a run; return what is said of it."""
    proof = run.proof
    assert not proof.sound
    assert results.finished_runs(folder, CELL.id) == []
    assert conduct.missing_runs((CELL,), plan.load_experiment("default"), folder) == (CELL,)
    shown = collect.read_runs(collect.latest(folder))
    assert [result.cell for result in shown if result.ok] == [OTHER]
    if proof.state == "altered":
        assert proof.why in " ".join(collect.left_out(folder))
        with pytest.raises(ResultsError):
            export.export(folder, "csv", folder / "exported")
    notes: list[str] = []
    results.set_aside(folder, [CELL.id, OTHER.id], notes.append)
    (note,) = notes
    assert f"{CELL.id}/run-1 is set aside as run-1.aside: {proof.why}" == note
    assert not run.folder.exists()
    assert run.folder.with_name("run-1.aside").is_dir()
    assert results.new_run(folder, CELL).folder == run.folder, "it is made again"
    return proof.why


@pytest.mark.parametrize("alteration", ALTERATIONS)
@pytest.mark.parametrize("name", FILES)
def test_every_alteration_of_every_file_is_named_and_not_believed(tmp_path: Path, name: str, alteration: str) -> None:
    run = alter(tmp_path, name, alteration)
    assert {path.name for path in run.folder.iterdir()} | {name} == set(FILES), "these are all files of a run"
    # Another run's manifest names the first of its files that differs.
    named = "cell.json" if (name, alteration) == ("manifest.json", "replaced by another's") else name
    assert named in believed_by_nobody(tmp_path, run)


@pytest.mark.parametrize(
    ("name", "alteration"),
    [
        ("cell.json", "replaced by another's"),
        ("summary.json", "replaced by another's"),
        ("certificate.json", "removed"),
        *((f"steps-{stage}.jsonl", how) for stage in range(3) for how in ("cut at a line", "emptied", "removed")),
    ],
)
def test_an_old_run_whose_files_disagree_is_not_believed(tmp_path: Path, name: str, alteration: str) -> None:
    run = alter(tmp_path, name, alteration, old=True)
    if alteration == "cut at a line":  # the last line is an evaluation, which a summary does not count
        ALTERATIONS[alteration](run.folder / name, run.folder)
    said = believed_by_nobody(tmp_path, run)
    assert name in said or "steps, but the records have" in said


def test_an_old_run_of_another_codec_is_not_believed(tmp_path: Path) -> None:
    run, _ = made(tmp_path, old=True)
    path = run.folder / "cell.json"
    path.write_text(path.read_text().replace('"codec": "int8"', '"codec": "int4"'), encoding="utf8")
    assert "cell.json is that of int4-" in believed_by_nobody(tmp_path, run)


def test_an_old_run_is_read_and_called_unverified(tmp_path: Path) -> None:
    run, _ = made(tmp_path, old=True)
    assert run.proof == ("unverified", "")
    assert results.finished_runs(tmp_path, CELL.id) == [run]
    caption = str(tables.terminal_table(collect.latest(tmp_path)).caption)
    assert f"{tables.NOTED} unverified: no manifest: all" in caption
    notes: list[str] = []
    results.set_aside(tmp_path, [CELL.id], notes.append)
    assert notes == []


def test_runs_to_be_made_anew_are_set_aside_and_come_back_unless_they_are_replaced(tmp_path: Path) -> None:
    links = Pipeline(CELL.profiles[0])
    kept, replaced = write_run(tmp_path, CELL, links), write_run(tmp_path, OTHER, links)
    before = kept.folder.stat().st_ino
    with contextlib.suppress(ResultsError), conduct.replacing(tmp_path) as anew:
        anew([CELL, OTHER])
        assert not list(results.runs(tmp_path))
        again = write_run(tmp_path, OTHER, links)
        anew([CELL, OTHER])  # as after tuning: what it made stays
        assert list(results.runs(tmp_path)) == [again]
        raise ResultsError("what was asked is refused")
    assert {run.folder for run in results.runs(tmp_path)} == {kept.folder, replaced.folder}
    assert kept.folder.stat().st_ino == before
    assert replaced.folder.with_name("run-1.aside").is_dir()


def test_a_run_that_was_killed_is_set_aside_and_one_that_failed_is_kept(tmp_path: Path) -> None:
    failed = write_run(tmp_path, CELL, Pipeline(CELL.profiles[0]), failure="stage 1: it failed")
    killed = results.new_run(tmp_path, CELL)
    assert (failed.proof.state, killed.proof.state, killed.summary) == ("verified", "unfinished", None)
    notes: list[str] = []
    results.set_aside(tmp_path, [CELL.id], notes.append)
    assert [note.partition(" ")[0] for note in notes] == [f"{CELL.id}/run-2"]
    assert [run.number for run in results.runs(tmp_path)] == [1]


def test_a_run_killed_before_its_cell_was_written_stops_no_report(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / CELL.id / "run-2").mkdir()
    assert [result.ok for result in collect.read_runs(collect.latest(tmp_path))] == [True, True]
    assert "cell.json" in " ".join(collect.left_out(tmp_path))


def test_only_numbered_folders_are_runs(tmp_path: Path) -> None:
    run, _ = made(tmp_path)
    for name in ("run-1.bak", "run-x", "run-", "run-1 copy", "run-²"):
        shutil.copytree(run.folder, run.folder.with_name(name))
    assert [each.folder for each in results.runs(tmp_path, CELL.id)] == [run.folder]
    assert results.new_run(tmp_path, CELL).number == 2


# ------------------------------------------------------------------ two sweeps, and what only reads
@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sweep.toml").write_text(PLAYED_EXPERIMENT, encoding="utf8")
    monkeypatch.chdir(tmp_path)
    return results.make_folder(tmp_path / "results" / "mine")


def test_a_sweep_that_is_refused_changes_nothing(experiment: Path) -> None:
    record_sweep(experiment, [CELL])
    before = {path: path.read_bytes() for path in experiment.iterdir()}
    with hold_folder(experiment):
        done = CliRunner().invoke(make_app(), ["sweep", "mine/sweep.toml", *sets("codec=int8")])
    assert isinstance(done.exception, UserError)
    assert "another testbed is making runs" in str(done.exception)
    (experiment / ".lock").unlink()
    assert {path: path.read_bytes() for path in experiment.iterdir()} == before


@pytest.mark.slow
def test_a_plan_needs_no_right_to_write(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, **more: mode != os.W_OK)
    done = CliRunner().invoke(make_app(), ["plan", "mine/sweep.toml"])
    assert done.exit_code == 0, done.output
    with pytest.raises(UserError, match="cannot write to the folder"):
        CliRunner().invoke(make_app(), ["sweep", "mine/sweep.toml"], catch_exceptions=False)


def test_a_measurement_waits_for_another_if_it_can_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, notes = hold_machine(), list[str]()
    first.__enter__()

    def note(message: str) -> None:
        notes.append(message)
        first.__exit__(None, None, None)  # only now: without waiting, the second one would have failed

    with hold_machine(note), pytest.raises(UserError, match="wait for it"), hold_machine():
        pass
    assert len(notes) == 1
    assert notes[0].endswith("waiting for it")


# ------------------------------------------------------------------ live checks
@pytest.mark.slow
@pytest.mark.parametrize(("error", "status"), [(0.0, 0), (0.5, 1)])
def test_a_sweep_whose_live_check_has_other_losses_fails(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, error: float, status: int
) -> None:
    monkeypatch.setattr(sweep, "_with_engine", lambda means, engine: means._replace(engine="relay", engine_reason="-"))
    flags = sets("codec_cost=host", "profile=consumer-80mbps", "training.steps=6")
    asked = plan.load_experiment("mine/sweep.toml")
    choice = plan.Choice(overrides=flags[1::2])
    agenda, _ = sweep._agenda(asked, choice, experiment, "", "", again=False)
    (twin,) = checks(agenda.cells, 1, "relay", {}, 1).values()
    for what, differs in ((agenda.cells[0], 0.0), (twin, error)):
        pipeline = Pipeline(what.profiles[0], stages=2, schedule="1f1b", in_flight=4)
        write_run(experiment, what, pipeline, error=differs)
    done = CliRunner().invoke(make_app(), ["sweep", "mine/sweep.toml", "--no-report", "--live-checks", "1", *flags])
    assert done.exit_code == status, done.output
    assert ("DIFFERENT LOSSES" in done.output) == (f"different losses live and played: {twin.id}" in done.output)
    assert ("DIFFERENT LOSSES" in done.output) == bool(error)
