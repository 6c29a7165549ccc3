"""cost_of_failures: its formula is what its histories take, and its traces are histories."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from testbed.trace.check import check_trace
from testbed.trace.simulate import simulate, step_ends
from tests.commands import Command, module_beside

FOLDER = Command.shipped / "cost_of_failures"


@pytest.mark.parametrize("mtbf_s", [600, 3600])
def test_drawn_histories_take_as_long_as_the_formula_says(mtbf_s: float) -> None:
    with module_beside(FOLDER, "failures") as failures:
        costs = failures.Costs(7.0, 100.0, 160.0)
        every = failures.best_steps(costs, mtbf_s)
        interval_s = failures.daly_s(costs.checkpoint_s, mtbf_s)
        assert every * costs.step_s == pytest.approx(interval_s, rel=0.1)
        shares = []
        for seed in range(20):
            events = list(failures.history(costs, every, mtbf_s, seed, 100 * every))
            kept = every * sum(event.kind == "checkpoint" for event in events)
            assert kept == 100 * every
            shares.append(kept * costs.step_s / failures.seconds(events, costs))
        assert fmean(shares) == pytest.approx(failures.goodput(costs, every, mtbf_s), rel=0.03)


def test_a_trace_has_the_steps_and_transfers_of_its_history(tmp_path: Path) -> None:
    with module_beside(FOLDER, "failures") as failures:
        cell = failures.cell_of("pipeline", "int8", "cable")
        parts = [("steps", 3, 0.0), ("checkpoint", 0, 0.0), ("steps", 1, 0.0), ("pause", 0, 2.5), ("recovery", 0, 0.0)]
        events = [failures.Event(*each) for each in parts]
        trace = failures.trace_of(events, cell, "int8")
    check_trace(trace, "here")
    assert trace.steps == 3 + 1 + 1 + 1 + 1
    ends = step_ends(trace, simulate(trace), trace.steps)
    assert ends[5] - ends[4] == 2_500_000_000
    assert ends[6] - ends[5] == round(failures.REPLACED_S * 1e9)  # without a network a transfer takes no time
