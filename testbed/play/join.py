"""Make a job's trace from what its ranks have recorded (recorder.py): a file per rank, a line per step.

A file's first line says which rank it is; every other line is a list of rows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from testbed.errors import SpecError
from testbed.play.check import check_trace
from testbed.play.trace import RECEIVE, SEND, SIGNAL, WAIT, Lane, Trace

VERSION: Final = 1
LANES: Final = ("compute", "collectives")
LABELS: Final = ("work", "send", "all_reduce", "all_gather", "reduce_scatter", "broadcast")
Row = list[Any]
"""[lane, kind, label, peer, channel of the message or number of the event, value]: else as in a trace."""


def join(files: Sequence[Path]) -> Trace:
    """Make the trace of a job from the files of all its ranks.

    SpecError for a file that no recorder wrote, ranks that are missing, or messages that only one end has seen.
    """
    by_rank: dict[int, list[list[Row]]] = {}
    ranks = 0
    for path in files:
        try:
            about, *steps = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            if about["version"] != VERSION:
                raise SpecError(f"{path} is of version {about['version']}; this testbed reads version {VERSION}")
            by_rank[int(about["rank"])], ranks = steps, int(about["ranks"])
        except OSError as error:
            raise SpecError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise SpecError(f"{path} was not written by a recorder: {error}") from None
    if sorted(by_rank) != list(range(ranks)):
        raise SpecError(f"these are files of the ranks {sorted(by_rank)}, and the job had {ranks} ranks")
    if len({len(steps) for steps in by_rank.values()}) > 1:
        counts = ", ".join(f"rank {rank}: {len(by_rank[rank])}" for rank in sorted(by_rank))
        raise SpecError(f"the ranks have not marked as many steps as each other: {counts}")
    tags: dict[tuple[Any, ...], int] = {}
    fresh: dict[tuple[int, int], int] = {}
    try:
        lanes = [lane for rank in range(ranks) for lane in _lanes(rank, ranks, by_rank[rank], tags, fresh)]
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise SpecError(f"these files hold rows that no recorder writes: {error}") from None
    names = tuple(f"rank {rank}" for rank in range(ranks))
    trace = Trace(names, LABELS, tuple(lane for lane in lanes if len(lane)), {"from": "recorder"})
    check_trace(trace, "the job")
    return trace


def _lanes(
    rank: int,
    ranks: int,
    steps: Sequence[Sequence[Row]],
    tags: dict[tuple[Any, ...], int],
    fresh: dict[tuple[int, int], int],
) -> list[Lane]:
    """Make a rank's lanes. Messages of one channel are received in the order in which they were sent."""
    lanes = [Lane(rank, name) for name in LANES]
    seen: dict[tuple[Any, ...], int] = {}
    for rows in steps:
        for number, kind, label, peer, channel, value in rows:
            tag = 0
            if kind in (SEND, RECEIVE):
                ends = (rank, peer) if kind == SEND else (peer, rank)
                count = seen[kind, *ends, channel] = seen.get((kind, *ends, channel), -1) + 1
                tag = tags.setdefault((*ends, channel, count), fresh.get(ends, 0))
                fresh[ends] = max(fresh.get(ends, 0), tag + 1)
            elif kind in (SIGNAL, WAIT):
                tag = channel * ranks + rank  # every rank numbers its own events
            lanes[number].add(kind, label=label, peer=peer, tag=tag, value=value)
        for lane in lanes:
            lane.end_step()
    return lanes
