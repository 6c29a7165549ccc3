"""A run that computed slower than its calibration is contended, whatever its links did."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.records import Duration, StageCosts, Summary
from tests.synthetic import Pipeline, lasting, profile, summed, train


def costs(pipeline: Pipeline, factor: float = 1.0) -> list[StageCosts]:
    """What the pretended pipeline takes, and `factor` times as long."""

    def scaled(ns: int) -> Duration:
        return lasting(round(ns * factor))

    last = pipeline.stages - 1
    codec = scaled(pipeline.codec_ns)
    return [
        StageCosts(
            forward=scaled(pipeline.forward_ns),
            backward=scaled(pipeline.backward_ns),
            clip=lasting(1),
            update=lasting(1),
            encode=({"forward": codec} if stage < last else {}) | ({"backward": codec} if stage else {}),
            decode=({"forward": codec} if stage else {}) | ({"backward": codec} if stage < last else {}),
        )
        for stage in range(pipeline.stages)
    ]


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
