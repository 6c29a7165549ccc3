"""Reads the recordings of an observed job (testbed.torch.observed), sums them up, and lays them out in time.

job = read_observations(folder)     # a rank per file rank-R.jsonl, or per profile of torch.profiler (kineto.py)
totals(job)                         # per operation: count, bytes, bytes on the wire, time
timeline(job)                       # per rank: operations, waits, steps, for a picture or Perfetto
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from testbed.errors import SpecError
from testbed.trace import gloo
from testbed.trace.kineto import kineto_lines

VERSION: Final = 1
Line = Mapping[str, Any]
MESSAGES: Final = ("send", "receive")
_BROKEN: Final = (EOFError, zlib.error)
"""Suffix of a compressed file."""
_TIMED: Final = {"op": "begin", "wait": "begin", "step": "at", "module": "at", "backward_end": "at"}
"""Field of a line with its time, by kind."""


@dataclass
class ObservedRank:
    """The recording of one rank."""

    rank: int
    ranks: int
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Global ranks of each group, by group rank."""
    lines: list[Line] = field(default_factory=list)
    """Operations, waits, steps and modules, in order of their start."""

    def of(self, *kinds: str) -> Iterator[Line]:
        """Yield the lines of these kinds."""
        return (line for line in self.lines if line["kind"] in kinds)

    @property
    def lowest_level(self) -> int:
        """The level of the operations that gloo executes: below codecs, if any."""
        return max((line["level"] for line in self.of("op")), default=0)

    @property
    def steps(self) -> list[int]:
        """When each step ended, in ns: steps marked by the job, otherwise those of the first optimiser."""
        marks = list(self.of("step"))
        by = "job" if any(mark["by"] == "job" for mark in marks) else 0
        return [mark["at"] for mark in marks if mark["by"] == by]


class OperationTotal(NamedTuple):
    """All operations of one name, over all ranks."""

    what: str
    level: int
    operations: int
    payload_bytes: int
    """Size of the tensors, as counted by testbed.torch.observed."""
    wire_bytes: int | None
    """TCP payload that gloo sends for them; None if the sizes do not determine it."""
    time_ns: int
    """Total time from start to end, of operations with a recorded end."""
    waited_ns: int
    """Time that ranks spent waiting for them."""


class Span(NamedTuple):
    """A bar of the timeline."""

    rank: int
    track: str
    """"operations", "waits", "steps" or "modules"."""
    name: str
    begin_ns: int
    """Start, since the first recorded time of the job."""
    end_ns: int
    about: dict[str, Any]


def read_observations(folder: Path) -> list[ObservedRank]:
    """Read the recordings of all ranks of a job, in the order of the ranks.

    SpecError for a folder without files, missing ranks, invalid files, and profiles of different steps.
    """
    recorded = sorted(folder.glob("rank-*.jsonl"))
    files = recorded or sorted((*folder.glob("*.json"), *folder.glob("*.json.gz")))
    if not files:
        raise SpecError(f"{folder} holds no rank-*.jsonl (testbed exec --observe) and no *.json of torch.profiler")
    job = [_read_rank(path) for path in files]
    job.sort(key=lambda rank: rank.rank)
    if (ranks := [rank.rank for rank in job]) != list(range(job[0].ranks)):
        raise SpecError(f"{folder} holds files of the ranks {ranks}, but the job had {job[0].ranks} ranks")
    for name, members in {name: members for rank in job for name, members in rank.groups.items()}.items():
        counts = [sum(line["group"] == name for line in rank.of("op")) for rank in job if rank.rank in members]
        if not recorded and len(set(counts)) > 1:
            done = f"{counts} collectives of the group {name!r}"
            raise SpecError(f"the ranks {members} differ: {done}; profile the same whole steps on every rank")
    return job


def _read_rank(path: Path) -> ObservedRank:
    recorded = path.suffix == ".jsonl"
    try:
        lines = list(map(json.loads, path.read_text("utf-8").splitlines())) if recorded else kineto_lines(path)
        about = lines[0]
        if about["version"] != VERSION:
            raise SpecError(f"{path} is of version {about['version']}; this testbed reads version {VERSION}")
        rank = ObservedRank(int(about["rank"]), int(about["ranks"]))
        rank.groups = {line["name"]: tuple(map(int, line["ranks"])) for line in lines if line["kind"] == "group"}
        rank.lines = sorted((each for each in lines if each["kind"] in _TIMED), key=lambda e: int(e[_TIMED[e["kind"]]]))
        for line in rank.of("op"):
            _check(line, rank)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, *_BROKEN) as error:
        author = "an observer" if recorded else "torch.profiler in a job over NCCL"
        raise SpecError(f"{path} was not written by {author}: {type(error).__name__}: {error}") from None
    return rank


def _check(line: Line, rank: ObservedRank) -> None:
    """Check the invariants that readers rely on. ValueError, with the fault, if one is violated."""
    members = rank.groups[line["group"]]
    ends = [line[name] for name in ("root", "peer") if line.get(name) is not None]
    whole = (*map(line.get, ("number", "bytes", "item", "level", "begin", "called")), *ends, line["end"] or 0, *members)
    if not all(isinstance(number, int) and number >= 0 for number in whole) or line["item"] == 0:
        raise ValueError(f"operation {line['number']} has invalid numbers: {line}")
    if rank.rank not in members or max(members) >= rank.ranks or any(end >= len(members) for end in ends):
        raise ValueError(f"operation {line['number']} concerns a rank that is not in its group {members}")


def sent_bytes(rank: ObservedRank, line: Line) -> dict[int, int]:
    """Return the bytes of TCP payload that an operation sends to each other rank. SpecError as from `gloo.calls`."""
    members = rank.groups[line["group"]]
    if line["what"] in MESSAGES:
        if line["peer"] is None:
            return {}
        size = line["bytes"] + gloo.PREAMBLE_BYTES if line["what"] == "send" else 0
        return {members[line["peer"]]: size + gloo.PREAMBLE_BYTES}
    made = gloo.calls(line, members.index(rank.rank), len(members))
    return {members[peer]: size for peer, size in gloo.wire_bytes(made).items()}


def totals(job: Sequence[ObservedRank]) -> list[OperationTotal]:
    """Sum up the operations of all ranks, the most bytes first."""
    sums: dict[tuple[str, int], list[int | None]] = {}
    for rank in job:
        waited: dict[int, int] = {}
        for wait in rank.of("wait"):
            waited[wait["number"]] = waited.get(wait["number"], 0) + wait["end"] - wait["begin"]
        for line in rank.of("op"):
            try:
                wire = sum(sent_bytes(rank, line).values()) if line["level"] == rank.lowest_level else 0
            except SpecError:
                wire = None
            row = sums.setdefault((line["what"], line["level"]), [0, 0, 0, 0, 0])
            took = line["end"] - line["begin"] if line["end"] is not None else 0
            for at, value in enumerate((1, line["bytes"], wire, took, waited.get(line["number"], 0))):
                row[at] = None if value is None or row[at] is None else row[at] + value
    made = [OperationTotal(*key, *row) for key, row in sums.items()]  # type: ignore[arg-type]
    return sorted(made, key=lambda total: (-(total.wire_bytes or 0), -total.payload_bytes, total.what))


def timeline(job: Sequence[ObservedRank]) -> list[Span]:
    """Lay out the activities of every rank. Ranks share a clock, because they ran under one kernel."""
    zero = min((line[_TIMED[line["kind"]]] for rank in job for line in rank.lines), default=0)
    spans = []
    for rank in job:
        names = {line["number"]: line["what"] for line in rank.of("op")}
        for line in rank.of("op"):
            about = {key: line[key] for key in ("group", "bytes", "peer", "root", "tag", "level") if key in line}
            end = line["end"] if line["end"] is not None else line["called"]
            spans.append(Span(rank.rank, "operations", line["what"], line["begin"] - zero, end - zero, about))
        for wait in rank.of("wait"):
            name = names.get(wait["number"], "wait")
            spans.append(Span(rank.rank, "waits", name, wait["begin"] - zero, wait["end"] - zero, {}))
        before = min((line[_TIMED[line["kind"]]] for line in rank.lines), default=zero)
        for number, at in enumerate(rank.steps):
            spans.append(Span(rank.rank, "steps", f"step {number}", before - zero, at - zero, {}))
            before = at
    return spans
