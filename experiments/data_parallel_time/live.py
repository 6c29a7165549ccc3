"""Set live runs on the real clock beside the same ones on the virtual clock: live.csv, decided.csv, estimates.csv.

sudo .venv/bin/testbed sweep data_parallel_time --clock real
python -m testbed sweep data_parallel_time --clock virtual
python experiments/data_parallel_time/live.py [--results results/data_parallel_time] [--output FOLDER]

The same steps of both runs are compared, those behind the warm-up: the median over their cycles of `staleness + 1`
steps, as in every summary, and the mean of all but the last step, which receives what is still under way. Where the
network decides what is learned, no step of one run is one of the other: there whole trainings are compared.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from estimates import Estimated, estimated

from testbed import csv_rows, results
from testbed.metrics.steps import align, measured
from testbed.metrics.wires import HEADER_BYTES
from testbed.records import Summary
from testbed.report import publishing
from testbed.results import Run
from testbed.spec import RINGS, Cell, DataParallelSpec
from testbed.sweep.bounded_steps import expected_messages, expected_step

HERE = Path(__file__).resolve().parent
_CUBIC = 0.4
"""Packets per cubed second by which cubic's window grows (C in RFC 9438, section 4.2)."""
_ALIKE = 0.1
"""How far two messages' sizes may be apart, as a share, if what was decided is to count as the same."""


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


class Decided(NamedTuple):
    """A cell on both clocks in which the network decides what is learned."""

    by: str
    """What the network decides: DeCo-SGD's choices, or which updates a server applies in a step."""
    network: str
    steps: int
    virtual_s: float
    """The whole training."""
    real_s: float
    apart: float
    """Of the real clock's from the virtual one's, as a share."""
    alike: float
    """The share of steps in which the deciding node had messages of the same workers, of about the same sizes."""
    bytes_apart: float
    """Of all its messages' payloads, as a share."""
    virtual_loss: float
    """After the last step, on the validation data."""
    real_loss: float
    bound: float | None
    overruns: float


def data_of(cell: Cell) -> DataParallelSpec:
    """Return how a cell's workers exchange: all of this experiment are data parallel."""
    assert cell.data is not None
    return cell.data


def _summary(run: Run) -> Summary:
    """Return what came of a run that ended well."""
    assert run.summary is not None
    return run.summary


def leads(cell: Cell) -> bool:
    """Say whether a node chooses for all by what it measures of the links."""
    return data_of(cell).deco is not None


def decides(cell: Cell) -> bool:
    """Say whether the network decides what is learned in a cell."""
    return leads(cell) or data_of(cell).arrivals is not None


def settled_after(cell: Cell) -> int:
    """Return about how many steps cubic needs to grow a window to all that may be under way on a connection, if slow
    start ended early. From then on TCP holds nothing back, and steps repeat.
    """
    data = data_of(cell)
    under_way = 1 if data.exchange in RINGS else max(data.staleness) + 1
    packets = max(expected_messages(cell)) * under_way / (cell.links[0].mtu - HEADER_BYTES)
    return math.ceil(math.cbrt(packets / _CUBIC) / expected_step(cell).seconds)


def steps_s(run: Run) -> list[float]:
    """Return how long each training step behind the warm-up took, in seconds."""
    steps = measured(align(run.all_steps()))
    return [step.seconds / run.cell.compute.dilation for step in steps]


def mean_step_s(run: Run) -> tuple[int, float]:
    """Return how many steps count, and their mean in seconds."""
    seconds = steps_s(run)[:-1]
    count = max(1, len(seconds) // run.cell.cycle) * run.cell.cycle
    return len(seconds[-count:]), mean(seconds[-count:])


def dropped(run: Run) -> int:
    """Return how many packets queues had no room for, all links together; what certified them is not counted."""
    samples = list(run.samples())
    counts = [sum(pipe.dropped_buffer for link in s.links.values() for pipe in link.values()) for s in samples]
    return counts[-1] - counts[0] if counts else 0


def compared(real: Run, virtual: Run) -> Compared:
    """Compare the two runs of a cell."""
    data, ours, theirs = data_of(real.cell), _summary(real), _summary(virtual)
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


def heard(run: Run) -> list[dict[int | None, int]]:
    """Return what the node that decides had in each step: payload bytes, by worker."""
    data = data_of(run.cell)
    node = data.workers if data.exchange == "star" else 0
    steps = [record for record in run.steps(node) if record.phase == "train"]
    return [{message.peer: message.payload_bytes for message in record.received} for record in steps]


def decided(real: Run, virtual: Run) -> Decided:
    """Compare the two runs of a cell in which the network decides."""
    data, ours, theirs = data_of(real.cell), _summary(real), _summary(virtual)
    assert ours.validation_loss is not None
    assert theirs.validation_loss is not None
    by = "DeCo-SGD"
    if (arrivals := data.arrivals) is not None:
        by = "a buffer of 1" if arrivals.period_s is None else f"a period of {arrivals.period_s:g} s"
    our_s, their_s = sum(steps_s(real)), sum(steps_s(virtual))
    our_messages, their_messages = heard(real), heard(virtual)
    our_bytes, their_bytes = (sum(sum(step.values()) for step in run) for run in (our_messages, their_messages))
    return Decided(
        by=by,
        network=real.cell.network,
        steps=real.cell.training.steps,
        virtual_s=their_s,
        real_s=our_s,
        apart=our_s / their_s - 1,
        alike=mean(map(_alike, our_messages, their_messages)),
        bytes_apart=our_bytes / their_bytes - 1,
        virtual_loss=theirs.validation_loss,
        real_loss=ours.validation_loss,
        bound=ours.bound,
        overruns=ours.overrun_share or 0.0,
    )


def _alike(ours: dict[int | None, int], theirs: dict[int | None, int]) -> bool:
    return ours.keys() == theirs.keys() and all(abs(ours[peer] / theirs[peer] - 1) <= _ALIKE for peer in ours)


def on_both_clocks(folder: Path) -> Iterator[dict[str, Run]]:
    """Yield by clock the newest good runs of each cell that has one on either."""
    newest: dict[str, dict[str, Run]] = {}
    for run in results.runs(folder):
        if run.summary is not None and run.summary.status == "ok":
            alike = run.cell.model_copy(update={"clock": "virtual", "engine": "netem"})
            newest.setdefault(alike.id, {})[run.cell.clock] = run
    return (runs for runs in newest.values() if len(runs) == 2)


def main() -> int:
    """Write the tables."""
    results_folder, output = publishing.folders(HERE.name, "Set live runs on both clocks side by side.")
    steps, trainings, estimates = list[Compared](), list[Decided](), list[Estimated]()
    for runs in on_both_clocks(results_folder):
        if decides(runs["real"].cell):
            trainings.append(decided(**runs))
            estimates += [estimated(run) for run in runs.values() if leads(run.cell)]
        else:
            steps.append(compared(**runs))
    for name, fields, rows in (
        ("live.csv", Compared._fields, steps),
        ("decided.csv", Decided._fields, trainings),
        ("estimates.csv", Estimated._fields, estimates),
    ):
        csv_rows.write_rows(output / name, fields, sorted(rows, key=lambda row: row[:5]), digits=6)
    return 0


if __name__ == "__main__":
    sys.exit(main())
