"""Random cells: every kind of job over every kind of link, drawn by a seed, and what is checked of each run.

A cell is one choice on each axis, so a failing one can be shrunk: axis by axis, back to the first and plainest choice,
while the run still fails for the same cause (delta debugging, Zeller and Hildebrandt, TSE 2002). All durations are
stated and all runs are on the virtual clock, so a seed gives the same nanoseconds on every machine.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from testbed import results
from testbed.errors import TestbedError
from testbed.frozen import Frozen
from testbed.metrics.fidelity import same_losses
from testbed.profiles import profile_files
from testbed.results import Run
from testbed.spec import Cell, PipelineSpec
from testbed.sweep.fields import Tables, merge
from testbed.sweep.resolve import resolve_cell

Drawn = dict[str, int]
"""Which choice of each axis."""
MOST_BOOTS = 40
"""Runs that shrinking one failure may take."""
_HAIR = 1e-6
"""Relative tolerance of a step against its ideal: the ideal is in whole nanoseconds per message."""

_BASE: Final[Tables] = {
    "codec_cost": "zero",
    "workload": {
        "model": "gpt2-nano", "text": "bundled", "sequence_length": 32, "batch_size": 8, "validation_batches": 1,
    },
    "optimiser": {"learning_rate": 1e-3, "weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "clip_norm": 1.0},
    "training": {"steps": 5, "warmup_steps": 1, "evaluate_every": 0},
}  # fmt: skip
_PACED: Final = {"mode": "paced", "forward": "5ms", "backward": "10ms"}
_CONTEXT_WORK: Final = (
    "project", "attend", "loss", "loss_backward", "attend_backward", "add", "project_backward", "part", "sum", "update",
    "note",
)  # fmt: skip
_OUTER: Final = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


def _pipeline(stages: int, schedule: str = "1f1b", **more: Any) -> Tables:
    return {"compute": _PACED, "pipeline": {"stages": stages, "schedule": schedule, "in_flight": 4, **more}}


def _replicas(exchange: str, workers: int = 2, **more: Any) -> Tables:
    stated = {"exchange": exchange, "workers": workers, "staleness": 0, "local_steps": 1, **more}
    return {"compute": _PACED, "data": stated | ({"answer": "fp32"} if exchange == "star" else {})}


KINDS: Final[Mapping[str, Tables]] = {
    "pipeline": _pipeline(2),
    "pipeline, GPipe": _pipeline(3, "gpipe"),
    "pipeline that recomputes": _pipeline(3, recompute=True),
    "pipeline that accumulates": _pipeline(3, accumulation=2),
    "all-to-all": _replicas("all-to-all"),
    "all-to-all, stale": _replicas("all-to-all", 4, staleness=2),
    "ring": _replicas("all-reduce", 2),
    "gathering ring": _replicas("all-gather", 4),
    "server": _replicas("star", 4),
    "server, one worker stale": _replicas("star", 2, staleness=[0, 1]),
    "local steps": _replicas("all-to-all", 2, local_steps=2, outer=_OUTER),
    "streaming": _replicas(
        "all-reduce", 2, local_steps=2, staleness=1, outer=_OUTER, streaming={"fragments": 2, "mixing": 0.5}
    ),
    "context": {
        "compute": {"mode": "stated", "work": dict.fromkeys(_CONTEXT_WORK, "1ms")},
        "job": {"kind": "context", "nodes": 4, "layers": 3, "weights": "int8"},
    },
    "decode": {
        "compute": {"mode": "stated", "work": {"prefill": "40ms", "forward": "10ms"}},
        "job": {"kind": "decode", "stages": 3, "requests": 4, "prompt": 16, "tokens": 6},
        "workload": {"batch_size": 1},
    },
}
"""Tables of each kind of job, the plainest first."""

AXES: Final[Mapping[str, Sequence[Any]]] = {
    "kind": [*KINDS],
    "microbatches": [2, 1, 4],
    "codec": [
        "fp32", "bf16", "int8", "int4(group=64)", "delta-int8", "topk(0.05)", "ef(topk(0.1))", "ef(int2)",
        "powersgd(4)", "lowrank(bf16, 4)", "haar(int4)", "fwd=bf16, bwd=int8",
    ],
    "link": [
        "link(100Mbit, 5ms)", "link(1Gbit, 1ms)", "link(2Mbit, 100ms)", "link(20Mbit, 10ms, loss=1%)",
        "link(20Mbit, 10ms, queue=fq_codel)", "link(20Mbit, 10ms, queue=cake)", "link(20Mbit, 10ms, queue=red)",
        "link(20Mbit, 10ms, background=1 cubic up)", "link(50Mbit, 20ms, background=web down + call up)",
    ],
    "topology": ["star", "line"],
    "durations": [
        {}, {"spread": {"kind": "exponential", "cv": 0.5}}, {"stragglers": {"share": 0.1, "factor": 5}},
        {"slow": {"factor": 3, "node": 1, "after": 2}},
    ],
    "seed": [0, 1, 2],
    "fault": [
        [], [{"at": "300ms", "for": "500ms", "outage": True}], [{"at": "300ms", "for": "1s", "rate": "200Kbit"}],
        [{"at": "200ms", "for": "1s", "loss": "30%"}], [{"at": "200ms", "for": "1s", "reorder": "20%"}],
        [{"at": "200ms", "for": "1s", "duplicate": "20%"}], [{"at": "200ms", "for": "1s", "corrupt": "5%"}],
        [{"mtbf": "2s", "until": "10s", "for": "200ms", "outage": True}],
        [{"node": 1, "at": "200ms", "for": "700ms", "stop": True}],
    ],
}  # fmt: skip
"""Choices of each axis, the plainest first."""


class ChaosRow(Frozen):
    """What was drawn, and what became of it; the same in every run of a seed, to the nanosecond."""

    number: int
    choices: dict[str, int]
    words: str
    cell: str
    timing: str
    step_s: float | None
    digest: str | None
    """SHA-256 of every node's steps: their numbers, phases, begins, ends in ns and losses."""
    cause: str | None
    """Why the run is wrong; None: it is right."""
    shrunk: str | None = None
    """The plainest cell that fails for the same cause, in words."""


class ChaosRecord(Frozen):
    """All rows of a seed. `kernel` and `torch`: what the nanoseconds and the losses depend on."""

    seed: int
    kernel: str
    torch: str
    rows: tuple[ChaosRow, ...]


class ChaosCell(NamedTuple):
    """A drawn cell."""

    number: int
    drawn: Drawn
    cell: Cell


def choices(axis: str) -> Sequence[Any]:
    """Return the choices of an axis; links are those above and then every shipped profile."""
    return [*AXES[axis], *sorted(profile_files())] if axis == "link" else AXES[axis]


def cell_of(drawn: Mapping[str, int], timing: str = "played") -> Cell:
    """Return the cell of some choices. TestbedError if they do not go together."""
    chosen = {axis: choices(axis)[at] for axis, at in drawn.items()}
    fields = merge(_BASE, KINDS[chosen["kind"]], "chaos")
    if "pipeline" in fields:
        fields["pipeline"]["microbatches"] = chosen["microbatches"]
    fields["compute"] |= chosen["durations"]
    fields["training"]["seed"] = chosen["seed"]
    stated = {name: chosen[name] for name in ("codec", "topology")} | {"profile": chosen["link"], "timing": timing}
    stated |= {"fault": chosen["fault"]} if chosen["fault"] else {}
    return resolve_cell(fields | stated, "netem", "chaos", "virtual")


def words_of(drawn: Mapping[str, int]) -> str:
    """Return some choices in words, without the plainest ones."""
    said = (
        choices(axis)[at] if axis == "kind" else f"{axis} {choices(axis)[at]}"
        for axis, at in drawn.items()
        if at or axis == "kind"
    )
    return "; ".join(said).replace("'", "")


def draw(seed: int, count: int, live: int) -> Iterator[ChaosCell]:
    """Draw `count` played cells, and for the first of them that can, `live` live twins, which follow their cells."""
    number = 0
    for _ in range(count):
        while True:
            dice = random.Random(f"{seed} {number}")
            drawn = {axis: dice.randrange(len(choices(axis))) for axis in AXES}
            number += 1
            try:
                cell = cell_of(drawn)
            except TestbedError:  # some kinds have no line, some codecs no ring
                continue
            yield ChaosCell(number - 1, drawn, cell)
            break
        if live:
            try:
                twin = cell_of(drawn, "live")
            except TestbedError:
                continue
            live -= 1
            yield ChaosCell(number - 1, drawn, twin)


def _digest(nodes: Sequence[Any]) -> str:
    told = [[(step.step, step.phase, step.start_ns, step.end_ns, step.loss) for step in steps] for steps in nodes]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def judge(folder: Path, of: ChaosCell) -> ChaosRow:
    """Judge the last run of a cell in a result folder; a live one also against its played twin."""
    row = ChaosRow(number=of.number, choices=of.drawn, words=words_of(of.drawn), cell=of.cell.id,
                   timing=of.cell.timing, step_s=None, digest=None, cause="it was not run")  # fmt: skip
    for run in results.runs(folder, of.cell.id):
        if (summary := run.summary) is None:
            row = row.model_copy(update={"cause": "it ended without a summary"})
        elif summary.status != "ok":
            row = row.model_copy(update={"cause": f"it {summary.status}: {summary.error}"})
        else:
            nodes = run.all_steps()
            known = {"step_s": summary.step_s, "digest": _digest(nodes), "cause": _fault(folder, of, run, nodes)}
            row = row.model_copy(update=known)
    return row


def _fault(folder: Path, of: ChaosCell, run: Run, nodes: Sequence[Any]) -> str | None:
    summary = run.summary
    assert summary is not None
    if summary.certificate != "PASS":
        return f"its links are not certified: {summary.certificate}"
    step, ideal = summary.step_s, summary.ideal_step_s
    # Elsewhere nodes run ahead: a step may be shorter than its part of the ideal, and end before its messages. A rate
    # that fell lets a packet pass first.
    in_step = isinstance(of.cell.parallelism, PipelineSpec)
    bound = in_step and not any(link.varies for link in of.cell.links)
    if bound and summary.efficiency is not None and summary.efficiency > 1 + _HAIR:
        return f"a step of {step} s is shorter than its ideal of {ideal} s"
    # A node that is stopped at the end of a step counts, when it goes on, what its peers sent in the next.
    wire, payload = summary.wire_bytes_per_step, summary.payload_bytes_per_step
    if in_step and not of.cell.node_faults and (wire or 0) < (payload or 0):
        return f"{wire} bytes on the wire for {payload} of payload"
    if of.cell.timing == "live":
        played = results.finished(folder, cell_of(of.drawn).id)
        if played is not None and not same_losses(nodes, played.all_steps(), summary.steps):
            return "the network changed the maths: its losses are not those of the played run"
    return None


def _without_numbers(cause: str) -> str:
    return re.sub(r"[0-9a-f.]*[0-9][0-9a-f.]*", "", cause)


def shrink(of: ChaosCell, cause_of: Callable[[ChaosCell], str | None]) -> ChaosCell:
    """Return the plainest cell that fails for the same cause, as `cause_of` runs and judges it; see `MOST_BOOTS`."""
    cause, boots, plainest = cause_of(of), 0, of
    for axis in AXES:
        if not plainest.drawn[axis] or boots == MOST_BOOTS:
            continue
        drawn = plainest.drawn | {axis: 0}
        try:
            tried = ChaosCell(of.number, drawn, cell_of(drawn, of.cell.timing))
        except TestbedError:
            continue
        boots += 1
        found = cause_of(tried)
        if found is not None and cause is not None and _without_numbers(found) == _without_numbers(cause):
            plainest = tried
    return plainest
