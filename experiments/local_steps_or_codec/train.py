"""Train a small language model by each method of methods.py: `python experiments/local_steps_or_codec/train.py`.

This writes curves.csv, validation losses at each method's best learning rate; tuning.csv, what was tried; and
methods.csv, what each method sends. A method is tuned over rates a factor of two apart, with two seeds, and its list
grows until its best lies inside; then the other seeds are trained at that rate. Networks and sizes are in cells.toml;
figures.py puts steps and seconds together. What is in the output folder already is kept.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from methods import METHODS, MethodRow

from testbed import csv_rows
from testbed.studies.tuned_text import FULL, QUICK, Curve, Tuned, train_all
from testbed.workloads.characters import VALUES


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
    """Mean payload of a worker's message, after the first ones that go dense."""
    dense_first: int
    """Exchanges whose messages go dense, as all-reduce's."""


def listed(row: MethodRow, found: Sequence[Curve]) -> Listed:
    """Say what a method sends, by what one of its trainings has sent."""
    last, method = found[-1], row.method
    dense_first = method.frozen_after or 0
    batches, sent_bytes = last.batches, last.payload_bytes
    if dense_first:
        then = next(each for each in found if each.seed == last.seed and each.batches == dense_first)
        batches, sent_bytes = batches - dense_first, sent_bytes - then.payload_bytes
    mean_bytes = sent_bytes / (batches // method.local_steps)
    return Listed(
        row.name, row.family, row.exchange, method.workers, method.local_steps, VALUES, mean_bytes, dense_first
    )


def main(asked: argparse.Namespace) -> None:
    """Write the CSVs."""
    methods = METHODS
    if asked.quick:
        methods = tuple(
            row._replace(outer_rates=row.outer_rates[-2:-1], momenta=row.momenta[-1:]) for row in METHODS if row.quick
        )
    trained = train_all(
        (Tuned(row.name, row.variants, row.first_rate) for row in methods), QUICK if asked.quick else FULL, asked.output
    )
    lines = [listed(row, found) for row, found in zip(methods, trained, strict=True)]
    csv_rows.write_rows(asked.output / "methods.csv", Listed._fields, lines)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
