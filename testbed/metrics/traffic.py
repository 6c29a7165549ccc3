"""Traffic of a step: raw tensors, payloads, and bytes counted on the wire.

Counters and sockets are cumulative, so a step's share is the difference to the previous record; a step without one is
excluded from those means. A missing count yields None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from testbed.metrics.steps import PipelineStep
from testbed.metrics.wires import HEADER_BYTES
from testbed.records import StepRecord


class Traffic(NamedTuple):
    """Means per step over all stages, boundaries and directions, in bytes."""

    raw: float | None
    payload: float | None
    wire: float | None
    """IP packets that the stages sent, according to the interface counters."""
    header: float | None
    """52 bytes per segment counted by the sockets; without selective acknowledgements, which add bytes after a loss."""
    retransmitted: float | None


def _mean(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if not known or None in known else fmean(value for value in known if value is not None)


def _wire(record: StepRecord, before: StepRecord) -> int | None:
    if record.counters is None or before.counters is None:
        return None
    return record.counters.sent_bytes - before.counters.sent_bytes


def _sockets(record: StepRecord, before: StepRecord, neighbours: int | None) -> tuple[int, int] | None:
    """Return (segments sent, bytes retransmitted) over all sockets of a stage with `neighbours`, or of a node with at
    least one.
    """
    old, new = ({socket.peer: socket for socket in sample.sockets} for sample in (before, record))
    if len(new) != (len(new) or 1 if neighbours is None else neighbours) or old.keys() != new.keys():
        return None
    segments = sum(new[peer].segments_out - old[peer].segments_out for peer in new)
    return segments, sum(new[peer].bytes_retransmitted - old[peer].bytes_retransmitted for peer in new)


def _sum(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def traffic(steps: Sequence[PipelineStep]) -> Traffic:
    """Return the means over these steps."""
    sent = [[frame for record in step.records for frame in record.sent] for step in steps]
    wire, header, again = [], [], []
    for step in steps:
        if step.before is None:
            continue
        last = len(step.records) - 1
        pairs = list(zip(step.records, step.before, strict=True))
        wire.append(_sum(_wire(record, before) for record, before in pairs))
        workers = any(frame.peer is not None for record in step.records for frame in record.sent)
        counts = [
            _sockets(new, old, None if workers else (stage > 0) + (stage < last))
            for stage, (new, old) in enumerate(pairs)
        ]
        segments = _sum(None if count is None else count[0] for count in counts)
        header.append(None if segments is None else segments * HEADER_BYTES)
        again.append(_sum(None if count is None else count[1] for count in counts))
    return Traffic(
        raw=_mean(sum(frame.raw_bytes for frame in frames) for frames in sent),
        payload=_mean(sum(frame.payload_bytes for frame in frames) for frames in sent),
        wire=_mean(wire),
        header=_mean(header),
        retransmitted=_mean(again),
    )
