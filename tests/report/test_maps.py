"""Maps over rate and delay: from results to grids, and what is said of them."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import ResultsError
from testbed.report import experiments, maps, style
from testbed.report.maps import PAYS, Grid, stops_paying_bps
from tests.synthetic_grid import write_grid

pytestmark = pytest.mark.slow  # what they share takes seconds to make


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grid(tmp_path_factory.mktemp("results") / "grid")


def test_a_grid_for_each_device_slowest_first(played: Path) -> None:
    slow, quick = maps.grids(experiments.runs_frame(played))
    for grid, name in ((slow, "slow"), (quick, "quick")):
        assert grid.device == name
        assert grid.rates_bps == (5_000_000, 80_000_000, 1_000_000_000)
        assert grid.delays_s == pytest.approx((0.001, 0.05))
        assert list(grid.step_s) == ["fp32", "bf16", "int8"]
        assert all(times.shape == (2, 3) for times in grid.step_s.values())
    assert np.isnan(slow.step_s["int8"]).sum() == 1
    assert slow.mildest()[1, 0] == -1
    assert not np.isnan(quick.step_s["int8"]).any()


def test_smaller_payloads_pay_on_slow_links_and_the_baseline_is_enough_on_fast_ones(played: Path) -> None:
    slow, quick = maps.grids(experiments.runs_frame(played))
    assert quick.mildest()[0, 0] == 2
    assert slow.mildest()[0, 2] == 0
    assert (quick.speed_up("int8")[:, 0] > quick.speed_up("bf16")[:, 0]).all()
    assert np.nanmax(slow.speed_up("int8")) < np.nanmax(quick.speed_up("int8"))


@pytest.mark.parametrize("draw", [maps.draw_choice, maps.draw_speed_up, maps.draw_limits])
def test_every_device_has_a_panel_and_units_are_named(played: Path, draw) -> None:  # type: ignore[no-untyped-def]
    with style.applied():
        figure = draw(maps.grids(experiments.runs_frame(played)), "A finding", "how it was made")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["slow, against fp32", "quick, against fp32"]
    assert all("ms" in axes.get_xlabel() or "bit/s" in axes.get_xlabel() for axes in figure.axes)
    assert {"A finding", "how it was made"} <= {text.get_text() for text in figure.texts}


def test_a_sweep_without_a_grid_is_an_error(experiment: Path) -> None:
    with pytest.raises(ResultsError, match="no grid"):
        maps.grids(experiments.runs_frame(experiment))


def test_without_the_baseline_there_is_no_speed_up() -> None:
    grid = Grid("x", (1,), (0.1,), {"int8": np.ones((1, 1))})
    with pytest.raises(ResultsError, match="fp32"):
        grid.speed_up("int8")


@given(st.lists(st.floats(0.5, 20), min_size=2, max_size=10))
def test_up_to_the_limit_it_pays_and_beyond_it_no_longer(gains: list[float]) -> None:
    rates = [10.0**at for at in range(len(gains))]
    limit = stops_paying_bps(rates, gains)
    assert all(gain >= PAYS for rate, gain in zip(rates, gains, strict=True) if rate < limit)
    if 0 < limit < math.inf:
        beyond = [gain for rate, gain in zip(rates, gains, strict=True) if rate > limit]
        assert any(low <= limit <= high for low, high in pairwise(rates))
        assert not beyond or beyond[0] < PAYS
    assert (limit == math.inf) == all(gain >= PAYS for gain in gains)
    assert (limit == 0) == (gains[0] < PAYS)


def test_what_is_missing_is_left_out_of_a_limit() -> None:
    assert stops_paying_bps([1, 10, 100], [2, math.nan, 1]) == stops_paying_bps([1, 100], [2, 1])
    assert math.isnan(stops_paying_bps([1, 10], [math.nan, math.nan]))


def test_a_device_that_computes_in_bf16_is_compared_with_bf16(played: Path) -> None:
    frame = experiments.runs_frame(played)
    half = frame.assign(**{"compute.source": frame["compute.source"] + " in bf16"})
    for grid, plain in zip(maps.grids(half), maps.grids(frame), strict=True):
        assert (grid.baseline, list(grid.step_s)) == ("bf16", ["bf16", "int8"])
        np.testing.assert_array_equal(grid.speed_up("int8"), plain.step_s["bf16"] / plain.step_s["int8"])
        np.testing.assert_array_equal(grid.gain, grid.step_s["bf16"] / grid.best_s)


def test_links_on_which_tcp_slows_the_baseline_are_known(played: Path) -> None:
    frame = experiments.runs_frame(played)
    far = (frame.round_trip_s > 0.05) & (frame.codec == "fp32")
    slow = frame.assign(step_s=np.where(far, 2 * frame.ideal_step_s, frame.ideal_step_s))
    for grid in maps.grids(slow):
        assert grid.slowed.tolist() == [[False] * 3, [True] * 3]
