"""The table of results, for terminal and page; each row of COLUMNS defines one column of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from testbed.metrics import compare
from testbed.metrics.compare import RUN_TO_RUN
from testbed.records import Summary
from testbed.report import collect
from testbed.report.collect import BASELINE, SECOND_BASELINE, Group
from testbed.report.entry import Entry
from testbed.report.numbers import MISSING, byte_unit, three
from testbed.results import Run


class Units(NamedTuple):
    """The units shared by all tables of a report: a factor and a name each."""

    step: tuple[float, str]
    bytes: tuple[float, str]
    token: str
    """Unit that losses are averaged over: token, image, or either."""

    def scaled_bytes(self, value: float | None) -> str:
        return three(None if value is None else value / self.bytes[0])


class _Cell(NamedTuple):
    """The input of a column's text: a finished entry, its place, and the report's units."""

    group: Group
    network: str
    entry: Entry
    units: Units

    @property
    def summary(self) -> Summary:
        return self.entry.measured


class ResultColumn(NamedTuple):
    """One column of the table of results."""

    name: str
    unit: str
    """May contain {step}, {bytes} and {token}, which stand for the report's units."""
    short: str
    """Heading in the terminal, two lines; empty: the column is only on the page."""
    text: Callable[[_Cell], str]
    numeric: bool = True
    needed: Callable[[Sequence[Group]], bool] = lambda groups: True
    """Whether the groups of a report have a value for it."""

    def named(self, units: Units) -> ResultColumn:
        """Return the column with the units in its headings."""
        names = {"step": units.step[1], "bytes": units.bytes[1], "token": units.token}
        return self._replace(unit=self.unit.format(**names), short=self.short.format(**names))


class ResultRow(NamedTuple):
    """One entry as text; `cells` follow the columns of its table, and are empty without a finished run."""

    entry: Entry
    cells: tuple[str, ...]
    best: bool
    """Whether it is sound and has the shortest step over its network, separable from all others."""


class ResultTable(NamedTuple):
    """A group's numbers as text."""

    columns: tuple[ResultColumn, ...]
    units: Units
    sections: dict[str, list[ResultRow]]
    """Network -> its rows."""


def _step(cell: _Cell) -> str:
    return three(None if cell.summary.step_s is None else cell.summary.step_s * cell.units.step[0])


def _ratio(cell: _Cell) -> str:
    ratio = cell.summary.compression_ratio
    return MISSING if ratio is None else f"{three(ratio)}x"


def _decimals(name: str, digits: int) -> Callable[[_Cell], str]:
    """Format a number of Summary with `digits` decimals."""

    def text(cell: _Cell) -> str:
        value = getattr(cell.summary, name)
        return MISSING if value is None else f"{value:.{digits}f}"

    return text


def _bytes(name: str) -> Callable[[_Cell], str]:
    """Format a size of Summary in the report's unit."""
    return lambda cell: cell.units.scaled_bytes(getattr(cell.summary, name))


def _some(name: str) -> Callable[[Sequence[Group]], bool]:
    """Return whether any entry has that number of Summary."""
    return lambda groups: any(getattr(summary, name) is not None for summary in _summaries(groups))


def _gain_over(baseline: str) -> Callable[[_Cell], str]:
    return lambda cell: gain(cell.group, cell.network, cell.entry, baseline)


def _certificate(cell: _Cell) -> str:
    """Return 'pass', 'FAIL', or 'none' if a run has no certificate."""
    if cell.summary.certificate is None:
        return "none"
    return "pass" if cell.entry.certified else "FAIL"


def _summaries(groups: Sequence[Group]) -> list[Summary]:
    return [entry.measured for group in groups for entry in group.entries if entry.ok]


COLUMNS: tuple[ResultColumn, ...] = (
    ResultColumn("step", "{step}", "step\n{step}", _step),
    ResultColumn("speed-up", f"over {BASELINE}", f"vs\n{BASELINE}", _gain_over(BASELINE)),
    ResultColumn(
        "speed-up",
        f"over {SECOND_BASELINE}",
        f"vs\n{SECOND_BASELINE}",
        _gain_over(SECOND_BASELINE),
        needed=lambda groups: any(SECOND_BASELINE in group.codecs for group in groups),
    ),
    ResultColumn("throughput", "{token}s/s", "", lambda cell: three(cell.summary.tokens_per_s)),
    ResultColumn("payload", "{bytes}/step", "payload\n{bytes}/step", _bytes("payload_bytes_per_step")),
    ResultColumn("wire", "{bytes}/step", "wire\n{bytes}/step", _bytes("wire_bytes_per_step")),
    ResultColumn("compression", "raw/payload", "ratio\nto fp32", _ratio),
    ResultColumn("validation loss", "nats/{token}", "val.\nloss", _decimals("validation_loss", 4)),
    ResultColumn(
        "accuracy",
        "of test images",
        "accu-\nracy",
        _decimals("validation_accuracy", 4),
        needed=_some("validation_accuracy"),
    ),
    ResultColumn(
        "the same, uncompressed",
        "nats/{token}",
        "un-\ncompr.",
        _decimals("uncompressed_loss", 4),
        needed=_some("uncompressed_loss"),
    ),
    ResultColumn("efficiency", "ideal/measured", "effi-\nciency", _decimals("efficiency", 2)),
    ResultColumn("certificate", "", "\ncert.", _certificate, numeric=False),
)
"""Every number of the table, in order. To show another metric, add its row."""


def gain(group: Group, network: str, entry: Entry, baseline: str = BASELINE) -> str:
    """Format the speed-up of an entry over the baseline: '1.35x'; '~1.01x' if it is not separable from 1."""
    comparison = group.compared(network, entry, baseline)
    if comparison is None or comparison.speed_up is None:
        return MISSING
    own = entry.cell.codec == baseline
    return f"{'' if comparison.separable or own else '~'}{comparison.speed_up.value:.2f}x"


def result_tables(groups: Sequence[Group]) -> list[ResultTable]:
    """Make the tables that the terminal and the page show: one per group, all with the same columns and units."""
    summaries = _summaries(groups)
    longest = max((summary.step_s for summary in summaries if summary.step_s is not None), default=0.0)
    moved = (value for summary in summaries for value in (summary.wire_bytes_per_step, summary.payload_bytes_per_step))
    tokens = " or ".join(sorted({group.token for group in groups}))
    units = Units(step=(1.0, "s") if longest >= 10 else (1e3, "ms"), bytes=byte_unit(moved), token=tokens)
    columns = tuple(column.named(units) for column in COLUMNS if column.needed(groups))
    return [
        ResultTable(columns, units, {network: _rows(group, network, columns, units) for network in group.networks})
        for group in groups
    ]


def _rows(group: Group, network: str, columns: Sequence[ResultColumn], units: Units) -> list[ResultRow]:
    best = _best(group, network)
    return [
        ResultRow(entry, entry_texts(group, network, entry, columns, units) if entry.ok else (), entry is best)
        for entry in group.row(network)
    ]


def entry_texts(
    group: Group, network: str, entry: Entry, columns: Sequence[ResultColumn], units: Units
) -> tuple[str, ...]:
    """Return the text of each column for a finished entry, which need not belong to the group."""
    cell = _Cell(group, network, entry, units)
    return tuple(column.text(cell) for column in columns)


def _best(group: Group, network: str) -> Entry | None:
    """Return the sound entry that is faster than each of the others, and separable from it."""
    timed = [entry for entry in group.finished(network) if entry.measured.step_s]
    timed.sort(key=lambda entry: entry.measured.step_s or 0.0)
    if len(timed) < 2 or not timed[0].sound:
        return None
    return timed[0] if all(compare(timed[0].steps, other.steps).separable for other in timed[1:]) else None


HOLLOW, NOTED = "○", "†"
"""Marks: before an unsound entry; after an entry with a note."""


def _mark(entry: Entry) -> Text:
    hollow = entry.ok and not entry.sound
    noted = NOTED if entry.ok and _notable(entry) else ""
    return Text(f"{HOLLOW if hollow else ' '} {entry.cell.codec}{noted}", style="yellow" if hollow else "")


def _notable(entry: Entry) -> list[str]:
    return [mark for mark in entry.marks if mark != "not certified"]


def terminal_table(runs: Iterable[Run]) -> Table:
    """Make the table of codecs by network of these runs, see `table_of`."""
    return table_of(collect.groups(collect.read_runs(runs)))


def table_of(groups: Sequence[Group]) -> Table:
    """Make the table of codecs by network that is printed at the end of a sweep.

    Entries without a finished run have a row with the reason.
    """
    tables = result_tables(groups)
    columns = tables[0].columns if tables else ()
    drawn = Table(
        box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", caption_justify="left", caption_style="dim"
    )
    drawn.add_column("network\n  codec", overflow="fold", min_width=15)
    for column in columns:
        if column.short:
            drawn.add_column(column.short, justify="right" if column.numeric else "left", no_wrap=True)
    for group, table in zip(groups, tables, strict=True):
        if group.label:
            drawn.add_row(Text(group.label, style="bold italic"))
        for network, rows in table.sections.items():
            drawn.add_row(Text(network, style="bold"))
            for row in rows:
                if row.entry.ok:
                    texts = [text for column, text in zip(columns, row.cells, strict=True) if column.short]
                    bold = ["bold" if row.best and place < 2 else "" for place in range(len(texts))]
                    drawn.add_row(_mark(row.entry), *map(Text, texts, bold))
                else:
                    drawn.add_row(Text(f"  {row.entry.cell.codec}", style="red"), Text("-", style="red"))
    drawn.caption = "\n".join(_notes(groups, tables))
    return drawn


def _notes(groups: Sequence[Group], tables: Sequence[ResultTable]) -> list[str]:
    entries = [entry for group in groups for entry in group.entries]
    finished = [entry for entry in entries if entry.ok]
    notes = []
    if any(not entry.certified for entry in finished):
        notes.append(f"{HOLLOW} not two passing certificates: the link was not shown to match its profile")
    noted: dict[str, list[str]] = {}
    for entry in finished:
        for mark in _notable(entry):
            noted.setdefault(mark, []).append(entry.name)
    notes += [
        f"{NOTED} {mark}: {'all' if len(who) == len(finished) else ', '.join(who)}" for mark, who in noted.items()
    ]
    rows = [row for table in tables for section in table.sections.values() for row in section]
    if any(text.startswith("~") for row in rows for text in row.cells):
        alike = f"a single pair of runs differs by less than {RUN_TO_RUN:.0%}"
        notes.append(f"~ not separable: the 95 % interval contains 1, or {alike}")
    counts = sorted({entry.count for entry in finished})
    notes += [f"each row: {' or '.join(counts)}"] if counts not in ([], ["1 run"]) else []
    return notes + [f"{entry.cell.id} {entry.outcome}" for entry in entries if not entry.ok]
