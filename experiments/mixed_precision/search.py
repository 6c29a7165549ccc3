"""Search bits for each boundary of trained models: `python experiments/mixed_precision/search.py`.

This writes sensitivity.csv, what each width costs at each boundary alone, as a divergence on one batch of the training
text; and settings.csv, a row for each held-out batch, of uniform widths and of those that a greedy search finds for the
same bytes, or for the same seconds over links of unequal rates: by the sum of what each boundary costs alone, or by
what all of them cost together, measured at each step.
"""

import argparse
import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import boundaries
import torch

from testbed import csv_rows
from testbed.policies import precision

MODELS = {"gpt2-mini-trained": (4, 4, 256, 16), "smollm2-135m": (6, 1, 128, 6)}
"""Model -> stages, sequences in a batch, tokens of each, held-out batches."""
QUICK = {"gpt2-nano": (3, 2, 128, 2)}
BUDGETS = (6, 4, 3, 2)
"""Uniform widths whose bytes, or seconds, the search may take."""
RATES_MBPS = (20.0, 200.0)
"""Links of unequal rates are drawn between these, evenly in their logarithms."""
LINK_SEED = 0


class Sensitivity(NamedTuple):
    """A line of sensitivity.csv."""

    model: str
    boundary: int
    bits: int
    divergence: float
    """KL(uncompressed || with this codec here alone), nats per token."""


class Setting(NamedTuple):
    """A line of settings.csv."""

    model: str
    cost: str
    """What is equal: bytes or seconds; of uniform widths both."""
    search: str
    """uniform, or greedy by what boundaries harm: alone, together."""
    budget: float
    """The uniform width with as many bytes, or seconds; -1: no codec."""
    widths: str
    bits: float
    """Per value, scales included, mean over the boundaries."""
    seconds: float
    """Of one batch's activations over all links one after the other: bits over rates, without delay."""
    predicted: float
    """The sum of the divergences of each boundary alone."""
    divergence: float
    """All boundaries together, on the batch of the search."""
    batch: int
    loss: float


def sensitivities(cut: boundaries.Cut, model: str) -> list[Sensitivity]:
    """Measure each width at each boundary, all others without a codec."""
    cut.train(False)
    inputs = cut.data.train(0, 0, 1).inputs
    none: list[int | None] = [None] * cut.boundaries
    with torch.no_grad():
        plain, rows = cut.forward(inputs, none), []
        for at in range(cut.boundaries):
            for bits in boundaries.WIDTHS:
                arrived = cut.cross(plain.sent[at], bits)
                logits = cut.forward(arrived, none, stage=at + 1).logits
                rows.append(Sensitivity(model, at, bits, float(boundaries.divergence(plain.logits, logits))))
    return rows


def rates_of(count: int) -> list[float]:
    """Return a rate for each boundary's link, in Mbit/s."""
    draw, (low, high) = random.Random(LINK_SEED), RATES_MBPS
    return [low * (high / low) ** draw.random() for _ in range(count)]


class Harm:
    """What settings harm: the divergence on the batch of the search, each measured once."""

    def __init__(self, cut: boundaries.Cut) -> None:
        cut.train(False)
        self._cut, inputs = cut, cut.data.train(0, 0, 1).inputs
        with torch.no_grad():
            self._teacher = cut.forward(inputs, [None] * cut.boundaries).logits
            self._sent: dict[tuple[int, ...], torch.Tensor] = {(): cut.parts[0](inputs)}
        self._known: dict[tuple[int, ...], float] = {}

    @torch.no_grad()
    def __call__(self, widths: tuple[int, ...]) -> float:
        if widths not in self._known:
            for at in range(len(widths)):
                if widths[: at + 1] not in self._sent:
                    arrived = self._cut.cross(self._sent[widths[:at]], widths[at])
                    self._sent[widths[: at + 1]] = self._cut.parts[at + 1](arrived)
            # Logits are large and belong to this setting alone.
            self._known[widths] = float(boundaries.divergence(self._teacher, self._sent.pop(widths)))
        return self._known[widths]


def settings(cut: boundaries.Cut, model: str, alone: precision.Table, batches: int, values: int) -> list[Setting]:
    """Judge uniform widths, and those that are found for their bytes and seconds."""
    widths, count, together = boundaries.WIDTHS, cut.boundaries, Harm(cut)
    rates = rates_of(count)
    costs: dict[str, precision.Table] = {
        "bytes": [{bits: boundaries.bits_per_value(bits) for bits in widths} for _ in range(count)],
        "seconds": [
            {bits: values * boundaries.bits_per_value(bits) / (1e6 * rate) for bits in widths} for rate in rates
        ],
    }
    searches = {"alone": lambda found: precision.total(found, alone), "together": together}
    asked: list[tuple[str, str, int, tuple[int, ...]]] = [("both", "uniform", bits, (bits,) * count) for bits in widths]
    for (name, cost), (search, harm) in itertools.product(costs.items(), searches.items()):
        path = precision.greedy_path(harm, cost)
        for budget in BUDGETS:
            limit = precision.total((budget,) * count, cost)
            asked.append((name, search, budget, precision.within(path, cost, limit)))
    text = " ".join(["none"] * count)
    rows = [
        Setting(model, "both", "none", -1, text, 32.0, seconds_of(values, rates), 0.0, 0.0, batch, loss)
        for batch, loss in enumerate(cut.judged([None] * count, batches))
    ]
    losses: dict[tuple[int, ...], list[float]] = {}
    for name, search, budget, chosen in asked:
        if chosen not in losses:
            losses[chosen] = cut.judged(chosen, batches)
        bits, seconds = (precision.total(chosen, cost) for cost in costs.values())
        known = (" ".join(map(str, chosen)), bits / count, seconds, precision.total(chosen, alone), together(chosen))
        rows += [Setting(model, name, search, budget, *known, batch, loss) for batch, loss in enumerate(losses[chosen])]
    return rows


def seconds_of(values: int, rates: Sequence[float]) -> float:
    """Return the seconds of fp32 activations over links of these rates, one after the other."""
    return sum(32 * values / (1e6 * rate) for rate in rates)


def main(asked: argparse.Namespace) -> None:
    """Go through the models; those in the tables are kept."""
    table = csv_rows.Table(asked.output / "settings.csv", Setting, "model", say=False)
    sensitivity = csv_rows.Table(asked.output / "sensitivity.csv", Sensitivity)
    for model, (stages, sequences, length, batches) in (QUICK if asked.quick else MODELS).items():
        if (model,) in table:
            continue
        cut = boundaries.Cut(model, stages, sequences=sequences, length=length, seed=0, precision="fp32")
        rows = sensitivities(cut, model)
        harm = [{row.bits: row.divergence for row in rows if row.boundary == at} for at in range(cut.boundaries)]
        sensitivity.add(rows)
        table.add(settings(cut, model, harm, batches, sequences * length * cut.parts[0].width))


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, boundaries.HERE)
