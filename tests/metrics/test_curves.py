from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.metrics import LossPoint, align, bands, loss_curve, uncompressed_curve, validation_curve
from tests.synthetic import Pipeline, cell, profile, summed, train

curves = st.lists(
    st.dictionaries(st.integers(0, 20), st.floats(0, 10), max_size=12).map(
        lambda losses: [LossPoint(step, step / 2, losses[step]) for step in sorted(losses)]
    ),
    max_size=5,
)


@given(curves)
def test_a_band_reaches_from_the_least_to_the_greatest_loss_of_a_step(found: list[list[LossPoint]]) -> None:
    band = bands(found)
    assert band.curves == len(found)
    for step, *ends in zip(band.steps, band.low, band.median, band.high, strict=True):
        losses = [point.loss for curve in found for point in curve if point.step == step]
        assert len(losses) == len(found)
        assert ends == [min(losses), pytest.approx(median(losses)), max(losses)]


def test_evaluations_without_the_codec_have_a_curve_of_their_own() -> None:
    what = cell("int8", profile("unshaped"), training={"evaluate_uncompressed": True})
    stages = train(Pipeline(profile("unshaped")), what, error=0.2)
    validation, uncompressed = validation_curve(what, stages), uncompressed_curve(what, stages)
    assert [point.step for point in uncompressed] == [point.step for point in validation] == [4, 8]
    assert [point.seconds for point in uncompressed] == [point.seconds for point in validation]
    summary = summed(what, stages)
    assert (summary.validation_loss, summary.uncompressed_loss) == (validation[-1].loss, uncompressed[-1].loss)
    assert summary.validation_loss != summary.uncompressed_loss


def test_curves_leave_out_the_time_of_evaluations() -> None:
    what = cell("int8", profile("unshaped"), training={"evaluate_uncompressed": True})
    stages = train(Pipeline(profile("unshaped")), what)
    points, steps = loss_curve(what, stages), align(stages)
    assert [point.step for point in points] == list(range(8))
    assert points[-1].seconds == pytest.approx(sum(step.seconds for step in steps if step.phase == "train"))
    assert points[-1].seconds == validation_curve(what, stages)[-1].seconds
    summary = summed(what, stages)
    assert summary.wall_s > points[-1].seconds
    assert points[-1].loss == summary.train_loss
