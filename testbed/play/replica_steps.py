"""The steps of data parallel training that certificates are judged by (`metrics.bound`): how long their trace takes
over links that are formulas, as they were asked and as they were found.

Workers may be ahead of what they wait for, so a step is the mean over cycles of several, after as many from which all
start together. Of a run these are windows of its own steps, with the messages that it sent.

Where a server waits for nobody (`data.arrivals`) no step is longer because of a link: what links move there is how long
a round takes, and so which updates a step has. Such a run is judged by a round in which the server waits for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from testbed.metrics.bound import MANY_ACTIONS, STEPS, BoundedStep, Deviations, spread_out
from testbed.metrics.steps import align, steady
from testbed.metrics.wires import Wires
from testbed.play import replicas
from testbed.play.ideal import PipesFound
from testbed.play.replica_times import NodeTimes, stated_times
from testbed.play.trace import Trace
from testbed.play.tracing import window
from testbed.play.unlinked import play_unlinked, step_ends
from testbed.records import StepRecord
from testbed.spec import Cell

_CYCLES = 4
"""Of a window; the second half of them counts."""


def replica_step(
    cell: Cell,
    nodes: Sequence[Sequence[StepRecord]],
    played_at_ns: int | None,
    times: Sequence[NodeTimes] | None = None,
) -> BoundedStep | None:
    """Return the steps of a run of data parallel training: of up to three windows (one where they are large); None
    where no step counts.

    `nodes` holds the records of each node; `played_at_ns` is that of the lab's record; `times` are the durations that
    the run had, by node: None where the cell itself states them.
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
    trace = replicas.trace_of(cell, [[r for r in records if r.step < end] for records in nodes], times)
    windows = [
        (
            window(trace, range(begin, min(end, begin + length))),
            max(0, chosen[begin - first].begin_ns - (played_at_ns or 0)),
        )
        for begin in spread_out(firsts, 1 if large else STEPS)
    ]
    return BoundedStep(cell, _durations(cell, windows, played_at_ns), "the run's own steps")


def stated_replica_step(cell: Cell, frame_bytes: Sequence[int], said: str) -> BoundedStep:
    """Return a step that nobody has run, in which each node sends messages of its size: `frame_bytes`, by node."""
    data = cell.data
    assert data is not None
    peers = 1 if data.exchange == "star" else data.workers - 1
    counts = [data.workers if node == data.workers else peers for node in range(cell.nodes)]
    if data.exchange == "all-reduce":
        counts, frame_bytes = [2 * peers] * cell.nodes, [-(-size // data.workers) for size in frame_bytes]

    def frames(node: int, step: int) -> list[int]:
        return [frame_bytes[node]] * counts[node]

    def applied(worker: int, step: int) -> list[int]:
        due = step - (0 if data.arrivals is not None else data.staleness_of(worker))
        return [due] if due >= 0 else []

    trace = replicas.stated_job(cell, _CYCLES * cell.cycle, frames, applied, stated_times(cell)).trace()
    return BoundedStep(cell, _durations(cell, [(trace, 0)], None), said)


def _durations(
    cell: Cell, windows: Sequence[tuple[Trace, int]], played_at_ns: int | None
) -> Callable[[Deviations], list[float]]:
    """Return what simulates traces, each of which begins so many nanoseconds after the links were played."""

    def seconds(deviations: Deviations) -> list[float]:
        wires = Wires(cell, played_at_ns, deviations)
        return [_mean_step_s(cell, trace, PipesFound(cell, wires, begins_ns=begins)) for trace, begins in windows]

    return seconds


def _mean_step_s(cell: Cell, trace: Trace, links: PipesFound) -> float:
    """Return the mean over the last half of a trace's cycles."""
    ends = [0, *step_ends(trace, play_unlinked(trace, None, links), trace.steps)]
    count = min(trace.steps, cell.cycle * max(1, trace.steps // cell.cycle // 2))
    return (ends[-1] - ends[-1 - count]) / count / 1e9


def _usual(records: Sequence[StepRecord]) -> int:
    """Return the median size of a node's messages; 0 where it sent none."""
    sizes = [frame.frame_bytes for record in records for frame in record.sent]
    return round(median(sizes)) if sizes else 0
