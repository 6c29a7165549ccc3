"""The table of results, in the terminal and on the page, and the table of a certificate. A missing number is '-', never 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from testbed.metrics import compare
from testbed.metrics.compare import RUN_TO_RUN
from testbed.metrics.statistics import Interval
from testbed.records import Certificate, Measurement
from testbed.report import collect
from testbed.report.collect import BASELINE, SECOND_BASELINE, Group
from testbed.report.entry import Entry
from testbed.results import Run

MISSING = "-"
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def three(value: float | None) -> str:
    """Three significant digits, never an exponent: 1234.5 -> '1234' (rounded half to even), 1.234 -> '1.23', None -> '-'."""
    if value is None or not math.isfinite(value):
        return MISSING
    rounded = float(f"{value:.3g}")
    digits = 2 if rounded == 0 else max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:.{min(digits, 6)}f}"


def seconds(value: float | None) -> str:
    """0.4123 -> '412 ms', 12.3 -> '12.3 s'."""
    if value is None:
        return MISSING
    return f"{three(value * 1e3)} ms" if value < 1 else f"{three(value)} s"


def size(value: float | None) -> str:
    """1_048_576 -> '1.05 MB'."""
    if value is None:
        return MISSING
    unit, name = next(((u, n) for u, n in _SIZES if value >= u), (1.0, "B"))
    return f"{three(value / unit)} {name}" if unit > 1 else f"{value:.0f} B"


class Column(NamedTuple):
    """What a column holds."""

    name: str
    unit: str
    short: str = ""
    """The heading in the terminal, two lines; empty: on the page only."""
    numeric: bool = True


class Row(NamedTuple):
    """One entry as text; `cells` follow the columns of its table."""

    entry: Entry
    cells: tuple[str, ...]
    best: bool
    """Sound, and the shortest step of its network, separable from all others."""


class ResultTable(NamedTuple):
    """A group's numbers as text."""

    columns: tuple[Column, ...]
    sections: dict[str, list[Row]]
    """By network."""


def certificate_word(entry: Entry) -> str:
    """'pass', 'FAIL', or 'none' where a run has no certificate."""
    if entry.measured.certificate is None:
        return "none"
    return "pass" if entry.certified else "FAIL"


def gain(group: Group, network: str, entry: Entry, baseline: str = BASELINE) -> str:
    """How many times as fast as the baseline: '1.35x'; '~1.01x' where it cannot be told from 1."""
    found = group.compared(network, entry, baseline)
    if found is None or found.speed_up is None:
        return MISSING
    own = entry.cell.codec == baseline
    return f"{'' if found.separable or own else '~'}{found.speed_up.value:.2f}x"


def interval(found: Interval | tuple[float, float] | None, form: str) -> str:
    """'[1.32, 1.39]'; empty where there is none."""
    return "" if found is None else f"[{form.format(found[0])}, {form.format(found[1])}]"


def byte_unit(values: Iterable[float | None]) -> tuple[float, str]:
    """The unit that suits the largest."""
    largest = max((value for value in values if value is not None), default=0.0)
    return next(((unit, name) for unit, name in _SIZES if largest >= unit), _SIZES[-1])


class _Scale(NamedTuple):
    """What all tables of a report share, so that they stand below each other."""

    step: float
    bytes: float
    second: bool
    """Whether there is anything to compare with the second baseline."""
    uncompressed: bool


def result_tables(found: Sequence[Group]) -> list[ResultTable]:
    """Every number that the terminal and the page show, a table a group, all with the same columns."""
    done = [entry.measured for group in found for entry in group.entries if entry.ok]
    longest = max((s.step_s for s in done if s.step_s is not None), default=0.0)
    step_unit, step_name = (1.0, "s") if longest >= 10 else (1e3, "ms")
    bytes_, byte_name = byte_unit(b for s in done for b in (s.wire_bytes_per_step, s.payload_bytes_per_step))
    scale = _Scale(
        step=step_unit,
        bytes=bytes_,
        second=any(SECOND_BASELINE in group.codecs for group in found),
        uncompressed=any(s.uncompressed_loss is not None for s in done),
    )
    columns = (
        Column("step", step_name, f"step\n{step_name}"),
        Column("speed-up", f"over {BASELINE}", f"vs\n{BASELINE}"),
        *([Column("speed-up", f"over {SECOND_BASELINE}", f"vs\n{SECOND_BASELINE}")] if scale.second else []),
        Column("throughput", "tokens/s"),
        Column("payload", f"{byte_name}/step", f"payload\n{byte_name}/step"),
        Column("wire", f"{byte_name}/step", f"wire\n{byte_name}/step"),
        Column("compression", "raw/payload", "ratio\nto fp32"),
        Column("validation loss", "nats/token", "val.\nloss"),
        *([Column("the same, uncompressed", "nats/token", "un-\ncompr.")] if scale.uncompressed else []),
        Column("efficiency", "ideal/measured", "effi-\nciency"),
        Column("certificate", "", "\ncert.", numeric=False),
    )
    return [
        ResultTable(
            columns,
            {
                network: [
                    Row(entry, _cells(group, network, entry, scale) if entry.ok else (), entry is best)
                    for best in (_best(group, network),)
                    for entry in group.row(network)
                ]
                for network in group.networks
            },
        )
        for group in found
    ]


def _cells(group: Group, network: str, entry: Entry, scale: _Scale) -> tuple[str, ...]:
    summary = entry.measured

    def scaled(value: float | None, unit: float) -> str:
        return three(None if value is None else value / unit)

    def loss(value: float | None) -> str:
        return MISSING if value is None else f"{value:.4f}"

    return (
        three(None if summary.step_s is None else summary.step_s * scale.step),
        gain(group, network, entry),
        *([gain(group, network, entry, SECOND_BASELINE)] if scale.second else []),
        three(summary.tokens_per_s),
        scaled(summary.payload_bytes_per_step, scale.bytes),
        scaled(summary.wire_bytes_per_step, scale.bytes),
        MISSING if summary.compression_ratio is None else f"{three(summary.compression_ratio)}x",
        loss(summary.validation_loss),
        *([loss(summary.uncompressed_loss)] if scale.uncompressed else []),
        MISSING if summary.efficiency is None else f"{summary.efficiency:.2f}",
        certificate_word(entry),
    )


def _best(group: Group, network: str) -> Entry | None:
    """The sound entry that is faster than each of the others and can be told from it."""
    timed = [entry for entry in group.finished(network) if entry.measured.step_s]
    timed.sort(key=lambda entry: entry.measured.step_s or 0.0)
    if len(timed) < 2 or not timed[0].sound:
        return None
    return timed[0] if all(compare(timed[0].steps, other.steps).separable for other in timed[1:]) else None


HOLLOW, NOTED = "○", "†"
"""In front of what is not sound; behind what must be read together with a note."""


def _mark(entry: Entry) -> Text:
    hollow = entry.ok and not entry.sound
    noted = NOTED if entry.ok and _notable(entry) else ""
    return Text(f"{HOLLOW if hollow else ' '} {entry.cell.codec}{noted}", style="yellow" if hollow else "")


def _notable(entry: Entry) -> list[str]:
    return [mark for mark in entry.marks if mark != "not certified"]


def terminal_table(runs: Iterable[Run]) -> Table:
    """Codecs by network, for the end of a sweep. Runs that did not end well have a row that says why."""
    found = collect.groups(collect.read(runs))
    shown = result_tables(found)
    columns = shown[0].columns if shown else ()
    table = Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", caption_justify="left", caption_style="dim"
    )
    table.add_column("network\n  codec", overflow="fold", min_width=15)
    for column in columns:
        if column.short:
            table.add_column(column.short, justify="right" if column.numeric else "left", no_wrap=True)
    for group, one in zip(found, shown, strict=True):
        if group.label:
            table.add_row(Text(group.label, style="bold italic"))
        for network, rows in one.sections.items():
            table.add_row(Text(network, style="bold"))
            for row in rows:
                if row.entry.ok:
                    texts = [cell for column, cell in zip(columns, row.cells, strict=True) if column.short]
                    table.add_row(
                        _mark(row.entry),
                        *(Text(cell, style="bold" if row.best and i < 2 else "") for i, cell in enumerate(texts)),
                    )
                else:
                    table.add_row(Text(f"  {row.entry.cell.codec}", style="red"), Text("-", style="red"))
    table.caption = "\n".join(_notes(found, shown))
    return table


def _notes(found: Sequence[Group], shown: Sequence[ResultTable]) -> list[str]:
    everything = [entry for group in found for entry in group.entries]
    finished = [entry for entry in everything if entry.ok]
    notes = []
    if any(not entry.certified for entry in finished):
        notes.append(f"{HOLLOW} no two passing certificates: the link was not shown to be what the profile says")
    noted: dict[str, list[str]] = {}
    for entry in finished:
        for mark in _notable(entry):
            noted.setdefault(mark, []).append(f"{entry.cell.codec} over {entry.cell.network}")
    notes += [
        f"{NOTED} {mark}: {'all' if len(who) == len(finished) else ', '.join(who)}" for mark, who in noted.items()
    ]
    if any(
        cell.startswith("~") for one in shown for rows in one.sections.values() for row in rows for cell in row.cells
    ):
        notes.append(
            f"~ not separable: the 95 % interval contains 1, or one pair of runs differs by less than {RUN_TO_RUN:.0%}"
        )
    counts = sorted({entry.count for entry in finished})
    notes += [f"each row: {' or '.join(counts)}"] if counts not in ([], ["1 run"]) else []
    return notes + [f"{entry.cell.id} {entry.outcome}" for entry in everything if not entry.ok]


_SHOWN = {"bit/s": (1e-6, "Mbit/s"), "share": (100.0, "%")}
"""Unit of a record -> how it is shown."""


def measurement_cells(one: Measurement) -> tuple[str, str, str]:
    """(asked, measured, tolerance) with the unit; '-' where nothing was asked or found."""

    factor, unit = _SHOWN.get(one.unit, (1.0, one.unit))

    def text(value: float | None, digits: int) -> str:
        return MISSING if value is None else f"{value * factor:.{digits}g} {unit}"

    tolerance = text(one.tolerance, 2)
    return text(one.expected, 4), text(one.measured, 4), tolerance if tolerance == MISSING else f"±{tolerance}"


def certificate_table(certificate: Certificate) -> Table:
    """Asked against measured, one row a quantity, for the terminal; what must be known about them stands below."""
    table = Table(
        box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", caption_justify="left", caption_style=""
    )
    for title in ("link", "", "quantity", "asked", "measured", "tolerance", "n", "verdict"):
        numeric = title in ("asked", "measured", "tolerance", "n")
        # Only the quantity's detail gives way on a narrow terminal.
        table.add_column(title, justify="right" if numeric else "left", overflow="fold", no_wrap=title != "quantity")
    notes: dict[str, list[str]] = {}
    for one in certificate.measurements:
        verdict = Text(one.verdict, style="green" if one.verdict == "PASS" else "bold red")
        quantity = f"{one.quantity}, {one.detail}" if one.detail else one.quantity
        direction = "" if one.direction == "both" else one.direction
        table.add_row(one.link, direction, Text(quantity), *measurement_cells(one), str(one.samples), verdict)
        if one.note:
            notes.setdefault(one.note, []).append(
                " ".join(part for part in (one.link, direction, one.quantity) if part)
            )
    if notes:
        table.caption = Text("\n".join(f"{', '.join(dict.fromkeys(who))}: {note}" for note, who in notes.items()))
    return table


def certificate_summary(name: str, certificate: Certificate) -> str:
    """The verdict in a line, and why."""
    failed = [one for one in certificate.measurements if one.verdict == "FAIL"]
    measured = f"{len(certificate.measurements)} quantities in {certificate.seconds:.1f} s, {certificate.form} form"
    lines = [f"{name}: {certificate.verdict}, {measured}"]
    for one in failed:
        asked, found, tolerance = measurement_cells(one)
        lines.append(
            f"  {one.link} {one.direction} {one.quantity}: asked {asked} {tolerance}, found {found}: {one.note}"
        )
    if certificate.rejected:
        first = ", ".join(dict.fromkeys(f"{one.link} {one.direction} {one.quantity}" for one in certificate.rejected))
        lines.append(f"  measured twice; out of tolerance the first time: {first}")
    return "\n".join(lines)
