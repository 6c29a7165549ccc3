"""Bits of boundaries: the greedy search, and which widths training does not draw."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.policies.precision import greedy_path, total, withheld, within

WIDTHS = (8, 4, 2, 1)
COST = [{bits: float(bits) for bits in WIDTHS}] * 3


def harms(weights: tuple[float, ...]) -> list[dict[int, float]]:
    """Harm that falls fourfold with each bit, as a quantiser's squared error does."""
    return [{bits: weight * 4.0**-bits for bits in WIDTHS} for weight in weights]


@given(st.tuples(*[st.floats(0.01, 100.0)] * 3))
def test_a_greedy_path_falls_step_by_step_and_is_the_best_there_is_at_its_own_costs(
    weights: tuple[float, float, float],
) -> None:
    table = harms(weights)
    path = greedy_path(lambda widths: total(widths, table), COST)
    assert path[0] == (8,) * 3
    assert path[-1] == (1,) * 3
    for before, after in itertools.pairwise(path):
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
        assert total(after, COST) < total(before, COST)
    # Harm is convex in the bits, so no other setting of the same cost harms less.
    for widths in path:
        rivals = [other for other in itertools.product(WIDTHS, repeat=3) if total(other, COST) <= total(widths, COST)]
        assert total(widths, table) <= min(total(other, table) for other in rivals) * (1 + 1e-9)


def test_a_slow_link_gets_fewer_bits() -> None:
    table = harms((1.0, 1.0, 1.0))
    seconds = [{bits: bits / rate for bits in WIDTHS} for rate in (10.0, 1.0, 10.0)]
    path = greedy_path(lambda widths: total(widths, table), seconds)
    assert all(widths[1] == min(widths) for widths in path)
    assert (8, 4, 8) in path
    assert total(within(path, seconds, 3.0), seconds) <= 3.0


def test_a_budget_that_nothing_fits_and_a_cost_that_does_not_fall_are_refused() -> None:
    path = greedy_path(lambda widths: 0.0, COST)
    with pytest.raises(SpecError, match=r"budget of 2; the cheapest costs 3"):
        within(path, COST, 2.0)
    with pytest.raises(SpecError, match="fall with the bits"):
        greedy_path(lambda widths: 0.0, [{8: 1.0, 4: 1.0}])


def test_the_least_stable_boundaries_are_withheld_and_ever_fewer_of_them() -> None:
    errors = (0.1, 0.9, 0.5, 0.2)
    assert withheld(errors, 0.0) == {1, 2}
    assert withheld(errors, 1.0) == {1}
    sizes = [len(withheld(errors, progress / 10)) for progress in range(11)]
    assert sizes == sorted(sizes, reverse=True)
