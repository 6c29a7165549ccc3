"""Adds the logs of a PyTorch job's ranks (`testbed.torch`) to the result of an order."""

from __future__ import annotations

from pathlib import Path

from testbed.errors import SpecError
from testbed.exec.order import ExecResult, ObservedOperation
from testbed.trace.observations import ObservedRank, read_observations, totals

FOLDER = "torch"


def with_observations(result: ExecResult, folder: Path) -> ExecResult:
    """Return the result with the job's operations and, if no pattern marks them, its steps.

    Unchanged if nothing was observed, or if ranks are missing because the job failed.
    """
    try:
        job = read_observations(folder / FOLDER)
    except SpecError:
        return result
    operations = tuple(
        ObservedOperation(
            what=f"{total.what} (sent)" if total.level else total.what,
            operations=total.operations,
            payload_bytes=total.payload_bytes,
            wire_bytes=total.wire_bytes,
            waited_ns=total.waited_ns,
        )
        for total in totals(job)
    )
    nodes = result.nodes
    if result.order.step_pattern is None and len(job) == len(nodes):
        nodes = tuple(
            node.model_copy(update={"steps_ns": _since_start(rank, result)})
            for node, rank in zip(nodes, job, strict=True)
        )
    return result.model_copy(update={"operations": operations, "nodes": nodes})


def _since_start(rank: ObservedRank, result: ExecResult) -> tuple[int, ...]:
    return tuple(at_ns - result.started_at_ns for at_ns in rank.steps)
