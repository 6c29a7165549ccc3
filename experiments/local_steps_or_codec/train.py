"""Train a small language model by each method of methods.py: `python experiments/local_steps_or_codec/train.py`.

This writes curves.csv, validation losses at each method's best learning rate; tuning.csv, what was tried; and
methods.csv, what each method sends. A method is tuned over rates a factor of two apart, with two seeds, and its list
grows until its best lies inside; then the other seeds are trained at that rate. Networks and sizes are in cells.toml;
figures.py puts steps and seconds together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from methods import METHODS, MethodRow

from testbed.replicas.tuned_text import Curve, Plan, Tried, train_tuned
from testbed.report import csv_rows
from testbed.workloads.characters import VALUES

HERE = Path(__file__).resolve().parent
FULL = Plan(448, 2.5, 16, range(5), range(2), 4)
QUICK = Plan(64, 3.3, 16, range(2), range(1), 0)


class Listed(NamedTuple):
    """A line of methods.csv."""

    method: str
    family: str
    exchange: str
    workers: int
    local_steps: int
    values: int
    """Of the model."""
    message_bytes: float
    """Mean payload of a worker's message."""


FIELDS = {"curves.csv": Curve._fields, "tuning.csv": Tried._fields, "methods.csv": Listed._fields}
"""The columns of each table; the first is the method."""


def listed(row: MethodRow, found: Sequence[Curve]) -> Listed:
    """Say what a method sends, by what one of its trainings has sent."""
    last, local_steps = found[-1], row.method.local_steps
    sent_bytes = last.payload_bytes / (last.batches // local_steps)
    return Listed(row.name, row.family, row.exchange, row.method.workers, local_steps, VALUES, sent_bytes)


def main(arguments: list[str]) -> int:
    """Write the CSVs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the CSVs (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="train these; rows of the others stay as they are")
    parser.add_argument("--quick", action="store_true", help="a short form, which shows nothing but that it works")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)  # so that the numbers do not depend on how many cores there are
    methods = METHODS
    if asked.quick:
        methods = tuple(
            row._replace(outer_rates=row.outer_rates[-2:-1], momenta=row.momenta[-1:]) for row in METHODS if row.quick
        )
    if unknown := set(asked.only or ()) - {row.name for row in methods}:
        parser.error(f"--only: no method is called {', '.join(sorted(unknown))}")
    tables: dict[str, list[tuple[Any, ...]]] = {name: [] for name in FIELDS}
    asked.output.mkdir(parents=True, exist_ok=True)
    for row in methods:
        if asked.only and row.name not in asked.only:
            for name, rows in tables.items():
                rows += [each for each in csv_rows.read_rows(asked.output / name) if each[0] == row.name]
            continue
        tried, found = train_tuned(row.name, row.variants, row.first_rate, QUICK if asked.quick else FULL)
        tables["curves.csv"] += found
        tables["tuning.csv"] += tried
        tables["methods.csv"].append(listed(row, found))
        print(*tried, sep="\n", flush=True)  # noqa: T201
    for name, rows in tables.items():
        csv_rows.write_rows(asked.output / name, FIELDS[name], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
