"""A page for each cell of a sweep: its numbers, one step, its links, certificates and calibration, and the command that
runs it again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

from testbed import results
from testbed.directions import LINK_DIRECTIONS
from testbed.metrics import PipelineStep, align
from testbed.metrics.worst_step import describe_worst_step
from testbed.records import FLOORS, Calibration, Certificate, Duration, Measurement
from testbed.report import numbers, tables
from testbed.report.canvas import link_words
from testbed.report.certificate_text import measurement_cells, run_bound_words, share_text
from testbed.report.collect import Group
from testbed.report.entry import Entry, Result
from testbed.report.gantt import median_step, step_kinds, step_words
from testbed.report.numbers import MISSING
from testbed.report.settings import CLOCKS, compute_words, flat, pipeline_words
from testbed.report.step_svg import step_svg
from testbed.report.templates import write_page
from testbed.results import SweepRecord
from testbed.spec import Cell, recipe_of, route

_PARTS = {"compute_s": "compute", "codec_s": "encode and decode", "wire_s": "wire", "wait_s": "wait"}
_DROPPED_FLAGS = ("--again", "--recalibrate")


class Check(NamedTuple):
    """One quantity of one link, before and after a run."""

    link: str
    quantity: str
    asked: str
    before: str
    after: str
    moves: str
    verdict: str
    note: str


class Certified(NamedTuple):
    """A run's certificates as text."""

    result: Result
    checks: list[Check]
    verdict: str
    missing: str
    """Missing measurements of the links: 'before', 'after' or 'before or after'; empty if both were made."""
    again: str
    """Quantities that failed in another attempt; empty if none."""
    bound: str
    """Bound of the step-time error, with the lateness during the run; empty if unknown."""

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.verdict == "FAIL"]


def cell_pages(groups: Sequence[Group]) -> dict[str, str]:
    """Return the address of each cell's page, relative to the report."""
    return {name: f"cells/{name}.html" for group in groups for entry in group.entries for name in entry.cell_ids}


def write_cell_pages(
    experiment: Path, sweep: SweepRecord, groups: Sequence[Group], shown: Sequence[tables.ResultTable], report: Path
) -> None:
    """Write the page of each cell into the folder `cells` next to the report; pages of earlier sweeps stay."""
    folder = results.make_folder(report.parent / "cells")
    kept = experiment / "calibration.json"
    known = results.read_json(kept, Calibration) if kept.exists() else None
    for group, table in zip(groups, shown, strict=True):
        for (network, _), entry in group.cells.items():
            for cell_id in entry.cell_ids:
                only = entry.only(cell_id)
                assert only is not None  # it names its own cells
                cell = only.cell
                write_page(
                    folder / f"{cell_id}.html",
                    "cell",
                    title=f"{cell.codec} over {network}",
                    sweep=experiment.resolve().name,
                    report=f"../{report.name}",
                    cell=cell,
                    words=f"{link_words(group.networks[network])}; {pipeline_words(cell)}; seed {cell.training.seed}",
                    engines=engines(only.results),
                    siblings=_siblings(group, network, entry, cell_id),
                    numbers=_numbers(group, network, only, table),
                    **_step(only),
                    certificates=[certified(result) for result in only.results],
                    **_calibration(cell, known),
                    again=again(sweep.command, experiment, cell_id),
                    fields=flat(cell.model_dump(mode="json")),
                    folder=", ".join(str(result.run.folder) for result in only.results),
                    kinds=step_kinds(cell),
                )


def again(command: str, experiment: Path, cell_id: str) -> str:
    """Return the command that runs one cell of a sweep again, derived from the command of the sweep."""
    try:
        words = shlex.split(command) or ["python", "-m", "testbed", "sweep", experiment.resolve().name]
    except ValueError:  # an open quote: sweep.json was edited
        return command
    if "run" in words[:4]:  # it runs a single cell: the same command suffices
        return command
    return shlex.join([*(word for word in words if word not in _DROPPED_FLAGS), "--cell", cell_id, "--again"])


def engines(results: Iterable[Result]) -> list[str]:
    """Return 'relay: why it was chosen', once each."""
    labs = [result.lab for result in results]
    return list(dict.fromkeys(f"{lab.engine}: {lab.engine_reason}" for lab in labs if lab is not None))


def _siblings(group: Group, network: str, entry: Entry, cell_id: str) -> dict[str, dict[str, str]]:
    """Return the links to other cells: other seeds, other codecs over this network, this codec over others."""
    seeds = {f"seed {seed}": other for other, seed in entry.cell_ids.items() if other != cell_id}
    codecs = {other.cell.codec: next(iter(other.cell_ids)) for other in group.row(network) if other is not entry}
    alike = {name: group.cells.get((name, entry.cell.codec)) for name in group.networks if name != network}
    networks = {name: next(iter(other.cell_ids)) for name, other in alike.items() if other is not None}
    every = {"seeds": seeds, "other codecs here": codecs, "this codec over": networks}
    return {name: {text: f"{target}.html" for text, target in links.items()} for name, links in every.items() if links}


def _numbers(group: Group, network: str, entry: Entry, table: tables.ResultTable) -> list[tuple[str, str, str]]:
    """Return (name, value, detail) of each number of a cell; its outcome if it has no successful run."""
    if not entry.ok:
        return [("outcome", entry.outcome, "")]
    texts = tables.entry_texts(group, network, entry, table.columns, table.units)
    shown = [(column.name, text, column.unit) for column, text in zip(table.columns, texts, strict=True)]
    summary = entry.measured
    parts = summary.split.model_dump() if summary.split is not None else {}
    for name, value in parts.items():
        share = numbers.percent(value / (sum(parts.values()) or 1.0))
        shown.append((_PARTS[name], numbers.seconds(value), f"{share} of the step"))
    if ends := numbers.interval(summary.step_interval_s, numbers.seconds):
        shown.append(("step, 95 % interval", ends, ""))
    return [
        *shown,
        ("ideal step", numbers.seconds(summary.ideal_step_s), "the same compute and bytes over ideal links"),
        ("retransmitted", numbers.size(summary.retransmitted_bytes_per_step), "per step"),
        *((f"{of} floor", f"{loss:.4f}", f"nats, {FLOORS[of]}") for of, loss in summary.floors.items()),
        ("steps measured", str(summary.measured_steps), entry.count),
        *(
            ("worst step", numbers.seconds(worst.seconds), f"run {result.run.number}: {describe_worst_step(worst)}")
            for result in entry.good
            if (worst := result.measured.worst) is not None
        ),
        *(
            ("background", numbers.size(each.carried_bytes), f"run {result.run.number}: {each.words}")
            for result in entry.good
            if result.lab is not None
            for each in result.lab.background or ()
        ),
        *(
            ("fault", numbers.seconds(None if each.began_ns is None else each.began_ns / 1e9), each.words)
            for result in entry.good[:1]
            if result.lab is not None
            for each in result.lab.faults or ()
        ),
        *(("fault", numbers.seconds(each.at_ns / 1e9), each.words) for each in entry.cell.node_faults),
        *(("mark", mark, "") for mark in entry.marks),
    ]


def _step(entry: Entry) -> dict[str, Any]:
    """Return the page's data on the typical run's median step: its drawing, and the traffic of each link in it."""
    result = entry.typical if entry.ok else entry.results[-1]
    step, lab = median_step(align(result.records)), result.lab
    return {
        "gantt": Markup(step_svg(step, entry.cell)) if step else "",
        "gantt_words": step_words(result, step) if step else "",
        **_worst(result),
        "links": list(_links(result, step)),
        "settings": "" if lab is None else json.dumps({link.name: link.settings for link in lab.links}, indent=1),
    }


def _worst(result: Result) -> dict[str, Any]:
    """Return the drawing of a run's worst step, with the faults in it, if it was much longer than the others."""
    summary, lab = result.summary, result.lab
    if summary is None or summary.worst is None:
        return {"worst": "", "worst_words": ""}
    step = next(step for step in align(result.records) if (step.phase, step.number) == ("train", summary.worst.step))
    since_ns = (lab.played_at_ns if lab is not None else None) or 0
    faults = [
        (since_ns + each.began_ns, step.end_ns if each.ended_ns is None else since_ns + each.ended_ns, each.words)
        for each in (lab.faults if lab is not None else None) or ()
        if each.began_ns is not None
    ]
    return {"worst": Markup(step_svg(step, result.cell, faults)), "worst_words": describe_worst_step(summary.worst)}


def _links(result: Result, step: PipelineStep | None) -> Iterator[tuple[str, ...]]:
    """Yield a row for each link: name, profile, requested; carried and busy, up and down; packets dropped."""
    cell, carried = result.cell, dict[tuple[int, str], int]()
    for sender, record in enumerate(step.records if step else ()):
        for frame in record.sent:
            neighbour = sender + (1 if frame.direction == "forward" else -1)
            for hop in route(cell, sender, neighbour if frame.peer is None else frame.peer):
                key = hop.link, hop.side
                carried[key] = carried.get(key, 0) + frame.frame_bytes
    samples = list(result.run.samples())
    for number, (name, profile) in enumerate(zip(cell.link_names, cell.links, strict=True)):
        texts = []
        for side in LINK_DIRECTIONS:
            sent, pipe = carried.get((number, side)), profile.pipe(side)
            busy = None if not (sent and step and pipe) else 8 * sent / pipe.rate_bps / step.seconds
            texts += [numbers.size(sent), MISSING if busy is None else numbers.percent(busy, "{:.0f}")]
        counts = samples[-1].links.get(name, {}).values() if samples else ()
        dropped = sum(count.dropped_buffer + (count.dropped_loss or 0) for count in counts)
        yield name, profile.name, link_words((profile,)), *texts, str(dropped) if samples else MISSING


def _calibration(cell: Cell, known: Calibration | None) -> dict[str, Any]:
    """Return the durations of actions as text, and as rows if they were timed: (stage, action, time, spread, samples,
    whether it is noisy).
    """
    clock = f"{CLOCKS[cell.clock]}; codec cost: {cell.codec_cost}" if cell.timing == "played" else CLOCKS[cell.clock]
    rows = []
    for stage, name, one in _timed(cell, known) if known is not None and cell.timing == "played" else ():
        times = numbers.seconds(one.ns / 1e9), numbers.percent(one.spread)
        rows.append((stage, name, *times, one.samples, one.noisy))
    return {"compute": f"Compute {compute_words(cell)}. {clock[0].upper()}{clock[1:]}.", "costs": rows}


def _timed(cell: Cell, known: Calibration) -> Iterator[tuple[str, str, Duration]]:
    """Yield the timed durations of a cell's recipe: stage or node, action, duration."""
    for stage, costs in enumerate(known.recipes.get(recipe_of(cell).id, ())):
        actions = {"forward": costs.forward, "backward": costs.backward, "clip": costs.clip, "update": costs.update}
        actions |= {f"encode, sent {way}": cost for way, cost in costs.encode.items()}
        actions |= {f"decode, came {way}": cost for way, cost in costs.decode.items()}
        actions |= {f"decode after a wait, came {way}": cost for way, cost in costs.decode_woken.items()}
        yield from ((f"stage {stage}", name, one) for name, one in actions.items())
    if (replicas := known.replicas.get(recipe_of(cell).id)) is None:
        return
    for node, name in enumerate(cell.node_names):
        if node < len(replicas.workers):
            worker = replicas.workers[node]
            yield from ((name, "local step", worker.local_step), (name, "its message's tensors", worker.close))
            yield name, "update", worker.update
        reduced = cell.data is not None and cell.data.exchange == "all-reduce"
        where, message = ("every worker", f"part {node}") if reduced else (name, "its message")
        for what, durations in (("encode", replicas.messages[node].encode), ("decode", replicas.messages[node].decode)):
            for fragment, one in enumerate(durations):
                of = f", fragment {fragment}" if len(durations) > 1 else ""
                yield where, f"{what} {message}{of}", one


def certified(result: Result) -> Certified:
    """Return a run's certificates as text."""
    certificates = result.certificates
    if certificates is None:
        return Certified(result, [], "none", "before or after", "", "")
    needed, taken = ("before", "after")[: len(certificates.needed)], result.taken
    missing = [when for when in needed if when not in dict(taken)]
    rejected = [
        f"{when}: {', '.join(map(_said, certificate.rejected))}" for when, certificate in taken if certificate.rejected
    ]
    words = " or ".join(missing), "; ".join(rejected), run_bound_words(certificates)
    return Certified(result, _checks(taken), certificates.verdict, *words)


def _said(rejected: Measurement) -> str:
    asked, measured = measurement_cells(rejected)
    return f"{rejected.link} {rejected.direction} {rejected.quantity} {measured} instead of {asked}"


def _checks(taken: Iterable[tuple[str, Certificate]]) -> list[Check]:
    """Pair the measurements before and after. A missing one is '-': some message sizes are known only after a run."""
    pairs: dict[tuple[str, str], dict[str, Measurement]] = {}
    for when, certificate in taken:
        for each in certificate.measurements:
            key = f"{each.link} {each.direction}", f"{each.quantity} {each.detail}".strip()
            pairs.setdefault(key, {})[when] = each
    checks = []
    for key, pair in pairs.items():
        asked, _ = measurement_cells(next(iter(pair.values())))
        before, after = (measurement_cells(pair[when])[1] if when in pair else MISSING for when in ("before", "after"))
        moves = share_text(max((each.bound for each in pair.values() if each.bound is not None), default=None))
        verdict = "FAIL" if any(each.verdict == "FAIL" for each in pair.values()) else "PASS"
        notes = dict.fromkeys(each.note for each in pair.values() if each.note)
        checks.append(Check(*key, asked, before, after, moves, verdict, "; ".join(notes)))
    return checks
