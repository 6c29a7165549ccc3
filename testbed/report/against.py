"""A page that compares two result folders: which runs became faster or slower, and what else differs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from testbed import results
from testbed.errors import ResultsError
from testbed.metrics import compare
from testbed.report import collect, numbers
from testbed.report.collect import Group
from testbed.report.comparison import Shown
from testbed.report.entry import Entry
from testbed.report.numbers import MISSING, interval
from testbed.report.settings import flat
from testbed.report.templates import write_page

_SAME_S = 1e-12
"""Relative difference below which steps are equal: they are sums of nanoseconds as floating-point numbers."""


class _Row(NamedTuple):
    label: str
    network: str
    codec: str
    equal: str
    """cell: both have the same cell; name: only network and codec are equal."""
    shown: tuple[Shown, ...]
    ratio: float | None
    """Ratio of their step to ours; None if either has none."""
    certain: bool


def _groups(folder: Path) -> list[Group]:
    groups = collect.groups(collect.read_runs(collect.latest(folder, results.last_sweep(folder).cells)))
    if not groups:
        raise ResultsError(f"{folder} has no run of its last sweep, so there is nothing to compare; run it again")
    return groups


def _entries(groups: Iterable[Group]) -> list[tuple[str, str, Entry]]:
    """Return (label of the group, network, entry) of every finished entry."""
    places = [(group, network) for group in groups for network in group.networks]
    return [(group.label, network, entry) for group, network in places for entry in group.finished(network)]


def write_against(ours: Path, theirs: Path) -> Path:
    """Write the page `against-NAME.html` into the first of two result folders; return it.

    Entries are matched by cell, or otherwise by network and codec, if each folder has one such entry. ResultsError if
    nothing matches.
    """
    left, right = _entries(_groups(ours)), _entries(_groups(theirs))
    by_cell = {cell_id: entry for _, _, entry in right for cell_id in entry.cell_ids}
    by_name: dict[tuple[str, str], list[Entry]] = {}
    for _, network, entry in right:
        by_name.setdefault((network, entry.cell.codec), []).append(entry)
    once = [(network, entry.cell.codec) for _, network, entry in left]
    rows, alone = [], []
    differing: dict[str, tuple[set[str], set[str]]] = {}
    rules: dict[str, None] = {}
    matched: set[int] = set()
    for label, network, entry in left:
        key = network, entry.cell.codec
        other = next((by_cell[name] for name in entry.cell_ids if name in by_cell), None)
        equal = "name" if other is None else "cell"
        named = by_name.get(key, [])
        if other is None and len(named) == 1 and once.count(key) == 1:
            other = named[0]
        if other is None:
            alone.append(f"{entry.cell.codec} over {network}")
            continue
        matched.add(id(other))
        rows.append(_row(label, network, entry, other, equal, rules))
        if equal == "name":
            for setting, values in _differing(entry, other).items():
                for seen, value in zip(differing.setdefault(setting, (set(), set())), values, strict=True):
                    seen.add(value)
    if not rows:
        raise ResultsError(f"no cell of {ours} matches one of {theirs}: they share no network and codec")
    lost = [f"{entry.cell.codec} over {network}" for _, network, entry in right if id(entry) not in matched]
    names = _names(ours, theirs)
    return write_page(
        ours / f"against-{names[1]}.html",
        "against",
        title=f"{names[0]} against {names[1]}",
        ours=names[0],
        theirs=names[1],
        labelled=len({row.label for row in rows}) > 1,
        rows=rows,
        rule="; ".join(rules) or "nothing",
        differing=[(key, *("; ".join(sorted(side)) for side in sides)) for key, sides in sorted(differing.items())],
        sentences=_sentences(rows, names, alone, lost),
    )


def _names(ours: Path, theirs: Path) -> tuple[str, str]:
    """Return a name for each folder: its own, prefixed by its parent's if both are equal."""
    left, right = ours.resolve(), theirs.resolve()
    if left.name != right.name:
        return left.name, right.name
    return f"{left.parent.name}-{left.name}", f"{right.parent.name}-{right.name}"


def _row(label: str, network: str, ours: Entry, theirs: Entry, equal: str, rules: dict[str, None]) -> _Row:
    compared = compare(ours.steps, theirs.steps)
    first, second = ours.measured, theirs.measured
    speed, loss = compared.speed_up, compared.loss_difference
    ratio, signed = Shown(MISSING), "{:+.4f}".format
    if speed is not None:
        rules[speed.rule] = None
        sure = f"{interval(speed.interval, '{:.3f}'.format)}{'' if compared.separable else ' not separable'}"
        ratio = Shown(f"{speed.value:.3f}x", "the same" if abs(speed.value - 1) < _SAME_S else sure)
    wire = Shown(MISSING)
    if first.wire_bytes_per_step and second.wire_bytes_per_step:
        wire = Shown(f"{second.wire_bytes_per_step / first.wire_bytes_per_step:.3f}x")
    shown = (
        *(Shown(numbers.three(None if s.step_s is None else 1e3 * s.step_s)) for s in (first, second)),
        ratio,
        Shown(MISSING if loss is None else signed(loss.value + 0.0), interval(loss and loss.interval, signed)),
        wire,
    )
    certain = compared.separable and speed is not None and abs(speed.value - 1) >= _SAME_S
    return _Row(label, network, ours.cell.codec, equal, shown, None if speed is None else speed.value, certain)


def _differing(ours: Entry, theirs: Entry) -> dict[str, tuple[str, str]]:
    left, right = (flat(entry.cell.model_dump(mode="json", exclude={"training": {"seed"}})) for entry in (ours, theirs))
    return {
        key: (left.get(key, MISSING), right.get(key, MISSING))
        for key in left.keys() | right.keys()
        if left.get(key) != right.get(key)
    }


def _sentences(rows: list[_Row], names: tuple[str, str], alone: list[str], lost: list[str]) -> list[str]:
    timed = [row for row in rows if row.ratio is not None]
    faster = [row for row in timed if row.certain and (row.ratio or 1) > 1]
    slower = [row for row in timed if row.certain and (row.ratio or 1) < 1]
    said = [
        f"{len(rows)} pairs, {sum(row.equal == 'cell' for row in rows)} of them of the same cell: {names[0]} is faster "
        f"in {len(faster)}, slower in {len(slower)}, and equal or not separable in "
        f"{len(timed) - len(faster) - len(slower)}."
    ]
    for several, pick, word in ((faster, max, "Most faster"), (slower, min, "Most slower")):
        if several:
            row = pick(several, key=lambda row: row.ratio or 1.0)
            said.append(f"{word}: {row.codec} over {row.network}, {row.ratio:.3f} times as fast.")
    for name, entries in zip(names, (alone, lost), strict=True):
        if entries:
            more = f" and {len(entries) - 5} more" if len(entries) > 5 else ""
            said.append(f"Only in {name}: {', '.join(entries[:5])}{more}.")
    return said
