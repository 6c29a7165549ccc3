"""Compares the kernel, the formula and ns-3: `python -m tests.ns3.compare --python /root/ns3/v/bin/python`.

The job of each cell is played in the guest kernel on the virtual clock, computed over the pipe formula, and simulated
by ns-3 over the same topology, rates, delays, queues and headers. Writes the CSV, and prints it as a table.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from testbed.metrics.links import Pipes
from testbed.net.lab import LabSpec
from testbed.player.guests import play_jobs
from testbed.player.play_job import PlayJob
from testbed.trace.played import read_played
from testbed.trace.simulate import ideal_steps_ns, step_ends
from testbed.vm import find_clock_kernel
from tests.ns3.cells import Cell, cells, job_trace
from tests.ns3.describe import describe, play_in_ns3

STEPS = 12
LOSSY_STEPS, SEEDS, NS3_SEEDS = 24, 3, 8
FILE = Path(__file__).parents[2] / "experiments/clocks/ns3.csv"


def main() -> None:
    """Play every cell three times, in different ways, and write what they took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="python", help="a Python with the package ns3")
    parser.add_argument("--output", type=Path, default=FILE)
    asked = parser.parse_args()
    chosen = cells()
    ours = _play(chosen)
    theirs = _simulate(asked.python, chosen)
    rows = [
        _row(cell, kernel, _formula(cell), simulated)
        for cell, kernel, simulated in zip(chosen, ours, theirs, strict=True)
    ]
    with asked.output.open("w", encoding="utf8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")


def _play(chosen: list[Cell]) -> list[list[Any]]:
    """Play the cells in the guest; returns (step in ns, bytes sent again) of each seed."""
    with tempfile.TemporaryDirectory() as name:
        folder, jobs = Path(name), []
        for number, cell in enumerate(chosen):
            trace = job_trace(cell.job, LOSSY_STEPS if cell.lossy else STEPS)
            trace.write(file := folder / f"{number}.trace")
            lab = LabSpec(
                topology=cell.topology,
                profiles=(cell.profile,),
                nodes=len(trace.nodes),
                engine="netem",
                engine_reason="the virtual clock's",
            )
            jobs.append(
                [
                    PlayJob(trace=file, lab=lab, link_seed=seed, output=folder / f"{number}-{seed}")
                    for seed in range(SEEDS if cell.profile.by_chance else 1)
                ]
            )
        outcomes = iter(
            play_jobs([j for each in jobs for j in each], clock="virtual", folder=folder / "w", kernel=_clock_kernel())
        )
        plays: list[list[Any]] = []
        for cell, each in zip(chosen, jobs, strict=True):
            trace = job_trace(cell.job, LOSSY_STEPS if cell.lossy else STEPS)
            plays.append([])
            for job in each:
                assert (outcome := next(outcomes)).output is not None, outcome.error
                played = read_played(job.output)
                again = sum(state.bytes_retransmitted for state in played.sockets[-1]) / played.steps
                plays[-1].append((_step_ns(cell, list(step_ends(trace, played.lanes, played.steps))), again))
        return plays


def _clock_kernel() -> Any:
    kernel = find_clock_kernel()
    assert kernel is not None, "the guest kernel runs on x86-64 only"
    return kernel


def _step_ns(cell: Cell, ends: list[int]) -> float:
    """Return a step's duration: the last one's, or the mean where packets are lost, without two at the beginning."""
    steps = [after - before for before, after in pairwise([0, *ends])]
    return fmean(steps[2:]) if cell.lossy else steps[-1]


def _simulate(python: str, chosen: list[Cell]) -> list[list[Any]]:
    """Return (step in ns, timeouts per step) of each seed in ns-3."""
    plays = []
    for cell in chosen:
        trace = job_trace(cell.job, LOSSY_STEPS if cell.lossy else STEPS)
        seeds = range(1, 1 + (NS3_SEEDS if cell.profile.by_chance else 1))
        told = [describe(trace, cell.topology, cell.profile, seed=seed) for seed in seeds]
        plays.append([(_step_ns(cell, done["step_ends_ns"]), done["timeouts"]) for done in play_in_ns3(python, told)])
    return plays


def _formula(cell: Cell) -> float:
    """Return a step's duration in ns over the pipe formula, which knows neither loss nor windows."""
    trace = job_trace(cell.job, STEPS)
    return ideal_steps_ns(trace, Pipes(cell.topology, [cell.profile], len(trace.nodes)), STEPS)[-1]


def _row(cell: Cell, kernel: list[Any], formula_ns: float, simulated: list[Any]) -> dict[str, Any]:
    here, there = (fmean(step for step, _ in plays) for plays in (kernel, simulated))
    row: dict[str, Any] = {"links": cell.profile.name, "job": cell.job}
    row |= {"formula_ms": f"{formula_ns / 1e6:.3f}", "kernel_ms": f"{here / 1e6:.3f}", "ns3_ms": f"{there / 1e6:.3f}"}
    row |= {"kernel_to_ns3": _apart(here, there), "kernel_to_formula": _apart(here, formula_ns)}
    errors = [_error([step for step, _ in plays]) for plays in (kernel, simulated)]
    spread = 2 * sqrt(sum((error / mean) ** 2 for error, mean in zip(errors, (here, there), strict=True)))
    row |= {"uncertain_by": f"{spread:.2%}" if cell.profile.by_chance else ""}
    row |= {"kernel_again_kB": f"{fmean(again for _, again in kernel) / 1e3:.1f}"}
    row |= {"ns3_timeouts": f"{fmean(timeouts for _, timeouts in simulated):.1f}"}
    return row


def _apart(one: float, other: float) -> str:
    return f"{round(one / other - 1, 4) + 0.0:+.2%}"  # no -0.00 %


def _error(steps: list[float]) -> float:
    """Return the standard error of the mean of independent seeds."""
    return stdev(steps) / sqrt(len(steps)) if len(steps) > 1 else 0.0


if __name__ == "__main__":
    main()
