"""What the programs of this folder share: states and their sizes, the intervals of Young and Daly, drawn histories of
failures, and their traces.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from testbed import csv_rows
from testbed.devices.flops import parameters
from testbed.net.lab import LabSpec
from testbed.player.split import repeated
from testbed.player.virtual import guest_lab
from testbed.predict.cells import Planned, plan_cells
from testbed.profiles import LinkProfile, load_profile
from testbed.trace.format import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.workloads.models import ModelSize

HERE = Path(__file__).resolve().parent
QUALITY = HERE.parent / "state_transfer" / "quality.csv"
MTBFS_S = {"10 min": 600, "1 h": 3600, "6 h": 21600}
REPLACED_S = 60.0
"""From a peer's loss until it is noticed and its replacement runs [chosen]."""
DISK_BYTES_PER_S = 500e6
"""Of a home machine's disk [chosen]."""
BYTES_PER_PARAMETER = {"pipeline": 12, "data": 8}
"""fp32: weights and Adam's two moments; or weights and the outer momentum, which all workers have."""
STATES = {
    "fp32": ("fp32", "fp32"),
    "bf16": ("bf16", "bf16"),
    "int8": ("int8", "int8"),
    "int4 changes": ("delta(zstd(int4(group=64, asymmetric), 3), fp32)", "int8"),
}
"""State as it is sent -> its codec in a checkpoint, and in a recovery, for which the new peer has no older state."""
_LABELS = ("state", "recovery", "barrier")


class Costs(NamedTuple):
    """Seconds of a job, which decide its goodput."""

    step_s: float
    checkpoint_s: float
    recovery_s: float
    """From a failure until the steps since the last checkpoint are repeated."""


# ------------------------------------------------------------------ formulas
def young_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the interval between checkpoints of Young (1974)."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the interval between checkpoints of Daly (2006), his higher-order estimate."""
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    part = checkpoint_s / (2 * mtbf_s)
    return young_s(checkpoint_s, mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint_s


def goodput(costs: Costs, steps: int, mtbf_s: float) -> float:
    """Return the share of time in useful steps, with a checkpoint after every `steps` steps.

    This is the expected time of Daly (2006), with exponential times between failures, which may strike at any time.
    """
    useful_s = steps * costs.step_s
    segment, recovery = (useful_s + costs.checkpoint_s) / mtbf_s, costs.recovery_s / mtbf_s
    return useful_s / (mtbf_s * math.exp(recovery) * math.expm1(segment))


def whole_steps(interval_s: float, step_s: float) -> int:
    """Return the number of whole steps nearest to an interval, at least one."""
    return max(1, round(interval_s / step_s))


def best_steps(costs: Costs, mtbf_s: float) -> int:
    """Return the number of steps between checkpoints with the largest `goodput`."""
    steps = 1
    while goodput(costs, steps + 1, mtbf_s) > goodput(costs, steps, mtbf_s):
        steps += 1
    return steps


# ------------------------------------------------------------------ sizes
@functools.cache
def _bits() -> Mapping[str, float]:
    return {row["codec"]: 8 * int(row["payload_bytes"]) / int(row["values"]) for row in csv_rows.read_records(QUALITY)}


def state_bytes(job: str, state: str, *, recovery: bool = False) -> int:
    """Return the bytes of a stage's or worker's state as it is sent in a checkpoint, or in a recovery."""
    values = max(_parameters(job)) * BYTES_PER_PARAMETER[job] / 4
    return math.ceil(values * _bits()[STATES[state][recovery]] / 8)


def _parameters(job: str) -> Sequence[int]:
    fields = planned()[0].fields
    size, stages = ModelSize(**fields["model"]), {"pipeline": 2, "data": 1}[job]
    each = size.layers // stages
    return [parameters(size, range(first, first + each)) for first in range(0, size.layers, each)]


# ------------------------------------------------------------------ cells
@functools.cache
def planned() -> Sequence[Planned]:
    """Return the cells of cells.toml."""
    return plan_cells(str(HERE / "cells.toml"))


def cell_of(job: str, codec: str, link: str) -> Planned:
    """Return the cell of a job."""
    return next(
        each
        for each in planned()
        if each.grid == job
        and each.stated["links"] == link
        and codec in (each.stated.get("codec"), each.stated.get("label.codec"))
    )


def lab(profile: LinkProfile, nodes: int, scale: int = 1) -> LabSpec:
    """Return a star of such links, with a fraction of their rates and buffers, as `predict` plays cells."""
    pipes = {}
    for way in ("up", "down"):
        pipe = profile.pipe(way)
        assert pipe is not None
        rate_bps, buffer = round(pipe.rate_bps / scale / 8) * 8, max(2 * 1514, pipe.buffer_bytes // scale)
        pipes[way] = pipe.model_copy(update={"rate_bps": rate_bps, "buffer_bytes": buffer})
    return guest_lab("star", [profile.model_copy(update=pipes)] * nodes, nodes)


def profile_of(link: str, control: str = "cubic") -> LinkProfile:
    """Return a link's profile with this congestion control."""
    return load_profile(link).model_copy(update={"congestion_control": control})


# ------------------------------------------------------------------ histories
class Event(NamedTuple):
    """A part of a history: steps, a pause of lost work or of a replacement, a checkpoint, or a transfer of a state."""

    kind: str
    steps: int = 0
    seconds: float = 0.0


def history(costs: Costs, every: int, mtbf_s: float, seed: int, steps: int) -> Iterator[Event]:
    """Yield what happens until `steps` steps are done and kept, with a checkpoint after every `every` steps.

    A failure loses all steps since the last checkpoint. It may strike at any time, also during checkpoints and
    recoveries; what it interrupts is lost, and repeated.
    """
    draw = random.Random(seed)
    left_s, kept = draw.expovariate(1 / mtbf_s), 0
    segment_s = every * costs.step_s + costs.checkpoint_s
    while kept < steps:
        if left_s >= segment_s:
            yield Event("steps", steps=every)
            yield Event("checkpoint")
            left_s, kept = left_s - segment_s, kept + every
            continue
        done = min(every, int(left_s / costs.step_s))
        if done:
            yield Event("steps", steps=done)
        yield Event("pause", seconds=left_s - done * costs.step_s)
        while (left_s := draw.expovariate(1 / mtbf_s)) < costs.recovery_s:
            yield Event("pause", seconds=left_s)
        left_s -= costs.recovery_s
        yield Event("recovery")


def seconds(events: Sequence[Event], costs: Costs) -> float:
    """Return how long a history takes."""
    of = {"checkpoint": costs.checkpoint_s, "recovery": costs.recovery_s}
    return sum(each.steps * costs.step_s + each.seconds + of.get(each.kind, 0.0) for each in events)


# ------------------------------------------------------------------ traces
def joined(parts: Sequence[Trace]) -> Trace:
    """Return a trace in which these happen one after the other in every lane."""
    known: dict[tuple[int, str], Lane] = {}
    for part in parts:
        for lane in part.lanes:
            known.setdefault((lane.node, lane.name), Lane(lane.node, lane.name))
    tags = 0
    for part in parts:
        for key, lane in known.items():
            own = next((each for each in part.lanes if (each.node, each.name) == key), Lane(*key))
            first = len(lane)
            for name in ("kind", "label", "peer", "value"):
                getattr(lane, name).extend(getattr(own, name))
            lane.tag.extend(tag if kind == WORK else tag + tags for kind, tag in zip(own.kind, own.tag, strict=True))
            lane.starts.extend(first + start for start in own.starts[1:] or [0] * part.steps)
        tags += 1 + max((tag for lane in part.lanes for tag in lane.tag), default=0)
    most = max(parts, key=lambda part: len(part.labels))
    return Trace(most.nodes, most.labels, tuple(known.values()), {"maker": "cost_of_failures"})


def transfer(nodes: int, sent: Sequence[tuple[int, int, int]], pause_s: float = 0.0) -> Trace:
    """Return the trace of a step in which all nodes pause, then messages (from, to, bytes) are sent, and all wait for
    each other.
    """
    lanes = [Lane(node, "compute") for node in range(nodes)]
    for lane in lanes:
        lane.add(WORK, value=round(pause_s * 1e9))
    for tag, (source, target, size) in enumerate(sent):
        lanes[source].add(SEND, 0, target, tag, size)
    for tag, (source, target, _) in enumerate(sent):
        lanes[target].add(RECEIVE, 0, source, tag)
    for lane in lanes:
        lane.add(SIGNAL)
        lane.add(WAIT, value=nodes)
        lane.end_step()
    return Trace(tuple(f"node {node}" for node in range(nodes)), _LABELS, tuple(lanes))


def exchange(job: str, state: str, scale: int, *, recovery: bool = False) -> Sequence[tuple[int, int, int]]:
    """Return the messages of a checkpoint, or of a recovery of node 1.

    Each stage of a pipeline sends its state to the other's home, which sends it back. Workers hold equal states, so
    each of three sends a part of it.
    """
    size = -(-state_bytes(job, state, recovery=recovery) // scale)
    if job == "data":
        return [(node, 1, -(-size // 3)) for node in (0, 2, 3)]
    return [(0, 1, size)] if recovery else [(0, 1, size), (1, 0, size)]


def trace_of(events: Sequence[Event], cell: Planned, state: str) -> Trace:
    """Return the trace of a history."""
    job, scale, nodes = cell.grid, cell.cell.scale, cell.cell.shape.nodes
    one = cell.cell.shape.trace(1, scale)
    parts = []
    for event in events:
        if event.kind == "steps":
            parts.append(repeated(one, event.steps))
        elif event.kind == "pause":
            parts.append(transfer(nodes, (), event.seconds))
        elif event.kind == "recovery":
            parts.append(transfer(nodes, exchange(job, state, scale, recovery=True), REPLACED_S))
        elif job == "pipeline":
            parts.append(transfer(nodes, exchange(job, state, scale)))
    return joined(parts)
