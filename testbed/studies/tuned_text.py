"""Train one of stacked_text.py's methods at its tuned learning rate, for comparisons of methods in experiments.

A method is tuned over rates a factor of two apart, with a few seeds; the list grows until the best rate is not at its
end. The remaining seeds are then trained at that rate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testbed.csv_rows import read_rows, write_rows
from testbed.metrics.curves import LossPoint
from testbed.metrics.time_to_loss import crossing
from testbed.studies.stacked import Trial
from testbed.studies.stacked_text import StackedRun, TextMethod, train

RATES, FACTOR = 3, 2.0
"""Factors of the initial three rates; the middle one is the method's `first_rate`."""


class Plan(NamedTuple):
    """Length of trainings, and the search for a rate."""

    batches: int
    target: float
    """Loss in nats. The best rate reaches it first."""
    evaluate_every: int
    seeds: Sequence[int]
    tuning_seeds: Sequence[int]
    """The seeds with which every rate is tried."""
    widen: int
    """Maximum number of rates added to the initial list."""


FULL = Plan(448, 2.5, 16, range(5), range(2), 4)
QUICK = Plan(64, 3.3, 16, range(2), range(1), 0)


class Curve(NamedTuple):
    """A row of curves.csv."""

    method: str
    learning_rate: float
    seed: int
    batches: int
    """Number of batches that every worker has trained on."""
    loss: float
    payload_bytes: int
    """Payload bytes sent by one worker so far."""

    @classmethod
    def of(cls, row: Sequence[str]) -> Curve:
        """Parse a row of the file."""
        method, rate, seed, batches, loss, payload_bytes = row
        return cls(method, float(rate), int(seed), int(batches), float(loss), int(payload_bytes))


class Tried(NamedTuple):
    """A row of tuning.csv."""

    method: str
    target: float
    """Loss in nats."""
    outer_rate: float | None
    """Learning rate of the outer optimiser, if any."""
    momentum: float
    """AdamW's first beta."""
    learning_rate: float
    batches: float | None
    """Batches to the target, mean over the tuning seeds; None: at least one did not reach it."""
    loss: float | None
    """Final loss, mean over the tuning seeds; None: at least one diverged."""
    chosen: bool


class Tuned(NamedTuple):
    """The variants tuned under one name."""

    name: str
    variants: Sequence[TextMethod]
    first_rate: float


def train_all(asked: Iterable[Tuned], plan: Plan, folder: Path, *, anew: Collection[str] = ()) -> Iterator[list[Curve]]:
    """Tune one after another, yield the curves of each, and keep curves.csv and tuning.csv of all so far. Names already
    in the folder's tables are skipped, except those in `anew`, whose rows are dropped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[Sequence[Any]]] = {"curves.csv": [], "tuning.csv": []}
    known = {name: [row for row in read_rows(folder / name) if row[0] not in anew] for name in tables}
    for each in asked:
        there: dict[str, Sequence[Sequence[Any]]] = {
            name: [row for row in rows if row[0] == each.name] for name, rows in known.items()
        }
        if all(there.values()):
            curves = [Curve.of(row) for row in there["curves.csv"]]
        else:
            tried, curves = train_tuned(*each, plan)
            there = {"curves.csv": curves, "tuning.csv": tried}
            print(*tried, sep="\n", flush=True)  # noqa: T201
        for name, fields in (("curves.csv", Curve._fields), ("tuning.csv", Tried._fields)):
            known[name] = [row for row in known[name] if row[0] != each.name]
            tables[name] += there[name]
            write_rows(folder / name, fields, [*tables[name], *known[name]])
        yield curves


def train_tuned(
    name: str, variants: Sequence[TextMethod], first_rate: float, plan: Plan
) -> tuple[list[Tried], list[Curve]]:
    """Tune each variant of a method; returns the tried rates, and the curves of all seeds at the best one."""
    every = [(method, *_tune(name, method, first_rate, plan)) for method in variants]
    best = _best_of([each for _, rows, _ in every for each in rows])
    method, curves = next((method, curves) for method, rows, curves in every if best in rows)
    curves = [each for each in curves if each.learning_rate == best.learning_rate]
    others = [seed for seed in plan.seeds if seed not in plan.tuning_seeds]
    curves += _curves(name, method, [best.learning_rate], others, plan)
    return [each._replace(chosen=each == best) for _, rows, _ in every for each in rows], curves


def _tune(name: str, method: TextMethod, first_rate: float, plan: Plan) -> tuple[list[Tried], list[Curve]]:
    """Try rates until the best is not at the end of the list; returns them in order, and all curves."""
    rates = [first_rate * FACTOR**step for step in range(-(RATES // 2), RATES // 2 + 1)]
    curves = _curves(name, method, rates, plan.tuning_seeds, plan)
    while True:
        rows = [_tried(name, method, curves, rate, plan) for rate in rates]
        place = rows.index(_best_of(rows))
        if 0 < place < len(rates) - 1 or len(rates) == RATES + plan.widen:
            return rows, curves
        new = rates[0] / FACTOR if place == 0 else rates[-1] * FACTOR
        rates = sorted([*rates, new])
        curves += _curves(name, method, [new], plan.tuning_seeds, plan)


def _curves(name: str, method: TextMethod, rates: Sequence[float], seeds: Iterable[int], plan: Plan) -> list[Curve]:
    """Train a method with all given rates and seeds."""
    runs = [Trial(rate, seed) for rate in rates for seed in seeds]

    def line(each: StackedRun) -> Curve:
        return Curve(name, *runs[each.run], each.batches, round(each.loss, 5), each.payload_bytes)

    return [line(each) for each in train(runs, method, batches=plan.batches, evaluate_every=plan.evaluate_every)]


def _tried(name: str, method: TextMethod, curves: Sequence[Curve], rate: float, plan: Plan) -> Tried:
    """Return the result of a rate."""
    reached, last = [], []
    for seed in plan.tuning_seeds:
        points = [each for each in curves if (each.learning_rate, each.seed) == (rate, seed)]
        met = crossing([LossPoint(point.batches, 0.0, point.loss) for point in points], plan.target)
        reached.append(None if met is None else met.steps)
        last.append(points[-1].loss if points and points[-1].batches == plan.batches else None)
    outer = None if method.outer is None else method.outer.learning_rate
    return Tried(name, plan.target, outer, method.betas[0], rate, _mean(reached), _mean(last), chosen=False)


def _best_of(rows: Sequence[Tried]) -> Tried:
    """Return the rate that reaches the target first, or, if none does, the one with the lowest loss."""
    return min(rows, key=lambda row: (row.batches or math.inf, row.loss or math.inf))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
