"""Play the beginning of some timelines in the guest: `python experiments/deco_varying/play.py`.

timeline.py is a model; here real TCP carries messages of the same sizes over the same links, on the virtual clock. This
reads timeline.csv and writes played.csv: when each step ended.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pandas
from timeline import COMPUTE_NS, NETWORKS, WORKERS, Network
from train import DECO, HERE

from testbed import csv_rows
from testbed.errors import LabError, UserError
from testbed.net.lab import LabSpec
from testbed.pipeline.frame import HEADER_BYTES
from testbed.play.data_parallel import LaneLabels, make_lanes
from testbed.play.guests import play_jobs
from testbed.play.job import PlayJob
from testbed.play.played import read_played
from testbed.play.trace import WORK, Trace
from testbed.vm import find_clock_kernel

STEPS = 60
LABELS = ("compute", "gradient", "aggregate")
ARMS = (DECO, "static (0.01, 1)")


class PlayedLine(NamedTuple):
    """A line of played.csv."""

    arm: str
    network: str
    step: int
    end_s: float
    """At worker 1."""


def trace_of(network: Network, rows: list[tuple[float, int]]) -> Trace:
    """Return the trace of workers that go by (ratio, staleness), a row per step; one more row says what follows."""

    def frames(step: int) -> list[int]:
        return [network.message_bytes(rows[step][0]) + HEADER_BYTES]

    workers = [make_lanes("all-to-all", worker, WORKERS, LaneLabels(1, 2), frames=frames) for worker in range(WORKERS)]
    last = len(rows) - 2
    for worker in workers:
        applied = 0
        for step in range(last + 1):
            worker.lane.add(WORK, label=0, value=COMPUTE_NS)
            worker.give(step)
            until = step + 1 if step == last else step + 1 - rows[step + 1][1]  # what was sent must be received
            for due in range(applied, until):
                worker.have(due)
            applied = max(applied, until)
            worker.end_step()
    lanes = tuple(lane for worker in workers for lane in worker.lanes())
    return Trace(tuple(f"worker {worker}" for worker in range(WORKERS)), LABELS, lanes, {"maker": HERE.name})


def main(arguments: list[str]) -> int:
    """Write played.csv."""
    asked = csv_rows.asked_of(arguments, __doc__, HERE)
    if (kernel := find_clock_kernel()) is None:
        raise UserError("there is no kernel with a virtual clock here; build it with: python -m testbed vm --build")
    steps, arms = (8, ARMS[:1]) if asked.quick else (STEPS, ARMS)
    frame = pandas.read_csv(asked.output / "timeline.csv")
    chosen = {
        (arm, name): [(row.ratio, row.staleness) for row in part.sort_values("step").itertuples()][: steps + 1]
        for (arm, name), part in frame.groupby(["arm", "network"])
        if arm in arms
    }
    made: list[PlayedLine] = []
    with tempfile.TemporaryDirectory(prefix="testbed-deco-") as aside:
        jobs, traces = [], []
        for number, ((_, name), rows) in enumerate(chosen.items()):
            traces.append(trace_of(NETWORKS[name], rows))
            traces[-1].write(path := Path(aside) / f"{number}.trace")
            lab = LabSpec(
                topology="line",
                profiles=(NETWORKS[name].link,),
                nodes=WORKERS,
                engine="netem",
                engine_reason="all that the guest has",
            )
            jobs.append(PlayJob(trace=path, lab=lab, output=Path(aside) / f"{number}.played"))
        outcomes = play_jobs(jobs, clock="virtual", folder=Path(aside) / "work", kernel=kernel)
        for (arm, name), trace, outcome in zip(chosen, traces, outcomes, strict=True):
            if outcome.output is None:
                raise LabError(f"{arm} could not be played over {name}: {outcome.error}")
            lane, times = trace.lanes[1], read_played(outcome.output).lanes[1]
            ends_ns = [times.end_ns[start - 1] for start in lane.starts[1:]]
            made += [PlayedLine(arm, name, step, round(end / 1e9, 4)) for step, end in enumerate(ends_ns)]
    csv_rows.write_rows(asked.output / "played.csv", PlayedLine._fields, made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
