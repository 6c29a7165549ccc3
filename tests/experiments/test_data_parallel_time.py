"""data_parallel_time: what its live runs compare is the steady cycle."""

from __future__ import annotations

from pathlib import Path

from testbed.sweep import conduct, plan
from tests.commands import Command, module_beside

FOLDER = Command.shipped / "data_parallel_time"
CYCLES = 6


def test_live_runs_go_on_after_the_windows_have_grown(tmp_path: Path) -> None:
    experiment = plan.load_experiment("data_parallel_time")
    cells = conduct.make_agenda(experiment, "netem", plan.Choice(False, []), tmp_path, clock="virtual").cells
    with module_beside(FOLDER, "live") as live:
        for cell in (cell for cell in cells if not live.decides(cell)):
            training = cell.training
            assert training.warmup_steps >= live.settled_after(cell)
            assert training.steps == training.warmup_steps + CYCLES * cell.cycle + 1
