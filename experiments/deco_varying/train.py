"""Train a small language model by DD-EF-SGD over a link that varies: `python experiments/deco_varying/train.py`.

This writes timeline.csv, what each arm chooses when, by the event model of timeline.py, and runs.csv, the steps to the
target of every training: static pairs, which are the same over all links, and arms that choose, by link.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from timeline import (
    FIRST,
    NETWORKS,
    PAIRS,
    WORKERS,
    Informed,
    Network,
    Oracle,
    Static,
    Step,
    codec,
    leader_of,
    simulate,
)

from testbed import csv_rows
from testbed.metrics.curves import LossPoint
from testbed.metrics.time_to_loss import crossing
from testbed.policies.deco import DecoChoice
from testbed.replicas.leader import Leader
from testbed.replicas.stacked import Trial
from testbed.replicas.stacked_text import Choices, Chosen, TextMethod, train

HERE = Path(__file__).resolve().parent
BATCHES, EVALUATE_EVERY, TARGET = 448, 8, 2.5
SEEDS, TUNING_SEEDS, RATES, FACTOR, WIDEN = range(5), range(2), (0.002, 0.004, 0.008), 2.0, 3
"""Rates are tried with two seeds, at most WIDEN more where the best is an end; the others are trained at the best."""
BATCH_SIZE, BETAS, LEAST_LINES = 8, (0.0, 0.99), 61
DECO, KNOWS, ORACLE = "DeCo-SGD", "DeCo-SGD, told the link", "oracle"


class Row(NamedTuple):
    """A line of runs.csv."""

    arm: str
    network: str
    """Empty for static pairs."""
    learning_rate: float
    seed: int
    steps: float | None
    """To the target, interpolated; None: not reached."""
    chosen: bool
    """Whether the rate is the arm's."""


class Line(NamedTuple):
    """A line of timeline.csv."""

    arm: str
    network: str
    step: int
    ratio: float
    staleness: int
    end_s: float
    rate_mbps: float
    known_mbps: float


class Sizes(NamedTuple):
    """How much is trained."""

    batches: int
    target: float
    rates: Sequence[float]
    seeds: Sequence[int]
    tuning: Sequence[int]
    widen: int


def name_of(pair: DecoChoice) -> str:
    """Return the name of a static pair's arm."""
    return f"static ({pair.ratio:g}, {pair.staleness})"


def steps_to(choices: Choices, rates: Iterable[float], seeds: Iterable[int], sizes: Sizes) -> dict[Trial, float | None]:
    """Train with all these rates and seeds; returns the steps to the target."""
    runs = [Trial(rate, seed) for rate, seed in itertools.product(rates, seeds)]
    first = choices(0)
    method = TextMethod(
        first.codec, "values", staleness=first.staleness, betas=BETAS, workers=WORKERS, batch_size=BATCH_SIZE
    )
    curves: dict[int, list[LossPoint]] = {run: [] for run in range(len(runs))}
    found = train(
        runs, method, batches=sizes.batches, evaluate_every=EVALUATE_EVERY, choices=choices, target=sizes.target
    )
    for each in found:
        curves[each.run].append(LossPoint(each.batches, 0.0, each.loss))
    met = {runs[run]: crossing(points, sizes.target) for run, points in curves.items()}
    return {run: None if each is None else round(each.steps, 3) for run, each in met.items()}


def mean_steps(found: Mapping[Trial, float | None], rate: float) -> float:
    """Return the mean over seeds at a rate; infinite where one does not get there."""
    steps = [steps for run, steps in found.items() if run.learning_rate == rate]
    known = [each for each in steps if each is not None]
    return sum(known) / len(known) if len(known) == len(steps) else math.inf


def trained(choices: Choices, sizes: Sizes) -> tuple[dict[Trial, float | None], float]:
    """Tune the rate, and train all seeds at the best; returns the steps to the target, and that rate."""
    rates = sorted(sizes.rates)
    found = steps_to(choices, rates, sizes.tuning, sizes)
    while True:
        best = min(rates, key=lambda rate: mean_steps(found, rate))
        if best not in (rates[0], rates[-1]) or len(rates) == len(sizes.rates) + sizes.widen:
            break
        rates = sorted([*rates, new := best / FACTOR if best == rates[0] else best * FACTOR])
        found |= steps_to(choices, [new], sizes.tuning, sizes)
    found |= steps_to(choices, [best], [seed for seed in sizes.seeds if seed not in sizes.tuning], sizes)
    return found, best


def following(steps: Sequence[Step]) -> Choices:
    """Return what a timeline says of each step."""

    def choices(step: int) -> Chosen:
        each = steps[min(step, len(steps) - 1)]
        return Chosen(codec(each.ratio), each.staleness)

    return choices


def lines(arm: str, network: Network, steps: Sequence[Step]) -> list[Line]:
    """Return the lines of a timeline."""
    return [
        Line(
            arm,
            network.profile,
            number,
            round(each.ratio, 7),
            each.staleness,
            round(each.end_ns / 1e9, 4),
            round(each.rate_bps / 1e6, 1),
            round(each.known_bps / 1e6, 1),
        )
        for number, each in enumerate(steps)
    ]


def until_all_are_there(when: Sequence[Line], rows: Sequence[Row]) -> list[Line]:
    """Return the lines up to the step in which the last seed of an arm is at the target, or all where one is not."""
    needed: dict[str, float] = {}
    for row in rows:
        if row.chosen:
            key = row.arm + row.network
            needed[key] = max(needed.get(key, LEAST_LINES), math.inf if row.steps is None else row.steps + 1)
    return [line for line in when if line.step <= needed.get(line.arm + line.network, needed.get(line.arm, math.inf))]


def main(arguments: list[str]) -> int:
    """Write both CSVs."""
    asked = csv_rows.asked_of(arguments, __doc__, HERE)
    torch.set_num_threads(1)  # so that the numbers do not depend on how many cores there are
    sizes, pairs, networks = Sizes(BATCHES, TARGET, RATES, SEEDS, TUNING_SEEDS, WIDEN), PAIRS, NETWORKS
    if asked.quick:
        sizes, pairs = Sizes(48, 3.2, RATES[:2], range(2), range(1), 0), PAIRS[:2]
        networks = {name: NETWORKS[name] for name in list(NETWORKS)[:1]}
    rows: list[Row] = []
    when: list[Line] = []

    def keep(arm: str, network: str, choices: Choices) -> float:
        found, best = trained(choices, sizes)
        rows.extend(
            Row(arm, network, *run, steps, chosen=run.learning_rate == best) for run, steps in sorted(found.items())
        )
        mean = mean_steps(found, best)
        print(arm, network, best, mean, flush=True)  # noqa: T201
        return mean

    needed: dict[DecoChoice, float] = {}
    for pair in pairs:
        needed[pair] = keep(name_of(pair), "", following([Step(pair.ratio, pair.staleness, 0, 0.0, 0.0)]))
    reached = {pair: steps for pair, steps in needed.items() if steps < math.inf}
    for network in networks.values():
        for pair in pairs:
            when += lines(
                name_of(pair), network, simulate(network, leader_of(Static, network, pair), pair, sizes.batches)
            )
        kinds: dict[str, type[Leader]] = {DECO: Leader, KNOWS: Informed, ORACLE: Oracle}
        for arm, kind in kinds.items():
            leader, first = leader_of(kind, network, FIRST), FIRST
            if isinstance(leader, Oracle):
                leader.steps_to_target, leader.network = reached, network
            steps = simulate(network, leader, first, sizes.batches)
            when += lines(arm, network, steps)
            keep(arm, network.profile, following(steps))
    asked.output.mkdir(parents=True, exist_ok=True)
    csv_rows.write_rows(asked.output / "timeline.csv", Line._fields, until_all_are_there(when, rows))
    csv_rows.write_rows(asked.output / "runs.csv", Row._fields, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
