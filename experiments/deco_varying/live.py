"""Set live runs beside the timeline that is played of them: writes live.csv.

python -m testbed sweep deco_varying --clock virtual --no-report
python experiments/deco_varying/live.py [--results results/deco_varying] [--output FOLDER]

Live, a model is trained in the guest, torch and TCP together. The timelines are those of DeCo-SGD over the same link
with messages of tensors of the same sizes, from the same moment on, and with a few bytes more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from timeline import DECO, WORKERS, Arm, Network, Step, timelines

from testbed import csv_rows, results
from testbed.nodes.leader import ratio_of
from testbed.policies.deco import DecoChoice
from testbed.results import Run
from testbed.spec import Cell, TextSpec
from testbed.workloads.build_stage import build_stage
from testbed.workloads.models import SIZES

HERE = Path(__file__).resolve().parent
DRAWS = 5


class Row(NamedTuple):
    """A line of live.csv: a step, live and in one draw of the timeline."""

    network: str
    draw: int
    step: int
    live_end_s: float
    """At worker 1, since the link began to vary."""
    played_end_s: float
    live_staleness: int
    """How many aggregates lacked when it began."""
    played_staleness: int
    live_bytes: int
    """Of worker 1's message, payload."""
    played_bytes: int
    runs: int
    """Of the cell."""
    same: bool
    """Whether all that the runs noted of the step is the same."""


def tensors_of(cell: Cell) -> tuple[int, ...]:
    """Return the sizes of the model's tensors."""
    assert isinstance(cell.workload, TextSpec)
    model = build_stage(cell.workload, stage=0, stages=1, seed=0, vocabulary=SIZES[cell.workload.model].vocabulary)
    return tuple(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def began_at_ns(run: Run) -> int:
    """Return when the link began to vary."""
    at_ns = run.lab.played_at_ns
    assert at_ns is not None
    return at_ns


def arm_of(run: Run) -> Arm:
    """Return the arm that a run is live."""
    cell, begins_ns = run.cell, run.steps(0)[0].start_ns - began_at_ns(run)
    assert cell.data is not None
    first = DecoChoice(cell.data.staleness[0], ratio_of(cell.codec))
    return Arm(DECO, Network(cell.network, tensors_of(cell)), first, cell.training.steps, begins_ns=begins_ns)


def rows(arm: Arm, draw: int, runs: Sequence[Run], timeline: Sequence[Step]) -> list[Row]:
    """Return a row for each step but the last, in which live workers wait for all that is under way."""
    every = [
        [[step for step in run.steps(worker) if step.phase == "train"] for worker in range(WORKERS)] for run in runs
    ]
    origin_ns, applied, made = began_at_ns(runs[0]), 0, list[Row]()
    for number, (live, step) in enumerate(zip(every[0][1][:-1], timeline, strict=False)):
        made.append(
            Row(
                network=arm.network.profile,
                draw=draw,
                step=number,
                live_end_s=(live.end_ns - origin_ns) / 1e9,
                played_end_s=step.end_ns / 1e9,
                live_staleness=number - applied,
                played_staleness=step.staleness,
                live_bytes=live.sent[0].payload_bytes,
                played_bytes=arm.network.message_bytes(step.ratio),
                runs=len(runs),
                same=all(
                    each[worker][number] == every[0][worker][number] for each in every for worker in range(WORKERS)
                ),
            )
        )
        applied += sum(action.kind == "A" for action in live.actions)
    return made


def main(asked: argparse.Namespace) -> None:
    """Write live.csv."""
    cells = [results.finished_runs(asked.results, each) for each in results.last_sweep(asked.results).cells]
    wanted = [
        (arm_of(runs[0]).drawn(draw), draw, runs) for runs in cells for draw in range(1 if asked.quick else DRAWS)
    ]
    every = timelines([arm for arm, _, _ in wanted])
    made = [row for each, steps in zip(wanted, every, strict=True) for row in rows(*each, steps)]
    csv_rows.write_rows(asked.output / "live.csv", Row._fields, made)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, HERE, results={"type": Path, "default": Path("results") / HERE.name})
