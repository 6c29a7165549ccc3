"""Kill -9 of a process of a command leaves nothing, spoils nothing, and the same command completes (tests/chaos.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed.records import TrainingRecord
from testbed.results import Run, read_json
from tests import chaos
from tests.conftest import missing

KILLS = int(os.environ.get("TESTBED_KILLS", "4"))
"""How many commands are struck: each takes a minute."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("number", range(KILLS))
def test_a_kill_leaves_nothing_and_the_same_command_completes(number: int, tmp_path: Path) -> None:
    name = list(chaos.JOBS)[number % len(chaos.JOBS)]
    if why := [why for need in chaos.JOBS[name].needs if (why := missing(need))]:
        pytest.skip(f"{name}: {why[0]}")
    undisturbed = chaos.undisturbed_of(name, tmp_path / "undisturbed")
    struck = chaos.strike(name, number, undisturbed, tmp_path / "struck")
    print(struck)
    assert struck.faults == []


@pytest.mark.clock_kernel
def test_a_sweep_whose_training_is_killed_resumes_it_on_another_number_of_cores(tmp_path: Path) -> None:
    """`kill -9` of the command between two checkpoints: losses, bytes and weights are those of an undisturbed sweep."""
    name = "sweep with checkpoints"
    undisturbed = chaos.undisturbed_of(name, tmp_path / "undisturbed")
    with chaos.adopting():
        arena = chaos.Arena(name, tmp_path / "killed")
        process = arena.start()
        while not list(arena.work.glob("results/*/trained/.*.draft/checkpoint-14")):
            assert process.poll() is None, arena.said
        process.kill()
        process.wait()
        assert not arena.residue()
        again = arena.start(before=["taskset", "-c", str(min(os.sched_getaffinity(0)))])
        assert again.wait(chaos.PATIENCE_S) == 0, arena.said
        assert "resumes from its newest valid checkpoint" in arena.said
        assert arena.job.outcome(arena.work, arena.said) == undisturbed.outcome
        assert not [*arena.residue(), *arena.unfinished()]
    ours, theirs = (
        [read_json(path, TrainingRecord) for path in tmp_path.glob(f"{run}/work/results/*/trained/*/training.json")]
        for run in ("killed", "undisturbed")
    )
    assert [record.weights for record in ours] == [record.weights for record in theirs]
    assert all(record.resumed for record in ours)
    assert not list(arena.work.rglob("checkpoint-*"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("sweep live, relay", marks=pytest.mark.root),
        pytest.param("sweep live, virtual", marks=pytest.mark.clock_kernel),
    ],
)
def test_a_killed_live_run_resumes_with_the_losses_of_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    kept = ("--set", "training.checkpoint_every=4", "--set", "training.steps=24")
    with chaos.adopting():
        arena = chaos.Arena(name, tmp_path)
        process = arena.start(*kept)
        while not list(arena.work.glob("results/*/*/checkpoint-12")):
            assert process.poll() is None, arena.said
        process.kill()
        process.wait()
        assert not arena.residue()
        assert arena.start(*kept).wait(chaos.PATIENCE_S) == 0, arena.said
        assert "resumes from its newest valid checkpoint" in arena.said
        assert not list(arena.work.rglob("checkpoint-*"))
        (run,) = map(Run, arena.work.glob("results/*/*/run-1"))
        resumed, summary = run.all_steps(), run.summary
        assert arena.start(*kept, "--again").wait(chaos.PATIENCE_S) == 0, arena.said
        assert not arena.residue()
    assert run.summary != summary
    assert summary is not None
    begun = summary.resumed_at or 0
    assert begun >= 12
    assert summary.ended == "steps"
    for ours, theirs in zip(resumed, run.all_steps(), strict=True):
        losses = {(each.phase, each.step): each.loss for each in theirs if each.step >= begun}
        assert {(each.phase, each.step): each.loss for each in ours} == losses
