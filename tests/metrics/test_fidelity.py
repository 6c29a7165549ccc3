"""When a played run stands for the live one: each of the four conditions is needed."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.metrics.fidelity import STEP_TIME, WIRE, Fidelity, compare_timings
from testbed.records import StepRecord, Summary
from tests import synthetic


@pytest.fixture(scope="module")
def run() -> tuple[Summary, list[list[StepRecord]]]:
    pipeline = synthetic.Pipeline(synthetic.profile(), stages=2, microbatches=2)
    stages = synthetic.train(pipeline, pipeline.cell)
    summary = synthetic.summed(pipeline.cell, stages)
    return summary.model_copy(update={"certificate": "PASS"}), stages


def against(run: tuple[Summary, list[list[StepRecord]]], **changes: Any) -> Fidelity:
    summary, stages = run
    return compare_timings(summary, stages, summary.model_copy(update=changes), stages)


def test_a_run_stands_for_itself(run: tuple[Summary, list[list[StepRecord]]]) -> None:
    one = against(run)
    assert one.holds
    assert (one.step_time, one.wire) == (0, 0)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("field", "tolerance"), [("step_s", STEP_TIME), ("wire_bytes_per_step", WIRE)])
def test_it_may_differ_by_the_tolerance_and_no_more(
    run: tuple[Summary, list[list[StepRecord]]], field: str, tolerance: float, sign: int
) -> None:
    value = getattr(run[0], field)
    assert against(run, **{field: value * (1 + sign * 0.99 * tolerance)}).holds
    assert not against(run, **{field: value * (1 + sign * 1.01 * tolerance)}).holds


def test_one_other_loss_is_enough(run: tuple[Summary, list[list[StepRecord]]]) -> None:
    summary, (first, last) = run
    place = max(number for number, step in enumerate(last) if step.phase == "train")
    loss = last[place].loss
    other = [*last[:place], last[place].model_copy(update={"loss": loss * (1 + 1e-15)}), *last[place + 1 :]]
    one = compare_timings(summary, [first, last], summary, [first, other])
    assert not one.same_losses
    assert not one.holds


@pytest.mark.parametrize("changes", [{"certificate": "FAIL"}, {"certificate": None}, {"step_s": None}])
def test_what_was_not_found_proves_nothing(
    run: tuple[Summary, list[list[StepRecord]]], changes: dict[str, Any]
) -> None:
    assert not against(run, **changes).holds


def test_without_links_there_is_nothing_on_the_wire_to_compare(run: tuple[Summary, list[list[StepRecord]]]) -> None:
    summary = run[0].model_copy(update={"wire_bytes_per_step": 0.0})
    one = compare_timings(summary, run[1], summary, run[1])
    assert one.wire is None
    assert one.holds
