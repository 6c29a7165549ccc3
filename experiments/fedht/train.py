"""Train digits by federated averaging with top-k and hard thresholds: `python experiments/fedht/train.py`.

This writes runs.csv, a row for each training; rounds.csv, how many values arrived in each round of those with the
middle ratio; and messages.csv, how long each client's messages are in those with thresholds at the strongest label
skew: those of top-k do not depend on the values. What is finished is kept. For each method the learning rate is the one
of RATES with the least mean loss over TUNING_SEEDS, which are not the seeds that count, at the strongest label skew.
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from testbed import csv_rows
from testbed.policies import thresholds
from testbed.studies.federated import CodecsOfRound, FederatedRound, FederatedSpec, Federation, train_once

CLIENTS, ROUNDS, LOCAL_STEPS, BATCH, FLOOR = 10, 25, 5, 16, 0.1
RATES = (0.3, 0.6, 1.2)
SEEDS, TUNING_SEEDS = range(5), (100, 101)
PLAYED_SEEDS = range(3)
ALPHAS = (0.1, 0.5)
TOP_K, FIXED, FOLLOWING = "top-k", "fixed threshold", "gamma-FedHT"
RATIOS = {TOP_K: (0.01, 0.03, 0.1), FIXED: (0.001, 0.003, 0.01), FOLLOWING: (0.001, 0.003, 0.01)}
"""Shares of the values: top-k's in every round; of a threshold those of the first update that reach it, which are fewer
than reach it once error feedback has filled. The learning rate is chosen at the middle one, whose rounds are kept.
"""
EARLY, LATE = slice(5, 10), slice(-5, None)
"""Rounds whose shares are compared. Before, error feedback still fills."""


class Setting(NamedTuple):
    """What is compared."""

    method: str
    alpha: float
    """Of the Dirichlet distribution of the clients' classes: small, few classes each."""
    first_ratio: float


class Row(NamedTuple):
    """A line of runs.csv."""

    use: str
    """tuning, or result."""
    method: str
    alpha: float
    first_ratio: float
    learning_rate: float
    seed: int
    rounds: int
    loss: float
    """Of the test images after the last round, in nats; NaN where training diverged."""
    accuracy: float
    payload_mb: float
    """Of all clients and rounds."""
    kept: float
    """Share of the values that arrived, mean over clients and rounds."""
    early: float
    """The same of the rounds EARLY."""
    late: float
    """Of the rounds LATE."""


class Round(NamedTuple):
    """A line of rounds.csv."""

    method: str
    alpha: float
    seed: int
    round: int
    stepsize: float
    kept: float


class Messages(NamedTuple):
    """A line of messages.csv."""

    method: str
    alpha: float
    first_ratio: float
    seed: int
    round: int
    payload_bytes: str
    """By client."""


def codecs_of(setting: Setting, federation: Federation) -> CodecsOfRound:
    """Return each client's codec by round."""
    clients, spec = federation.spec.clients, federation.spec
    if setting.method == TOP_K:
        return lambda number, stepsize: [f"ef(topk({setting.first_ratio:g}, tensor))"] * clients
    first = thresholds.first_threshold(federation.first_update().numpy(), setting.first_ratio)
    power = 1.0 if setting.method == FOLLOWING else 0.0

    def codecs(number: int, stepsize: float) -> list[str]:
        threshold = thresholds.threshold(first, stepsize, spec.learning_rate, power=power)
        return [f"ef(ht({threshold:.9f}))"] * clients

    return codecs


def train(setting: Setting, use: str, rate: float, seed: int, rounds: int) -> tuple[Row, list[FederatedRound]]:
    """Train once."""
    spec = FederatedSpec(
        model="digits-mlp-large",
        clients=CLIENTS,
        rounds=rounds,
        local_steps=LOCAL_STEPS,
        batch_size=BATCH,
        learning_rate=rate,
        learning_rate_floor=FLOOR,
        alpha=setting.alpha,
        skew=1.0,
        seed=seed,
    )
    federation = Federation(spec)
    seen, loss, accuracy = train_once(federation, codecs_of(setting, federation))
    sent = sum(each.payload_bytes for each in seen) / 1e6
    kept = [each.kept for each in seen]
    parts = [_mean(part) for part in (kept, kept[EARLY], kept[LATE])]
    return Row(use, *setting, rate, seed, rounds, loss, accuracy, sent, *parts), seen


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def main(asked: argparse.Namespace) -> None:
    """Write both tables."""
    rounds, rates, seeds, tuning, alphas = ROUNDS, RATES, SEEDS, TUNING_SEEDS, ALPHAS
    if asked.quick:
        rounds, rates, seeds, tuning, alphas = 6, RATES[1:2], range(2), TUNING_SEEDS[:1], ALPHAS[:1]
    key = ("use", *Setting._fields, "learning_rate", "seed")
    table = csv_rows.Table(asked.output / "runs.csv", Row, *key, digits=None)
    followed = csv_rows.Table(asked.output / "rounds.csv", Round, "method", "alpha", "seed", digits=None, say=False)
    messages = csv_rows.Table(asked.output / "messages.csv", Messages, *Messages._fields[:-2], say=False)

    def add(setting: Setting, use: str, rate: float, seed: int) -> float:
        """Train once and keep what it gives; returns the loss."""
        run, (method, alpha, ratio) = (use, *setting, rate, seed), setting
        sent = use == "result" and method != TOP_K and alpha == min(alphas) and ratio == RATIOS[method][1]
        sent = sent and seed in PLAYED_SEEDS
        if run not in table or (sent and (*setting, seed) not in messages):
            row, seen = train(setting, use, rate, seed, rounds)
            if sent:
                sizes = [(each.number, " ".join(map(str, each.by_client))) for each in seen]
                messages.add(Messages(*setting, seed, *each) for each in sizes)
            if use == "result" and ratio == RATIOS[method][1] and (method, alpha, seed) not in followed:
                followed.add(Round(method, alpha, seed, each.number, each.stepsize, each.kept) for each in seen)
            if run not in table:
                table.add([row])
        known = table.find(*run)
        assert known is not None
        return float(known["loss"])

    for method, ratios in RATIOS.items():
        tried = ratios[1:3] if asked.quick else ratios
        skewed = Setting(method, min(alphas), ratios[1])
        losses = {rate: fmean(add(skewed, "tuning", rate, seed) for seed in tuning) for rate in rates}
        best = min((rate for rate in rates if math.isfinite(losses[rate])), key=lambda rate: losses[rate])
        for alpha, ratio, seed in itertools.product(alphas, tried, seeds):
            add(Setting(method, alpha, ratio), "result", best, seed)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
