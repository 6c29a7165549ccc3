"""Train digits by DD-EF-SGD with many ratios, stalenesses and learning rates: `python experiments/deco_sgd/train.py`.

This writes choices.csv, what DeCo-SGD chooses for each network, and runs.csv, a row for each training: with the pairs
of the grid, and with those chosen. Networks and sizes are numbers here; figures.py puts steps and seconds together.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from testbed import csv_rows
from testbed.codecs.contract import Context
from testbed.codecs.make import make
from testbed.message_key import MessageKey
from testbed.policies.cycle import MessageSize
from testbed.policies.deco import choose
from testbed.policies.link_estimate import LinkEstimate
from testbed.studies.stacked import Method, Trial, steps_to

WORKERS, BATCH, ALPHA = 4, 16, 0.5
TARGET, MOST_STEPS, EVALUATE_EVERY, PATIENCE = 0.3, 1000, 4, 7
RATIOS: Sequence[float] = (1.0, 0.25, 0.1, 0.03, 0.01)
STALENESSES: Sequence[int] = (0, 1, 2, 4, 8)
RATES = tuple(round(0.05 * 2 ** (step / 2), 4) for step in range(11))
SEEDS = range(5)
VALUES, COMPUTE_S, EXPANSION = 10_000_000, 0.1, 2.0
"""The model whose steps are timed: its parameters, what a step's computing takes, and, as DeCo-SGD counts, the bytes
per kept value over those per dense one (fp32 and a position of 4 bytes)."""
LINKS_MBPS, DELAYS_MS = (100, 500, 1000), (100, 200, 500)
_SAMPLE = 1_000_000


class Choice(NamedTuple):
    """A line of choices.csv."""

    rate_mbps: int
    delay_ms: int
    """One way."""
    ratio: float
    staleness: int


class Row(NamedTuple):
    """A line of runs.csv."""

    ratio: float
    staleness: int
    learning_rate: float
    seed: int
    steps: int | None
    """To the target; None: not reached."""
    bits: float
    """Of a message, per parameter, packed: measured with 1,000,000 values."""


def choices(links_mbps: Sequence[int], delays_ms: Sequence[int]) -> Iterator[Choice]:
    """Yield what DeCo-SGD chooses for each network, which it knows."""
    exchanged = MessageSize(4 * VALUES, EXPANSION)
    for rate, delay in itertools.product(links_mbps, delays_ms):
        link = LinkEstimate(1e6 * rate, delay * 10**6)
        chosen = choose(link, exchanged, round(COMPUTE_S * 1e9), noise_weight=1.0)
        yield Choice(rate, delay, round(chosen.ratio, 6), chosen.staleness)


def bits_of(ratio: float) -> float:
    """Return the bits per parameter of a large message."""
    text = "fp32" if ratio == 1 else f"topk({ratio:g}, tensor, fp32)"
    values = torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0))
    payload = make(text, Context(0, 0, "backward")).encode(values, MessageKey("train", 0, 0, ()))
    return 8 * memoryview(payload).nbytes / _SAMPLE


def main(asked: argparse.Namespace) -> None:
    """Write both CSVs."""
    ratios, stalenesses, rates, seeds, target = RATIOS, STALENESSES, RATES, SEEDS, TARGET
    chosen = list(choices(LINKS_MBPS, DELAYS_MS))
    if asked.quick:
        ratios, stalenesses, rates, seeds, target = (1.0, 0.1, 0.01), (0, 1, 4), RATES[:7:2], range(2), 1.0
        chosen = list(choices(LINKS_MBPS[:2], DELAYS_MS[:1]))
    pairs = list(itertools.product(ratios, stalenesses))
    pairs += [pair for pair in dict.fromkeys((each.ratio, each.staleness) for each in chosen) if pair not in pairs]
    runs = [Trial(rate, seed) for rate, seed in itertools.product(rates, seeds)]
    rows: list[Row] = []
    for ratio, staleness in pairs:
        method, bits = Method(ratio, staleness, WORKERS, BATCH, ALPHA), bits_of(ratio)
        steps = steps_to(target, runs, method, steps=MOST_STEPS, evaluate_every=EVALUATE_EVERY, patience=PATIENCE)
        rows += [Row(ratio, staleness, *run, taken, bits) for run, taken in zip(runs, steps, strict=True)]
        print(ratio, staleness, bits, steps, flush=True)  # noqa: T201
    csv_rows.write_rows(asked.output / "choices.csv", Choice._fields, chosen)
    csv_rows.write_rows(asked.output / "runs.csv", Row._fields, rows)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
