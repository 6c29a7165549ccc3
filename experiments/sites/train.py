"""Train a small language model by each layout of layouts.py: `python experiments/sites/train.py`.

This writes curves.csv, validation losses at each layout's best learning rate; tuning.csv, what was tried; and
layouts.csv, what each sends in an exchange. Sites and times are in cells.toml; figures.py puts batches and seconds
together.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from layouts import LAYOUTS

from testbed.replicas.tuned_text import Curve, Plan, Tried, train_tuned
from testbed.report import csv_rows
from testbed.workloads.characters import VALUES

HERE = Path(__file__).resolve().parent
FULL = Plan(448, 2.5, 16, range(5), range(2), 4)
QUICK = Plan(64, 3.3, 16, range(2), range(1), 0)


class Listed(NamedTuple):
    """A line of layouts.csv."""

    layout: str
    workers: int
    local_steps: int
    sequences: int
    """Of all workers, in a batch."""
    bits: float
    """Of a worker's message, per parameter."""


def main(arguments: list[str]) -> int:
    """Write the CSVs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the CSVs (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short form, which shows nothing but that it works")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)  # so that the numbers do not depend on how many cores there are
    every, rates, lines = list[Curve](), list[Tried](), list[Listed]()
    asked.output.mkdir(parents=True, exist_ok=True)
    for each in LAYOUTS:
        if asked.quick and not each.quick:
            continue
        rows, found = train_tuned(each.name, [each.method], each.first_rate, QUICK if asked.quick else FULL)
        rates += rows
        every += found
        method, last = each.method, found[-1]
        bits = 8 * last.payload_bytes / (last.batches // method.local_steps) / VALUES
        sequences = sum(method.batch_sizes) or method.workers * method.batch_size
        lines.append(Listed(each.name, method.workers, method.local_steps, sequences, round(bits, 4)))
        print(*rows, sep="\n", flush=True)  # noqa: T201
        csv_rows.write_rows(asked.output / "curves.csv", Curve._fields, every)
        csv_rows.write_rows(asked.output / "tuning.csv", Tried._fields, rates)
        csv_rows.write_rows(asked.output / "layouts.csv", Listed._fields, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
