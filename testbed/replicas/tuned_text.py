"""Train one of stacked_text.py's methods at the learning rate that suits it: what experiments compare methods by.

A method is tuned over rates a factor of two apart, with a few seeds, and its list grows until its best lies inside;
then the other seeds are trained at that rate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testbed.csv_rows import read_rows, write_rows
from testbed.metrics.curves import LossPoint
from testbed.metrics.time_to_loss import crossing
from testbed.replicas.stacked import Trial
from testbed.replicas.stacked_text import StackedRun, TextMethod, train

RATES, FACTOR = 3, 2.0
"""Of a list of three rates the middle one is the method's `first_rate`."""


class Plan(NamedTuple):
    """How long trainings are, and how a rate is found."""

    batches: int
    target: float
    """Nats. The best rate is the one that gets there first."""
    evaluate_every: int
    seeds: Sequence[int]
    tuning_seeds: Sequence[int]
    """Those among them that every rate is tried with."""
    widen: int
    """At most so many rates are added to the first list."""


FULL = Plan(448, 2.5, 16, range(5), range(2), 4)
QUICK = Plan(64, 3.3, 16, range(2), range(1), 0)


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

    @classmethod
    def of(cls, row: Sequence[str]) -> Curve:
        """Return what a line of the file says."""
        method, rate, seed, batches, loss, payload_bytes = row
        return cls(method, float(rate), int(seed), int(batches), float(loss), int(payload_bytes))


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


class Tuned(NamedTuple):
    """What is tuned under one name."""

    name: str
    variants: Sequence[TextMethod]
    first_rate: float


def train_all(asked: Iterable[Tuned], plan: Plan, folder: Path, *, anew: Collection[str] = ()) -> Iterator[list[Curve]]:
    """Tune one after the other, yield the curves of each, and keep curves.csv and tuning.csv of all so far. What the
    folder's tables have already is not trained again, but for the names in `anew`, whose rows are dropped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, list[Sequence[Any]]] = {"curves.csv": [], "tuning.csv": []}
    known = {name: [row for row in read_rows(folder / name) if row[0] not in anew] for name in tables}
    for each in asked:
        there: dict[str, Sequence[Sequence[Any]]] = {
            name: [row for row in rows if row[0] == each.name] for name, rows in known.items()
        }
        if all(there.values()):
            found = [Curve.of(row) for row in there["curves.csv"]]
        else:
            tried, found = train_tuned(*each, plan)
            there = {"curves.csv": found, "tuning.csv": tried}
            print(*tried, sep="\n", flush=True)  # noqa: T201
        for name, fields in (("curves.csv", Curve._fields), ("tuning.csv", Tried._fields)):
            known[name] = [row for row in known[name] if row[0] != each.name]
            tables[name] += there[name]
            write_rows(folder / name, fields, [*tables[name], *known[name]])
        yield found


def train_tuned(
    name: str, variants: Sequence[TextMethod], first_rate: float, plan: Plan
) -> tuple[list[Tried], list[Curve]]:
    """Tune a method, each variant by itself; return what was tried, and the curves of all seeds at the best."""
    every = [(method, *_tune(name, method, first_rate, plan)) for method in variants]
    best = _best_of([each for _, rows, _ in every for each in rows])
    method, found = next((method, found) for method, rows, found in every if best in rows)
    found = [each for each in found if each.learning_rate == best.learning_rate]
    others = [seed for seed in plan.seeds if seed not in plan.tuning_seeds]
    found += _curves(name, method, [best.learning_rate], others, plan)
    return [each._replace(chosen=each == best) for _, rows, _ in every for each in rows], found


def _tune(name: str, method: TextMethod, first_rate: float, plan: Plan) -> tuple[list[Tried], list[Curve]]:
    """Try rates until the best lies inside; return them in order, and all curves."""
    rates = [first_rate * FACTOR**step for step in range(-(RATES // 2), RATES // 2 + 1)]
    found = _curves(name, method, rates, plan.tuning_seeds, plan)
    while True:
        rows = [_tried(name, method, found, rate, plan) for rate in rates]
        place = rows.index(_best_of(rows))
        if 0 < place < len(rates) - 1 or len(rates) == RATES + plan.widen:
            return rows, found
        new = rates[0] / FACTOR if place == 0 else rates[-1] * FACTOR
        rates = sorted([*rates, new])
        found += _curves(name, method, [new], plan.tuning_seeds, plan)


def _curves(name: str, method: TextMethod, rates: Sequence[float], seeds: Iterable[int], plan: Plan) -> list[Curve]:
    """Train a method with all these rates and seeds."""
    runs = [Trial(rate, seed) for rate in rates for seed in seeds]

    def line(each: StackedRun) -> Curve:
        return Curve(name, *runs[each.run], each.batches, round(each.loss, 5), each.payload_bytes)

    return [line(each) for each in train(runs, method, batches=plan.batches, evaluate_every=plan.evaluate_every)]


def _tried(name: str, method: TextMethod, found: Sequence[Curve], rate: float, plan: Plan) -> Tried:
    """Return how a rate did."""
    reached, last = [], []
    for seed in plan.tuning_seeds:
        points = [each for each in found if (each.learning_rate, each.seed) == (rate, seed)]
        met = crossing([LossPoint(point.batches, 0.0, point.loss) for point in points], plan.target)
        reached.append(None if met is None else met.steps)
        last.append(points[-1].loss if points and points[-1].batches == plan.batches else None)
    outer = None if method.outer is None else method.outer.learning_rate
    return Tried(name, plan.target, outer, method.betas[0], rate, _mean(reached), _mean(last), chosen=False)


def _best_of(rows: Sequence[Tried]) -> Tried:
    """Return the rate that gets to the target first; where none does, that of the lowest loss."""
    return min(rows, key=lambda row: (row.batches or math.inf, row.loss or math.inf))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) else None
