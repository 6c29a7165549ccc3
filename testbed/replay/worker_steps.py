"""Computes the steps of data parallel training that certificates are judged by (`metrics.bound`), over formula links
with the requested and with the measured parameters.

Workers may run ahead, so the step time is a mean over several cycles, after as many cycles of warm-up from a common
start. For a run, these are windows of its own steps, with their durations and messages.

With a server that waits for no worker (`data.arrivals`), links do not lengthen a step: they change the round trip of a
worker, and thus which updates a step contains. Such a run is judged by a round in which the server waits for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from testbed.metrics.bound import MANY_ACTIONS, STEPS, BoundedStep, Deviations, spread_out
from testbed.metrics.ideal import RecordedReplicas, trained_steps
from testbed.metrics.links import Queues
from testbed.metrics.steps import align, steady
from testbed.metrics.wires import Wires
from testbed.records import StepRecord
from testbed.replay import workers
from testbed.spec import Cell
from testbed.trace.simulate import ideal_steps_ns

_CYCLES = 4
"""Number of cycles per window, of which the second half counts."""


def replica_step(cell: Cell, nodes: Sequence[Sequence[StepRecord]], played_at_ns: int | None) -> BoundedStep | None:
    """Return the steps of a data parallel run: up to three windows of them (one if they are large); None if no step
    counts.

    `nodes`: the records of each node; `played_at_ns`: as in the lab's record.
    """
    assert cell.data is not None
    if cell.data.arrivals is not None:
        sizes = [_usual(records) for records in nodes]
        return stated_replica_step(cell, sizes, "rounds with the run's own messages") if all(sizes) else None
    chosen = steady(align(nodes))
    if not chosen:
        return None
    first, end, length = chosen[0].number, chosen[-1].number + 1, _CYCLES * cell.cycle
    firsts = list(range(first, max(first, end - length) + 1))
    large = length * sum(len(record.received) for record in chosen[-1].records) > MANY_ACTIONS
    trained = trained_steps(nodes)
    windows = [
        (
            RecordedReplicas(cell.data, trained, range(begin, min(end, begin + length))),
            max(0, chosen[begin - first].begin_ns - (played_at_ns or 0)),
        )
        for begin in spread_out(firsts, 1 if large else STEPS)
    ]

    def seconds(deviations: Deviations) -> list[float]:
        wires = Wires(cell, played_at_ns, deviations)
        return [_mean_step_s(cell, steps.seconds(Queues(wires, begins_ns=begins_ns))) for steps, begins_ns in windows]

    return BoundedStep(cell, seconds, "the run's own steps")


def stated_replica_step(cell: Cell, frame_bytes: Sequence[int], said: str) -> BoundedStep:
    """Return a synthetic step, in which each node sends messages of its size in `frame_bytes`."""
    data = cell.data
    assert data is not None
    peers = 1 if data.exchange in ("star", "pairs") else data.workers - 1
    counts = [data.workers if node == data.workers else peers for node in range(cell.nodes)]
    if data.exchange == "all-reduce":
        rounds = 2 * peers * (1 if data.aligned is None else 2)
        counts, frame_bytes = [rounds] * cell.nodes, [-(-size // data.workers) for size in frame_bytes]

    def frames(node: int, step: int) -> list[int]:
        return [frame_bytes[node]] * counts[node]

    def applied(worker: int, step: int) -> list[int]:
        due = step - (0 if data.arrivals is not None else data.staleness_of(worker))
        return [due] if due >= 0 else []

    trace = workers.stated_job(cell, _CYCLES * cell.cycle, frames, applied, workers.stated_times(cell)).trace()

    def seconds(deviations: Deviations) -> list[float]:
        spans = ideal_steps_ns(trace, Queues(Wires(cell, None, deviations)), trace.steps)
        return [_mean_step_s(cell, [ns / 1e9 for ns in spans])]

    return BoundedStep(cell, seconds, said)


def _mean_step_s(cell: Cell, seconds: Sequence[float]) -> float:
    """Return the mean over the last half of the cycles of some steps."""
    count = min(len(seconds), cell.cycle * max(1, len(seconds) // cell.cycle // 2))
    return fmean(seconds[-count:])


def _usual(records: Sequence[StepRecord]) -> int:
    """Return the median size of a node's messages; 0 if it sent none."""
    sizes = [frame.frame_bytes for record in records for frame in record.sent]
    return round(median(sizes)) if sizes else 0
