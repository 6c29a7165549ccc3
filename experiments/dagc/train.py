"""Train digits by federated averaging with ratios by data share: `python experiments/dagc/train.py`.

This writes runs.csv, a row for each training, and messages.csv, how long each client's message is in each round until
the target, for hard thresholds: those of top-k do not depend on the values. For each skew and mean ratio the learning
rate of all arms is the one of RATES with which uniform ratios have the least mean loss over TUNING_SEEDS, which are not
the seeds that count: the choice suits uniform ratios best, and what the others gain is not due to it. What is finished
is kept.
"""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from testbed import csv_rows
from testbed.policies import dagc, thresholds
from testbed.studies.federated import FederatedSpec, Federation, train_once

CLIENTS, ROUNDS, LOCAL_STEPS, BATCH, ALPHA = 10, 30, 5, 16, 1.0
RATES = (0.15, 0.3, 0.6, 1.2)
TUNING_SEEDS = (100, 101)
SEEDS = {1.0: 5, 10.0: 30, 100.0: 10}
"""How many of each skew: with the spread of five, so many find the published gain, 1.25 times as fast, 4 times in 5. At
a skew of 1 nothing is compared."""
SKEWS, MEANS = tuple(SEEDS), (0.05, 0.01)
TARGET = 0.7
"""Accuracy, of which the rounds are counted until it is reached."""

Ratios = Callable[[Sequence[float], float], Sequence[float]]
ARMS: dict[str, Ratios] = {
    "uniform": lambda shares, mean: [mean] * len(shares),
    "share^(2/3)": dagc.ratios,
    "released code": lambda shares, mean: [min(1.0, ratio) for ratio in dagc.released_ratios(shares, mean)],
    "share^(-2/3)": lambda shares, mean: dagc.ratios([1 / share for share in shares], mean),
}
"""How ratios follow from the shares of the data. The last one is a control: it should be the worst."""
SAME, ABSOLUTE = "same threshold", "DAGC-A"
THRESHOLD_MEANS = (0.01,)
"""Shares of the first updates' values that reach the mean threshold of all clients: DAGC-A's arms, without error
feedback, at the largest skew.
"""
THRESHOLD_SEEDS = 5


class Setting(NamedTuple):
    """What is compared."""

    arm: str
    feedback: bool
    """Whether clients remember what they did not send."""
    skew: float
    """The largest client's images over the smallest's."""
    mean_ratio: float


class Row(NamedTuple):
    """A line of runs.csv."""

    use: str
    """tuning, or result."""
    arm: str
    feedback: bool
    skew: float
    mean_ratio: float
    learning_rate: float
    seed: int
    rounds: int
    loss: float
    """Of the test images after the last round, in nats; NaN where training diverged."""
    accuracy: float
    rounds_to_target: int | None
    """None: never."""
    kept: float
    """Share of values that arrived, mean over clients and rounds."""
    payload_mb: float
    """Of all clients and rounds."""
    least_ratio: float
    largest_ratio: float
    """With thresholds both are the share of the first updates' values that reach the mean one."""


class Messages(NamedTuple):
    """A line of messages.csv."""

    arm: str
    skew: float
    mean_ratio: float
    seed: int
    round: int
    payload_bytes: str
    """By client, the largest first."""


def settings(skews: Sequence[float], means: Sequence[float]) -> Iterator[list[Setting]]:
    """Yield what is compared, in groups with one learning rate, uniform ratios first: at skew 1 all arms are one; only
    at the largest skew there are all of them, and error feedback.
    """
    for skew, mean in itertools.product(skews, means):
        arms = ["uniform"] if skew == 1 else list(ARMS) if skew == max(skews) else ["uniform", "share^(2/3)"]
        if skew == max(skews) and mean in THRESHOLD_MEANS:
            arms += [SAME, ABSOLUTE]
        yield [Setting(arm, False, skew, mean) for arm in arms]
        if skew == max(skews):
            yield [Setting(arm, True, skew, mean) for arm in ("uniform", "share^(2/3)")]


def codecs_of(setting: Setting, federation: Federation) -> tuple[list[str], Sequence[float]]:
    """Return each client's codec, and the clients' ratios."""
    if setting.arm in ARMS:
        ratios = ARMS[setting.arm](federation.shares, setting.mean_ratio)
        plain = [f"topk({ratio:.6g}, tensor)" for ratio in ratios]
        return [f"ef({text})" for text in plain] if setting.feedback else plain, ratios
    mean = thresholds.first_threshold(federation.first_update().numpy(), setting.mean_ratio)
    every = [mean] * CLIENTS if setting.arm == SAME else dagc.thresholds(federation.shares, mean)
    return [f"ht({each:.9f})" for each in every], [setting.mean_ratio]


def train(setting: Setting, use: str, rate: float, seed: int, rounds: int) -> tuple[Row, list[Messages]]:
    """Train once; returns besides the lengths of messages until the target."""
    spec = FederatedSpec(
        model="digits-mlp-large",
        clients=CLIENTS,
        rounds=rounds,
        local_steps=LOCAL_STEPS,
        batch_size=BATCH,
        learning_rate=rate,
        learning_rate_floor=1.0,
        alpha=ALPHA,
        skew=setting.skew,
        seed=seed,
    )
    federation = Federation(spec)
    codecs, ratios = codecs_of(setting, federation)
    seen, loss, accuracy = train_once(federation, lambda number, stepsize: codecs)
    reached = next((each.number + 1 for each in seen if each.accuracy >= TARGET), None)
    sent = [
        Messages(setting.arm, setting.skew, setting.mean_ratio, seed, each.number, " ".join(map(str, each.by_client)))
        for each in seen[:reached]
    ]
    row = Row(
        use,
        *setting,
        rate,
        seed,
        rounds,
        loss,
        accuracy,
        reached,
        fmean(each.kept for each in seen) if seen else math.nan,
        sum(each.payload_bytes for each in seen) / 1e6,
        min(ratios),
        max(ratios),
    )
    return row, sent


def main(asked: argparse.Namespace) -> None:
    """Write both tables."""
    rounds, rates, seeds, tuning = ROUNDS, RATES, SEEDS, TUNING_SEEDS
    groups = settings(SKEWS, MEANS)
    if asked.quick:
        rounds, rates, seeds, tuning = 5, RATES[1:2], dict.fromkeys(SEEDS, 2), TUNING_SEEDS[:1]
        groups = settings((1.0, 100.0), MEANS[-1:])
    key = ("use", *Setting._fields, "learning_rate", "seed")
    table = csv_rows.Table(asked.output / "runs.csv", Row, *key, digits=None)
    messages = csv_rows.Table(asked.output / "messages.csv", Messages, *Messages._fields[:-2], say=False)

    def tried(setting: Setting, use: str, rate: float, seed: int) -> float:
        """Train once and keep the row; returns the loss."""
        if (use, *setting, rate, seed) not in table:
            row, sent = train(setting, use, rate, seed, rounds)
            if use == "result" and setting.arm not in ARMS:
                messages.add(sent)
            table.add([row])
        known = table.find(use, *setting, rate, seed)
        assert known is not None
        return float(known["loss"])

    for group in groups:
        losses = {rate: fmean(tried(group[0], "tuning", rate, seed) for seed in tuning) for rate in rates}
        best = min((rate for rate in rates if math.isfinite(losses[rate])), key=lambda rate: losses[rate])
        for setting in group:
            count = seeds[setting.skew] if setting.arm in ARMS else min(THRESHOLD_SEEDS, seeds[setting.skew])
            for seed in range(count):
                tried(setting, "result", best, seed)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
