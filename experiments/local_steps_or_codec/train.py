"""Train a small language model by each method of methods.py: `python experiments/local_steps_or_codec/train.py`.

This writes curves.csv, validation losses at each method's best learning rate; tuning.csv, what was tried; and
methods.csv, what each method sends. A method is tuned over rates a factor of two apart, with two seeds, and its list
grows until its best lies inside; then the other seeds are trained at that rate. Networks and sizes are in cells.toml;
figures.py puts steps and seconds together.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from methods import METHODS, MethodRow

from testbed.metrics.curves import LossPoint
from testbed.metrics.time_to_loss import crossing
from testbed.replicas.stacked import Trial
from testbed.replicas.stacked_text import Evaluated, TextMethod, train
from testbed.report import csv_rows
from testbed.workloads.characters import VALUES

HERE = Path(__file__).resolve().parent
BATCHES, EVALUATE_EVERY, TARGET = 448, 16, 2.5
SEEDS, TUNING_SEEDS, RATES, FACTOR, WIDEN = range(5), range(2), 3, 2.0, 4
"""Of a list of three rates the middle one is the method's `first_rate`; at most WIDEN are added."""


class Curve(NamedTuple):
    """A line of curves.csv."""

    method: str
    learning_rate: float
    seed: int
    batches: int
    """That every worker has learned from."""
    loss: float
    payload_bytes: int
    """Sent by one worker until then."""


class Tried(NamedTuple):
    """A line of tuning.csv."""

    method: str
    target: float
    """Nats."""
    outer_rate: float | None
    """Of the outer optimiser; None: there is none."""
    momentum: float
    """AdamW's first beta."""
    learning_rate: float
    batches: float | None
    """To the target, mean over the tuning seeds; None: one of them did not get there."""
    loss: float | None
    """Last, mean over them; None: one of them diverged."""
    chosen: bool


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


class Length(NamedTuple):
    """How long trainings are."""

    batches: int
    target: float
    """Nats."""


def curves(name: str, method: TextMethod, rates: Sequence[float], seeds: Iterable[int], length: Length) -> list[Curve]:
    """Train a method with all these rates and seeds."""
    runs = [Trial(rate, seed) for rate in rates for seed in seeds]

    def line(each: Evaluated) -> Curve:
        return Curve(name, *runs[each.run], each.batches, round(each.loss, 5), each.payload_bytes)

    return [line(each) for each in train(runs, method, batches=length.batches, evaluate_every=EVALUATE_EVERY)]


def tried(
    name: str, method: TextMethod, found: Sequence[Curve], rate: float, seeds: Sequence[int], length: Length
) -> Tried:
    """Return how a rate did."""
    reached, last = [], []
    for seed in seeds:
        points = [each for each in found if (each.learning_rate, each.seed) == (rate, seed)]
        met = crossing([LossPoint(point.batches, 0.0, point.loss) for point in points], length.target)
        reached.append(None if met is None else met.steps)
        last.append(points[-1].loss if points and points[-1].batches == length.batches else None)
    outer = None if method.outer is None else method.outer.learning_rate
    return Tried(name, length.target, outer, method.betas[0], rate, _mean(reached), _mean(last), chosen=False)


def best_of(rows: Sequence[Tried]) -> Tried:
    """Return the rate that gets to the target first; where none does, that of the lowest loss."""
    return min(rows, key=lambda row: (row.batches or math.inf, row.loss or math.inf))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None


def tune(
    row: MethodRow, method: TextMethod, *, seeds: Sequence[int], length: Length, widen: int
) -> tuple[list[Tried], list[Curve]]:
    """Try rates until the best lies inside; returns them in order, and all curves."""
    rates = [row.first_rate * FACTOR**step for step in range(-(RATES // 2), RATES // 2 + 1)]
    found = curves(row.name, method, rates, seeds, length)
    while True:
        rows = [tried(row.name, method, found, rate, seeds, length) for rate in rates]
        place = rows.index(best_of(rows))
        if 0 < place < len(rates) - 1 or len(rates) == RATES + widen:
            return rows, found
        new = rates[0] / FACTOR if place == 0 else rates[-1] * FACTOR
        rates = sorted([*rates, new])
        found += curves(row.name, method, [new], seeds, length)


def trained(
    row: MethodRow, *, seeds: Sequence[int], tuning: Sequence[int], length: Length, widen: int
) -> tuple[list[Tried], list[Curve]]:
    """Tune a method, each outer rate by itself; returns what was tried, and the curves of all seeds at the best."""
    every = [(method, *tune(row, method, seeds=tuning, length=length, widen=widen)) for method in row.variants]
    best = best_of([each for _, rows, _ in every for each in rows])
    method, found = next((method, found) for method, rows, found in every if best in rows)
    found = [each for each in found if each.learning_rate == best.learning_rate]
    others = [seed for seed in seeds if seed not in tuning]
    found += curves(row.name, method, [best.learning_rate], others, length)
    return [each._replace(chosen=each == best) for _, rows, _ in every for each in rows], found


def listed(row: MethodRow, found: Sequence[Curve]) -> Listed:
    """Say what a method sends, by what one of its trainings has sent."""
    last, local_steps = found[-1], row.method.local_steps
    sent_bytes = last.payload_bytes / (last.batches // local_steps)
    return Listed(row.name, row.family, row.exchange, row.method.workers, local_steps, VALUES, sent_bytes)


def main(arguments: list[str]) -> int:
    """Write the CSVs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the CSVs (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a short form, which shows nothing but that it works")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)  # so that the numbers do not depend on how many cores there are
    methods, length, seeds, tuning, widen = METHODS, Length(BATCHES, TARGET), SEEDS, TUNING_SEEDS, WIDEN
    if asked.quick:
        methods = tuple(
            row._replace(outer_rates=row.outer_rates[-2:-1], momenta=row.momenta[-1:]) for row in METHODS if row.quick
        )
        length, seeds, tuning, widen = Length(64, 3.3), range(2), range(1), 0
    every: list[Curve] = []
    lines: list[Listed] = []
    rates: list[Tried] = []
    asked.output.mkdir(parents=True, exist_ok=True)
    for row in methods:
        rows, found = trained(row, seeds=seeds, tuning=tuning, length=length, widen=widen)
        rates += rows
        every += found
        lines.append(listed(row, found))
        print(*rows, sep="\n", flush=True)  # noqa: T201
    csv_rows.write_rows(asked.output / "curves.csv", Curve._fields, every)
    csv_rows.write_rows(asked.output / "tuning.csv", Tried._fields, rates)
    csv_rows.write_rows(asked.output / "methods.csv", Listed._fields, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
