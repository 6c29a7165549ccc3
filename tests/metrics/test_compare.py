from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.metrics import LossPoint, RunSteps, compare
from testbed.metrics.compare import paired, run_steps
from tests.synthetic import Pipeline, cell, pipe, profile, summed, train

some_runs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), unique=True)
"""The (seed, number) of each run."""


def run(
    level: float, *, seed: int = 0, number: int = 1, loss: float = 4.0, count: int = 40, wobble: float = 0.02
) -> RunSteps:
    """Make steps of about `level` seconds, and evaluations after 10 and 20 steps."""
    rng = np.random.default_rng((seed, number, round(level * 1e6)))
    seconds = tuple((level * np.exp(wobble * rng.normal(size=count))).tolist())
    validation = (LossPoint(10, 10 * level, loss + 1), LossPoint(20, 20 * level, loss))
    return RunSteps(seed, number, seconds, (), validation)


def test_one_pair_has_an_interval_from_its_steps() -> None:
    found = compare([run(0.5)], [run(1.0)])
    assert found.speed_up.value == pytest.approx(2, rel=0.02)
    assert found.speed_up.interval.holds(2.0)
    assert found.speed_up.interval.high / found.speed_up.interval.low < 1.05
    assert found.separable
    assert found.pairs == 1


@pytest.mark.parametrize("runs", [1, 3])
def test_what_differs_in_nothing_is_nearly_never_separable(runs: int) -> None:
    told = []
    for trial in range(40):
        ours, base = ([run(1.0, number=first + trial * 10 + k) for k in range(runs)] for first in (1, 1001))
        told.append(compare(ours, base))
    assert sum(one.separable for one in told) <= 5


def test_a_single_pair_must_differ_by_more_than_runs_of_one_cell_do() -> None:
    close, apart = (compare([run(level, wobble=1e-4)], [run(1.0, wobble=1e-4)]) for level in (0.98, 0.95))
    assert not close.speed_up.interval.holds(1.0)
    assert not close.separable
    assert apart.separable


def test_several_pairs_know_how_runs_differ() -> None:
    """The machine drifts by 10 % between repeats; each pair has its own ratio, and these agree."""
    drift = [1.0, 1.1, 1.2]
    ours, base = ([run(level * d, number=k, wobble=0.002) for k, d in enumerate(drift, 1)] for level in (0.8, 1.0))
    found = compare(ours, base)
    assert found.speed_up.n == found.pairs == 3
    assert found.speed_up.interval.holds(1.25)
    assert found.speed_up.interval.high - found.speed_up.interval.low < 0.02


@settings(max_examples=30, deadline=None)
@given(some_runs, some_runs)
def test_pairs_share_a_seed_and_nobody_is_in_two(ours: list[tuple[int, int]], base: list[tuple[int, int]]) -> None:
    first, second = ([run(1.0, seed=seed, number=number, count=3) for seed, number in side] for side in (ours, base))
    pairs = paired(first, second)
    assert all(one.seed == other.seed for one, other in pairs)
    for side, runs in zip(zip(*pairs, strict=True), (first, second), strict=False):
        names = [(one.seed, one.number) for one in side]
        assert len(set(names)) == len(names)
        assert set(names) <= {(one.seed, one.number) for one in runs}
    assert len(pairs) == sum(min(sum(s == seed for s, _ in ours), sum(s == seed for s, _ in base)) for seed in range(4))
    assert compare(first, second).pairs == len(pairs)


def test_a_repeated_run_is_paired_in_its_place() -> None:
    """run-1 failed and is missing here; the run made in its place is the second one."""
    pairs = paired([run(1.0, number=n) for n in (3, 2)], [run(1.0, number=n) for n in (1, 2)])
    assert [(one.number, other.number) for one, other in pairs] == [(2, 1), (3, 2)]


def test_losses_are_paired_by_seed() -> None:
    """Seeds differ by 0.5, the codec costs 0.01 or a little more: only pairs can tell."""
    base = [run(1.0, seed=seed, loss=4 + seed / 2) for seed in range(4)]
    ours = [run(1.0, seed=seed, loss=4 + seed / 2 + 0.01 + seed / 1000) for seed in range(4)]
    found = compare(ours, base)
    assert found.loss_difference.value == pytest.approx(0.0115)
    assert found.loss_difference.n == 4
    assert found.loss_separable
    assert not compare(base, base).loss_separable


def test_repeats_of_a_seed_are_one_observation_of_its_loss() -> None:
    ours, base = ([run(1.0, number=k, loss=loss) for k in (1, 2, 3)] for loss in (4.1, 4.0))
    found = compare(ours, base)
    assert found.pairs == 3
    assert (found.loss_difference.n, found.loss_difference.interval) == (1, None)
    assert found.loss_difference.value == pytest.approx(0.1)
    assert not found.loss_separable


def test_losses_are_taken_where_both_were_evaluated() -> None:
    short = run(1.0)
    short = short._replace(validation=short.validation[:1])
    found = compare([short], [run(1.0, loss=3.0)])
    assert found.loss_difference.value == pytest.approx(1.0)
    never = compare([short._replace(validation=())], [run(1.0)])
    assert never.loss_difference is None
    assert not never.loss_separable


def test_without_pairs_there_are_no_numbers() -> None:
    found = compare([run(1.0, seed=1)], [run(1.0, seed=2)])
    assert found.speed_up is found.loss_difference is None
    assert (found.separable, found.pairs) == (False, 0)
    assert compare([run(1.0)._replace(seconds=())], [run(1.0)]).speed_up is None


def test_a_run_is_read_from_its_records() -> None:
    link = profile("slow", pipe(40_000_000, 5_000_000), pipe(80_000_000, 5_000_000))
    what = cell("int8", link, steps=20, training={"seed": 3})
    stages = train(Pipeline(link, jitter=0.3), what)
    found = run_steps(what, 2, stages)
    summary = summed(what, stages)
    assert (found.seed, found.number, len(found.seconds)) == (3, 2, summary.measured_steps)
    assert np.median(found.seconds) == summary.step_s
    assert found.validation[-1].loss == summary.validation_loss
    assert found.train[-1].loss == summary.train_loss
