"""Train a small language model by DD-EF-SGD over a link that varies: `python experiments/deco_varying/train.py`.

This writes timeline.csv, what each arm chooses when, as it was played in the guest (timeline.py), and runs.csv, the
steps to the target of every training: static pairs, which are the same over all links, and arms that choose, by link.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from timeline import FIRST, KINDS, NETWORKS, PAIRS, WORKERS, Arm, Step, codec, timelines

from testbed import csv_rows
from testbed.metrics.curves import LossPoint
from testbed.metrics.time_to_loss import crossing
from testbed.policies.deco import DecoChoice
from testbed.studies.stacked import Trial
from testbed.studies.stacked_text import Choices, Chosen, TextMethod, train

HERE = Path(__file__).resolve().parent
BATCHES, EVALUATE_EVERY, TARGET = 448, 8, 2.5
SEEDS, TUNING_SEEDS, RATES, FACTOR, WIDEN = range(5), range(2), (0.002, 0.004, 0.008), 2.0, 3
"""Rates are tried with two seeds, at most WIDEN more where the best is an end; the others are trained at the best."""
BATCH_SIZE, BETAS = 8, (0.0, 0.99)


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
    seed: int | None
    """Whose timeline it is; None: that of all."""
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


BySeed = Sequence[Choices]
"""What holds when, for each seed."""


def steps_to(choices: BySeed, rates: Sequence[float], seeds: Iterable[int], sizes: Sizes) -> dict[Trial, float | None]:
    """Train with all these rates and seeds, side by side where the same holds; returns the steps to the target."""
    alike: dict[Choices, list[int]] = {}
    for seed in seeds:
        alike.setdefault(choices[seed], []).append(seed)
    found: dict[Trial, float | None] = {}
    for each, theirs in alike.items():
        found |= side_by_side(each, rates, theirs, sizes)
    return found


def side_by_side(
    choices: Choices, rates: Iterable[float], seeds: Iterable[int], sizes: Sizes
) -> dict[Trial, float | None]:
    """Train with all these rates and seeds at once; returns the steps to the target."""
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


def trained(choices: BySeed, sizes: Sizes) -> tuple[dict[Trial, float | None], float]:
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


def lines(arm: Arm, seed: int | None, steps: Sequence[Step]) -> list[Line]:
    """Return the lines of a timeline."""
    return [
        Line(
            arm.name,
            arm.network.profile,
            seed,
            number,
            round(each.ratio, 7),
            each.staleness,
            round(each.end_ns / 1e9, 4),
            round(each.rate_bps / 1e6, 1),
            round(each.known_bps / 1e6, 1),
        )
        for number, each in enumerate(steps)
    ]


def most_steps(found: Mapping[Trial, float | None], rate: float, seeds: Iterable[int], batches: int) -> int:
    """Return how many steps of a timeline are needed: until the last of these seeds is there; all where one is not."""
    steps = [found[Trial(rate, seed)] for seed in seeds]
    known = [each for each in steps if each is not None]
    return min(batches, math.ceil(max(known)) + 1) if len(known) == len(steps) else batches


def main(asked: argparse.Namespace) -> None:
    """Write both CSVs."""
    sizes, pairs, networks = Sizes(BATCHES, TARGET, RATES, SEEDS, TUNING_SEEDS, WIDEN), PAIRS, NETWORKS
    if asked.quick:
        sizes, pairs = Sizes(24, 3.7, RATES[:2], range(1), range(1), 0), PAIRS[:1]
        networks = {name: NETWORKS[name] for name in list(NETWORKS)[:1]}
    rows: list[Row] = []
    when: list[Line] = []

    def keep(arm: str, network: str, choices: BySeed) -> tuple[float, list[int]]:
        """Train an arm; returns its mean of steps, and how many are needed of the timeline of each seed."""
        found, best = trained(choices, sizes)
        rows.extend(
            Row(arm, network, *run, steps, chosen=run.learning_rate == best) for run, steps in sorted(found.items())
        )
        mean = mean_steps(found, best)
        print(arm, network, best, mean, flush=True)  # noqa: T201
        return mean, [most_steps(found, best, [seed], sizes.batches) for seed in sizes.seeds]

    of_pairs = {}
    for pair in pairs:
        stays = following([Step(pair.ratio, pair.staleness, 0, 0.0, 0.0)])
        of_pairs[pair] = keep(name_of(pair), "", [stays] * len(sizes.seeds))
    reached = tuple((pair, mean) for pair, (mean, _) in of_pairs.items() if mean < math.inf)
    static = [
        Arm(name_of(pair), network, pair, max(needed))
        for network in networks.values()
        for pair, (_, needed) in of_pairs.items()
    ]
    choosers = [Arm(name, network, FIRST, sizes.batches, reached) for network in networks.values() for name in KINDS]
    # Who chooses has a timeline for each seed, because a few bytes more decide what is chosen.
    wanted = [*static, *(arm.drawn(seed) for arm in choosers for seed in sizes.seeds)]
    made = timelines(wanted)
    for arm, steps in zip(static, made, strict=False):
        when += lines(arm, None, steps)
    for number, arm in enumerate(choosers):
        theirs = made[len(static) + number * len(sizes.seeds) :][: len(sizes.seeds)]
        _, needed = keep(arm.name, arm.network.profile, [following(steps) for steps in theirs])
        for seed, steps in zip(sizes.seeds, theirs, strict=True):
            when += lines(arm, seed, steps[: needed[seed]])
    csv_rows.write_rows(asked.output / "timeline.csv", Line._fields, when)
    csv_rows.write_rows(asked.output / "runs.csv", Row._fields, rows)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, HERE)
