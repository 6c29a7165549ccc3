"""A run that computed slower than its calibration is contended, whatever its links did."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.records import StageCosts, Summary
from tests.synthetic import Pipeline, profile, stage_costs, summed, train


def costs(pipeline: Pipeline, factor: float = 1.0) -> list[StageCosts]:
    """What the pretended pipeline takes, and `factor` times as long. Its ends have a neighbour on one side."""
    scaled = {what: round(getattr(pipeline, what) * factor) for what in ("forward_ns", "backward_ns", "codec_ns")}
    middle = stage_costs(**scaled, clip_ns=1, update_ns=1)
    codec = middle.encode["forward"]
    first, last = (
        middle.model_copy(update={"encode": {there: codec}, "decode": {back: codec}, "decode_woken": {}})
        for there, back in (("forward", "backward"), ("backward", "forward"))
    )
    return [first, *[middle] * (pipeline.stages - 2), last]


def summary(factor: float = 1.0, *, calibrated: bool = True, **changes: Any) -> Summary:
    pipeline = Pipeline(profile("unshaped"), **changes)
    stages = train(pipeline, pipeline.cell)
    return summed(pipeline.cell, stages, costs=costs(pipeline, factor) if calibrated else None)


def test_a_run_that_takes_what_the_calibration_says_does_not_stray() -> None:
    assert summary().contended == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25])
def test_it_strays_by_as_much_as_it_takes_longer(factor: float) -> None:
    assert summary(factor).contended == pytest.approx(1 / factor - 1, rel=0.01)


def test_nothing_is_said_without_a_calibration_or_where_the_machine_does_not_decide() -> None:
    assert summary(calibrated=False).contended is None
    assert summary(paced=True).contended is None
