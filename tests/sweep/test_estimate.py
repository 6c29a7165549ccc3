"""Predicted time: what earlier runs say goes before a model; the model's laws."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from testbed import devices, results
from testbed.records import Certificate, RunCertificates
from testbed.spec import Cell, Paced, recipe_of
from testbed.sweep import plan
from testbed.sweep.estimate import Estimator, on_this_machine
from tests.known import known
from tests.synthetic import ended

_T4 = devices.load_device("t4")


def one(timing: str = "played", **fields: Any) -> Cell:
    stated = {"codec": "int8", "profile": "cable", "timing": timing, **fields}
    overrides = [f"{name}={value}" for name, value in stated.items()]
    return plan.cells(plan.load_experiment("default"), "relay", overrides=overrides)[0]


def with_steps(cell: Cell, steps: int) -> Cell:
    return cell.model_copy(update={"training": cell.training.model_copy(update={"steps": steps})})


def paced(cell: Cell, forward_ms: float, **changes: Any) -> Cell:
    forward_ns = round(forward_ms * 1e6)
    compute = Paced(forward_ns=(forward_ns,), backward_ns=(2 * forward_ns,), update_ns=0, source="stated", **changes)
    return cell.model_copy(update={"compute": compute})


def earlier(folder: Path, cell: Cell, seconds: int, step_s: float, status: str = "ok") -> None:
    """A run that took so many seconds."""
    run = results.new_run(folder, cell)
    began = datetime(2026, 1, 1, tzinfo=UTC)
    after = Certificate(
        form="quick",
        engine="relay",
        taken_at=(began + timedelta(seconds=seconds - 3)).isoformat(timespec="seconds"),
        seconds=3.0,
        measurements=(),
        rejected=(),
    )
    results.write_json(run.folder / "certificate.json", RunCertificates(before=None, after=after))
    results.write_json(run.folder / "environment.json", {"taken_at": began.isoformat(timespec="seconds")})
    summary = ended(cell, status, steps=1, measured_steps=1, step_s=step_s)
    run.finish(summary)


def estimated(folder: Path, cell: Cell) -> tuple[float, str]:
    return known(Estimator(folder, lambda precision: _T4).estimate(cell))


def test_earlier_runs_of_the_cell_say_it_best_then_those_over_its_network(tmp_path: Path) -> None:
    cell = one()
    modelled, source = estimated(tmp_path, cell)
    assert source == "a model"
    assert modelled > 0
    earlier(tmp_path, one(codec="fp32"), 130, 2.0)
    assert estimated(tmp_path, cell) == (130, "runs over its network")
    assert estimated(tmp_path, with_steps(cell, 2 * cell.training.steps))[0] == 130 + 2.0 * cell.training.steps
    for seconds in (90, 94, 100):
        earlier(tmp_path, cell, seconds, 1.0)
    earlier(tmp_path, cell, 5, 1.0, status="failed")
    assert estimated(tmp_path, cell) == (94, "its own runs")
    assert estimated(tmp_path, one(**{"training.seed": 3}))[0] == pytest.approx((90 + 94 + 100) / 3)
    assert estimated(tmp_path, one(profile="lte"))[1] == "a model"


def test_a_folder_with_other_things_in_it_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "int8-cable-0000000000" / "run-1").mkdir(parents=True)
    (tmp_path / "int8-cable-0000000000" / "run-1" / "summary.json").write_text("{}", encoding="utf8")
    assert estimated(tmp_path, one())[1] == "a model"


def test_without_knowing_this_machine_only_a_paced_cell_can_be_modelled(tmp_path: Path) -> None:
    estimator = Estimator(tmp_path, None)
    assert estimator.estimate(one()) is None
    assert estimator.estimate(paced(one(), 20)) is not None


def test_a_played_run_costs_its_training_once_and_then_what_no_network_changes(tmp_path: Path) -> None:
    estimator = Estimator(tmp_path, lambda precision: _T4)
    cells = [one(profile=name).model_copy(update={"engine": "netem", "clock": "virtual"}) for name in ("cable", "lte")]
    assert estimator.estimate(cells[0]) == estimator.estimate(cells[1])
    assert 0 < estimator.training_s(recipe_of(cells[0])) < estimator.training_s(recipe_of(with_steps(cells[0], 80)))


def step_s(cell: Cell, folder: Path) -> float:
    """What one more step adds."""
    return estimated(folder, with_steps(cell, cell.training.steps + 1))[0] - estimated(folder, cell)[0]


def test_a_paced_step_over_a_link_that_does_not_matter_is_the_schedule(tmp_path: Path) -> None:
    for dilation in (1, 3):
        cell = paced(one(profile="datacenter"), 20, dilation=dilation)
        rounds = cell.pipeline.microbatches + cell.pipeline.stages - 1
        assert step_s(cell, tmp_path) == pytest.approx(dilation * rounds * 0.060)


def test_a_step_is_longer_over_a_slower_link_and_with_a_wider_codec(tmp_path: Path) -> None:
    profiles, codecs = ("datacenter", "consumer-80mbps", "cable"), ("int8", "bf16", "fp32")
    times = [
        [step_s(paced(one(profile=profile, codec=codec), 1), tmp_path) for codec in codecs] for profile in profiles
    ]
    assert all(a < b for one_link in times[1:] for a, b in itertools.pairwise(one_link))
    assert all(a < b for one_codec in zip(*times, strict=True) for a, b in itertools.pairwise(one_codec))


def test_a_paced_cell_that_asks_too_much_is_told_the_dilation_that_it_needs() -> None:
    slow, fast = (paced(one(timing="live"), ms) for ms in (10_000, 0.001))
    assert "set compute.dilation" not in on_this_machine(slow, _T4)
    needed = devices.needed_dilation(fast, _T4)
    assert needed > 1
    assert f"set compute.dilation={needed}" in on_this_machine(fast, _T4)
    enough = paced(one(timing="live"), 0.001, dilation=needed) if needed <= 1000 else slow
    assert "set compute.dilation" not in on_this_machine(enough, _T4)
