"""The table of results, in the terminal and on the page, and the table of a certificate. A missing number is '-', never 0."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from testbed.records import Certificate, Measurement, Summary
from testbed.report import collect
from testbed.report.collect import Group, Result
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
    short: str
    """The heading where there is little room, two lines."""
    numeric: bool = True


class Row(NamedTuple):
    """One run as text; `cells` follow the columns of its table."""

    result: Result
    cells: tuple[str, ...]
    best: bool
    """Certified, and the shortest step of its network by more than the spread of the steps."""


class ResultTable(NamedTuple):
    """A group's numbers as text."""

    columns: tuple[Column, ...]
    sections: dict[str, list[Row]]
    """By network."""


def certificate_word(summary: Summary | None) -> str:
    """'pass', 'FAIL', or 'none' where the run has no certificate."""
    if summary is None or summary.certificate is None:
        return "none"
    return "pass" if summary.certificate == "PASS" else "FAIL"


def speed_up(summary: Summary, baseline: Summary | None) -> float | None:
    """How many times faster than the baseline a step is."""
    if baseline is None or not baseline.step_s or not summary.step_s:
        return None
    return baseline.step_s / summary.step_s


def apart(one: Summary, other: Summary) -> bool:
    """Whether two step times differ by more than noise: the middle halves of their steps do not overlap, and 3 % lie between."""
    if one.step_s is None or other.step_s is None or one.step_quartiles_s is None or other.step_quartiles_s is None:
        return False
    disjoint = one.step_quartiles_s[1] < other.step_quartiles_s[0] or other.step_quartiles_s[1] < one.step_quartiles_s[0]
    return disjoint and max(one.step_s, other.step_s) > 1.03 * min(one.step_s, other.step_s)


def result_table(group: Group) -> ResultTable:
    """Every number that the terminal and the page show, in units that suit the whole table."""
    done = [result.measured for result in group.results if result.ok]
    longest = max((s.step_s for s in done if s.step_s is not None), default=0.0)
    step_unit, step_name = (1.0, "s") if longest >= 10 else (1e3, "ms")
    largest = max((b for s in done for b in (s.wire_bytes_per_step, s.payload_bytes_per_step) if b is not None), default=0.0)
    byte_unit, byte_name = next(((u, n) for u, n in _SIZES if largest >= u), (1.0, "B"))
    columns = (
        Column("step", step_name, f"step\n{step_name}"),
        Column("speed-up", "over fp32", "speed-up\nvs fp32"),
        Column("throughput", "tokens/s", "tokens\n/s"),
        Column("payload", f"{byte_name}/step", f"payload\n{byte_name}/step"),
        Column("wire", f"{byte_name}/step", f"wire\n{byte_name}/step"),
        Column("compression", "raw/payload", "ratio\nto fp32"),
        Column("validation loss", "nats/token", "val.\nloss"),
        Column("efficiency", "ideal/measured", "effi-\nciency"),
        Column("certificate", "", "\ncert.", numeric=False),
    )

    def texts(summary: Summary, baseline: Summary | None) -> tuple[str, ...]:
        def scaled(value: float | None, unit: float) -> str:
            return three(None if value is None else value / unit)

        loss = summary.validation_loss
        ratio = speed_up(summary, baseline)
        return (
            three(None if summary.step_s is None else summary.step_s * step_unit),
            MISSING if ratio is None else f"{ratio:.2f}x",
            three(summary.tokens_per_s),
            scaled(summary.payload_bytes_per_step, byte_unit),
            scaled(summary.wire_bytes_per_step, byte_unit),
            MISSING if summary.compression_ratio is None else f"{three(summary.compression_ratio)}x",
            MISSING if loss is None else f"{loss:.4f}",
            MISSING if summary.efficiency is None else f"{summary.efficiency:.2f}",
            certificate_word(summary),
        )

    sections: dict[str, list[Row]] = {}
    for network in group.networks:
        baseline, finished = group.baseline(network), group.finished(network)
        sections[network] = []
        for result in group.row(network):
            others = [other.measured for other in finished if other is not result]
            best = result.ok and result.certified and bool(others) and all(_beats(result.measured, other) for other in others)
            cells = texts(result.measured, baseline) if result.ok else ()
            sections[network].append(Row(result, cells, best))
    return ResultTable(columns, sections)


def _beats(one: Summary, other: Summary) -> bool:
    return bool(one.step_s and other.step_s and one.step_s < other.step_s and apart(one, other))


def _mark(row: Row) -> Text:
    hollow = row.result.ok and not row.result.certified
    return Text(f"{'○' if hollow else ' '} {row.result.cell.codec}", style="yellow" if hollow else "")


def terminal_table(runs: Iterable[Run]) -> Table:
    """Codecs by network, for the end of a sweep. Runs that did not end well have a row that says why."""
    found = collect.groups(collect.read(runs))
    shown = [result_table(group) for group in found]
    columns = shown[0].columns if shown else ()
    table = Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", caption_justify="left", caption_style="dim"
    )
    table.add_column("network\n  codec", overflow="fold", min_width=15)
    for column in columns:
        table.add_column(column.short, justify="right" if column.numeric else "left", no_wrap=True)
    for group, one in zip(found, shown, strict=True):
        units = "" if one.columns == columns else f" (step in {one.columns[0].unit}, bytes in {one.columns[3].unit})"
        if group.label or units:
            table.add_row(Text(group.label + units, style="bold italic"))
        for network, rows in one.sections.items():
            table.add_row(Text(network, style="bold"))
            for row in rows:
                if row.result.ok:
                    table.add_row(
                        _mark(row), *(Text(cell, style="bold" if row.best and i < 2 else "") for i, cell in enumerate(row.cells))
                    )
                else:
                    table.add_row(Text(f"  {row.result.cell.codec}", style="red"), Text("-", style="red"))
    table.caption = "\n".join(_notes(found))
    return table


def _notes(found: Sequence[Group]) -> list[str]:
    everything = [result for group in found for result in group.results]
    notes = []
    if any(result.ok and not result.certified for result in everything):
        notes.append("○ no two passing certificates: the link was not shown to be what the profile says")
    notes += [f"{result.cell.id} {result.outcome}" for result in everything if not result.ok]
    return notes


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
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold", caption_justify="left", caption_style="")
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
            notes.setdefault(one.note, []).append(" ".join(part for part in (one.link, direction, one.quantity) if part))
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
        lines.append(f"  {one.link} {one.direction} {one.quantity}: asked {asked} {tolerance}, found {found}: {one.note}")
    if certificate.rejected:
        first = ", ".join(dict.fromkeys(f"{one.link} {one.direction} {one.quantity}" for one in certificate.rejected))
        lines.append(f"  measured twice; out of tolerance the first time: {first}")
    return "\n".join(lines)
