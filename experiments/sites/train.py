"""Train a small language model by each layout of layouts.py: `python experiments/sites/train.py`.

This writes curves.csv, validation losses at each layout's best learning rate; tuning.csv, what was tried; and
layouts.csv, what each sends in an exchange. Sites and times are in cells.toml; figures.py puts batches and seconds
together. Who is away when was played before: rounds.csv in the results. What is in the output folder already is kept,
but for what was trained with other absences than these.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import rounds
from layouts import LAYOUTS, Layout

from testbed import csv_rows
from testbed.studies.tuned_text import FULL, QUICK, Curve, Tuned, train_all
from testbed.workloads.characters import VALUES

HERE = Path(__file__).resolve().parent


class Listed(NamedTuple):
    """A line of layouts.csv."""

    layout: str
    workers: int
    local_steps: int
    sequences: int
    """Of all workers, in a batch."""
    bits: float
    """Of a worker's message, per parameter."""
    absences: str
    """A digest of who was away when; empty: nobody."""


def listed(layout: Layout, found: Sequence[Curve]) -> Listed:
    """Say what a layout sends, by what one of its trainings has sent."""
    method, last = layout.method, found[-1]
    bits = 8 * last.payload_bytes / (last.batches // method.local_steps) / VALUES
    sequences = sum(method.batch_sizes) or method.workers * method.batch_size
    return Listed(layout.name, method.workers, method.local_steps, sequences, round(bits, 4), absences(layout))


def absences(layout: Layout) -> str:
    """Return the digest of who is away when; empty: nobody."""
    return "" if layout.method.absences is None else rounds.digest(layout.method.absences)


def main(asked: argparse.Namespace) -> None:
    """Write the CSVs."""
    away = rounds.absences(asked.results)
    layouts = [
        each._replace(method=each.method._replace(absences=away[each.churned])) if each.churned else each
        for each in LAYOUTS
        if each.quick or not asked.quick
    ]
    path = asked.output / "layouts.csv"
    lines: dict[str, Sequence[object]] = {row[0]: row for row in csv_rows.read_rows(path)}
    known = {row["layout"]: row["absences"] for row in csv_rows.read_records(path)}
    anew = [each.name for each in layouts if each.churned and absences(each) != known.get(each.name)]
    trained = train_all(
        (Tuned(each.name, [each.method], each.first_rate) for each in layouts),
        QUICK if asked.quick else FULL,
        asked.output,
        anew=anew,
    )
    for each, found in zip(layouts, trained, strict=True):
        lines[each.name] = listed(each, found)
        csv_rows.write_rows(path, Listed._fields, lines.values())  # at once: the digest that its curves have


if __name__ == "__main__":
    csv_rows.run_program(
        main, __doc__, HERE, results={"type": Path, "default": HERE, "help": "of `predict` (%(default)s)"}
    )
