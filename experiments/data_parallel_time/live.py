"""Set live runs on the real clock beside the same ones on the virtual clock: writes live.csv.

sudo .venv/bin/python -m testbed sweep data_parallel_time --clock real
python -m testbed sweep data_parallel_time --clock virtual
python experiments/data_parallel_time/live.py [--results results/data_parallel_time] [--output FOLDER]

The same steps of both runs are compared, those behind the warm-up: the median over their cycles of `staleness + 1`
steps, as in every summary, and the mean of all but the last step, which receives what is still under way.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from testbed import csv_rows, results
from testbed.metrics.steps import align, measured
from testbed.metrics.wires import HEADER_BYTES
from testbed.report import experiments
from testbed.results import Run
from testbed.spec import RINGS, Cell
from testbed.sweep.bounded_steps import expected_messages, expected_step

HERE = Path(__file__).resolve().parent
_CUBIC = 0.4
"""Packets per cubed second by which cubic's window grows (C in RFC 9438, section 4.2)."""


class Compared(NamedTuple):
    """A cell on both clocks."""

    exchange: str
    workers: int
    staleness: int
    network: str
    steps: int
    """Whose mean is compared."""
    virtual_s: float
    """A step in the steady state: the median over cycles."""
    real_s: float
    apart: float
    """Of the real clock's from the virtual one's, as a share."""
    mean_apart: float
    """The same of the means of all these steps."""
    same_losses: bool
    bound: float | None
    """How much what was found wrong with the real links changes a step, at most, as a share."""
    overruns: float
    """The share of actions that this machine could not make in the device's time."""
    dropped: int
    """Packets that did not fit into a queue, on the real clock."""


def settled_after(cell: Cell) -> int:
    """Return about how many steps cubic needs to grow a window to all that may be under way on a connection, if slow
    start ended early. From then on TCP holds nothing back, and steps repeat.
    """
    data = cell.data
    assert data is not None
    under_way = 1 if data.exchange in RINGS else max(data.staleness) + 1
    packets = max(expected_messages(cell)) * under_way / (cell.links[0].mtu - HEADER_BYTES)
    return math.ceil(math.cbrt(packets / _CUBIC) / expected_step(cell).seconds)


def mean_step_s(run: Run) -> tuple[int, float]:
    """Return how many steps count, and their mean in seconds."""
    cell = run.cell
    seconds = [step.seconds for step in measured(align([run.steps(node) for node in range(cell.nodes)]))][:-1]
    count = max(1, len(seconds) // cell.cycle) * cell.cycle
    return len(seconds[-count:]), mean(seconds[-count:]) / cell.compute.dilation


def dropped(run: Run) -> int:
    """Return how many packets queues had no room for, all links together; what certified them is not counted."""
    samples = list(run.samples())
    counts = [sum(pipe.dropped_buffer for link in s.links.values() for pipe in link.values()) for s in samples]
    return counts[-1] - counts[0] if counts else 0


def compared(real: Run, virtual: Run) -> Compared:
    """Compare the two runs of a cell."""
    data, ours, theirs = real.cell.data, real.summary, virtual.summary
    assert data is not None
    assert ours is not None
    assert theirs is not None
    assert ours.step_s is not None
    assert theirs.step_s is not None
    (steps, our_mean_s), (_, their_mean_s) = mean_step_s(real), mean_step_s(virtual)
    return Compared(
        exchange=data.exchange,
        workers=data.workers,
        staleness=max(data.staleness),
        network=real.cell.network,
        steps=steps,
        virtual_s=theirs.step_s,
        real_s=ours.step_s,
        apart=ours.step_s / theirs.step_s - 1,
        mean_apart=our_mean_s / their_mean_s - 1,
        same_losses=ours.validation_loss == theirs.validation_loss,
        bound=ours.bound,
        overruns=ours.overrun_share or 0.0,
        dropped=dropped(real),
    )


def rows(folder: Path) -> list[Compared]:
    """Return a row for each cell that has a good run on either clock, of its newest ones."""
    newest: dict[str, dict[str, Run]] = {}
    for run in results.runs(folder):
        if run.summary is not None and run.summary.status == "ok":
            alike = run.cell.model_copy(update={"clock": "virtual", "engine": "netem"})
            newest.setdefault(alike.id, {})[run.cell.clock] = run
    return sorted(compared(**runs) for runs in newest.values() if len(runs) == 2)


def main() -> int:
    """Write live.csv."""
    results_folder, output = experiments.folders(HERE.name, "Set live runs on both clocks side by side.")
    csv_rows.write_rows(output / "live.csv", Compared._fields, rows(results_folder), digits=6)
    return 0


if __name__ == "__main__":
    sys.exit(main())
