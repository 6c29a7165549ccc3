"""Quantise a model that still learns, in one shot or for one setting: `python experiments/one_shot/train.py`.

A model of single characters is trained for `PRETRAINED` batches, after which its loss still falls; checkpoint.csv has
its curve. All arms go on from there with as many optimiser steps, with batches in the seed's order:

plain     without rounding
3 bits    weights and inputs of every layer in 3 bits
one-shot  one set of weights for all widths: in each step a pass at the most bits, whose logits teach two passes in
          which each layer's weights and inputs have drawn bits
searched  the bits that a search finds for a budget of 3 bits with the seed's one-shot model, trained alone

losses.csv has the held-out loss of each arm and setting; bits.csv, which bits a search found. A search goes by the
divergence from the logits at the most bits on one training batch: of each layer's weights or inputs alone, summed; or
of a setting as a whole. power.csv has what the spread of `PILOT`, whose seeds do not count, said in advance. What is
finished is kept.
"""

import argparse
import copy
import math
import random
from collections.abc import Sequence
from statistics import stdev
from typing import NamedTuple

import torch
from lsq import WIDTHS, Bits, Characters
from torch import Tensor
from torch.nn import functional

from testbed import csv_rows, keyed
from testbed.metrics import statistics
from testbed.policies import precision
from testbed.workloads.characters import Batches, validation

PRETRAINED, STEPS, EVERY = 200, 50, 25
PRETRAINING_BATCH, BATCH, FIRST_RATE, WARMUP = 32, 16, 4e-3, 20
RATE, OF_STEPS = 1e-3, 1e-2
"""Learning rates of weights in all arms, and of step sizes, relative."""
PILOT, SEEDS = (100, 101), range(3)
"""Fewer than the pilot asked for: power.csv."""
STUDENTS, PULL = 2, 0.01
"""Passes at drawn bits in a step of one-shot (the source has three), and how strongly the outputs of layers at their
fewest bits are pulled to those at the most.
"""
BUDGETS = (4, 3)
ALONE = "3 bits"
BOUND = 0.02
"""Nats that a comparison should be able to detect."""


class Loss(NamedTuple):
    """A line of losses.csv."""

    use: str
    """pilot, or result."""
    arm: str
    seed: int
    setting: str
    """Of the judged model: plain, uniform, alone (found by the sum), together."""
    budget: int
    """Mean bits; 0: not rounded."""
    steps: int
    passes: int
    """Forward and backward passes of the training."""
    loss: float
    """Held-out, in nats per character."""


class Found(NamedTuple):
    """A line of bits.csv."""

    seed: int
    search: str
    budget: int
    bits: str
    """Of each layer: weights, inputs."""
    mean_bits: float


class Point(NamedTuple):
    """A line of checkpoint.csv."""

    batches: int
    loss: float


class Power(NamedTuple):
    """A line of power.csv: what the pilot said."""

    comparison: str
    pairs: int
    spread: float
    """Standard deviation of a pair's difference, in nats."""
    needed: int | None
    """Pairs that detect `BOUND` with 80 % power."""
    planned: int
    detectable: float
    """By so many."""


def loss_of(logits: Tensor, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of logits for sequences (b, n + 1)."""
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def divergence(teacher: Tensor, logits: Tensor) -> Tensor:
    """Return KL(teacher || logits) in nats per character."""
    wanted, given = (each.flatten(0, 1).log_softmax(-1) for each in (teacher, logits))
    return functional.kl_div(given, wanted, reduction="batchmean", log_target=True)


def uniform(bits: int, layers: int) -> list[Bits]:
    """Return the same bits for every layer."""
    return [(bits, bits)] * layers


@torch.no_grad()
def judged(model: Characters, bits: Sequence[Bits] | None) -> float:
    """Return the held-out loss."""
    model.set_bits(bits)
    held_out = validation()
    return float(loss_of(model(held_out[:, :-1]).logits, held_out))


def pretrained(batches: int) -> tuple[Characters, list[Point]]:
    """Train the checkpoint; returns its curve as well. The learning rate is constant, as in the middle of a run."""
    model, data, curve = Characters(0), Batches(workers=1, batch_size=PRETRAINING_BATCH, seed=1000), list[Point]()
    optimiser = torch.optim.AdamW(model.parameters(), lr=FIRST_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    for number in range(batches):
        for group in optimiser.param_groups:
            group["lr"] = FIRST_RATE * min(1.0, (number + 1) / WARMUP)
        batch = data.batch(number)[0]
        optimiser.zero_grad()
        loss_of(model(batch[:, :-1]).logits, batch).backward()
        optimiser.step()
        if (number + 1) % EVERY == 0:
            curve.append(Point(number + 1, judged(model, None)))
    return model, curve


class Learner:
    """A copy of the checkpoint that is trained in one of the ways."""

    def __init__(self, of: Characters, seed: int) -> None:
        self.model, self.passes = copy.deepcopy(of), 0
        self._data = Batches(workers=1, batch_size=BATCH, seed=seed)
        self.first = self._data.batch(0)[0]
        self.model.start_steps(self.first[:, :-1])
        self._draw = random.Random(keyed.key(f"one-shot bits {seed}", size_bytes=8))
        groups = self.model.groups(RATE, OF_STEPS)
        self._optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.99), weight_decay=0.0)  # type: ignore[arg-type]

    def learn(self, steps: int, bits: Sequence[Bits] | None, *, one_shot: bool = False) -> None:
        """Take steps with these bits, or in one shot for all."""
        for number in range(steps):
            batch = self._data.batch(number)[0]
            self._optimiser.zero_grad()
            if one_shot:
                self._one_shot(batch)
            else:
                self.model.set_bits(bits)
                loss_of(self.model(batch[:, :-1]).logits, batch).backward()
                self.passes += 1
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimiser.step()

    def _one_shot(self, batch: Tensor) -> None:
        most, fewest = max(WIDTHS), min(WIDTHS)
        self.model.set_bits(uniform(most, len(self.model.layers)))
        teacher = self.model(batch[:, :-1])
        loss_of(teacher.logits, batch).backward()
        wanted = teacher.logits.detach()
        for _ in range(STUDENTS):
            drawn: list[Bits] = [(self._draw.choice(WIDTHS), self._draw.choice(WIDTHS)) for _ in self.model.layers]
            self.model.set_bits(drawn)
            passed = self.model(batch[:, :-1])
            loss = 0.5 * loss_of(passed.logits, batch) + 0.5 * divergence(wanted, passed.logits)
            for bits, given, taught in zip(drawn, passed.outputs, teacher.outputs, strict=True):
                if fewest in bits:
                    loss = loss + PULL * functional.mse_loss(given, taught.detach())
            loss.backward()
        self.passes += 1 + STUDENTS


# ---------------------------------------------------------------------- the search
def shares(model: Characters) -> list[float]:
    """Return what a bit of each cell adds to the mean bits: cells are a layer's weights, then its inputs. Half of the
    mean is that of all weights, half that of all inputs.
    """
    weights = [layer.weight.numel() for layer in model.layers]  # type: ignore[union-attr]
    inputs = [layer.weight.shape[1] for layer in model.layers]  # type: ignore[union-attr, index]
    pairs = zip(weights, inputs, strict=True)
    return [share for one, two in pairs for share in (one / sum(weights) / 2, two / sum(inputs) / 2)]


@torch.no_grad()
def searched(model: Characters, batch: Tensor, seed: int) -> list[Found]:
    """Return the bits that each search finds for each budget."""
    cells, symbols = shares(model), batch[:, :-1]
    most = max(WIDTHS)
    model.set_bits(uniform(most, len(model.layers)))
    teacher = model(symbols).logits

    def harm(widths: precision.Widths) -> float:
        model.set_bits(list(zip(widths[::2], widths[1::2], strict=True)))
        return float(divergence(teacher, model(symbols).logits))

    alone = [
        {bits: harm((*[most] * at, bits, *[most] * (len(cells) - at - 1))) for bits in WIDTHS}
        for at in range(len(cells))
    ]
    paths = {
        "alone": (precision.greedy_path(lambda widths: precision.total(widths, alone), _costs(cells)), 1),
        "together": (
            precision.greedy_path(
                lambda widths: harm(tuple(bits for each in widths for bits in (each, each))),
                _costs([sum(pair) for pair in zip(cells[::2], cells[1::2], strict=True)]),
            ),
            2,
        ),
    }
    rows = []
    for (name, (path, times)), budget in ((each, budget) for each in paths.items() for budget in BUDGETS):
        every = cells if times == 1 else [sum(pair) for pair in zip(cells[::2], cells[1::2], strict=True)]
        widths = precision.within(path, _costs(every), budget)
        mean = math.fsum(share * bits for share, bits in zip(every, widths, strict=True))
        whole = [bits for bits in widths for _ in range(times)]
        rows.append(Found(seed, name, budget, " ".join(map(str, whole)), mean))
    return rows


def _costs(cells: Sequence[float]) -> list[dict[int, float]]:
    return [{bits: share * bits for bits in WIDTHS} for share in cells]


def bits_of(text: str) -> list[Bits]:
    """Return the bits of a line of bits.csv."""
    numbers = [int(part) for part in text.split()]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


# ---------------------------------------------------------------------- the program
Settings = dict[tuple[str, int], Sequence[Bits] | None]
"""Bits by setting and budget, as in losses.csv."""


class Study:
    """The tables, and the checkpoint that all arms start from."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._output = asked.output
        self._batches, self._steps = (40, 3) if asked.quick else (PRETRAINED, STEPS)
        self.losses = csv_rows.Table(asked.output / "losses.csv", Loss, *Loss._fields[:5], digits=8)
        self.found = csv_rows.Table(asked.output / "bits.csv", Found, "seed", "search", "budget")
        self._checkpoint: Characters | None = None

    @property
    def checkpoint(self) -> Characters:
        """The checkpoint, trained when it is first needed."""
        if self._checkpoint is None:
            self._checkpoint, curve = pretrained(self._batches)
            csv_rows.write_rows(self._output / "checkpoint.csv", Point._fields, curve, digits=6)
        return self._checkpoint

    def _add(self, use: str, arm: str, seed: int, of: Learner, settings: Settings) -> None:
        losses = {key: judged(of.model, bits) for key, bits in settings.items()}
        self.losses.add(Loss(use, arm, seed, *key, self._steps, of.passes, each) for key, each in losses.items())

    def one_shot(self, use: str, seed: int) -> float:
        """Train for all widths, search, and judge; returns the loss at the smallest uniform budget."""
        key = use, "one-shot", seed, "uniform", min(BUDGETS)
        if key not in self.losses:
            learner = Learner(self.checkpoint, seed)
            learner.learn(self._steps, None, one_shot=True)
            layers = len(learner.model.layers)
            settings: Settings = {
                ("uniform", bits): uniform(bits, layers) for bits in (max(WIDTHS), *BUDGETS, min(WIDTHS))
            }
            if use == "result":
                rows = searched(learner.model, learner.first, seed)
                self.found.add(rows)
                settings |= {(row.search, row.budget): bits_of(row.bits) for row in rows}
            self._add(use, "one-shot", seed, learner, settings)
        return self._loss(*key)

    def alone(self, use: str, seed: int) -> float:
        """Train for 3 bits."""
        key = use, ALONE, seed, "uniform", min(BUDGETS)
        if key not in self.losses:
            learner = Learner(self.checkpoint, seed)
            bits = uniform(min(BUDGETS), len(learner.model.layers))
            learner.learn(self._steps, bits)
            self._add(use, ALONE, seed, learner, {("uniform", min(BUDGETS)): bits})
        return self._loss(*key)

    def others(self, seed: int) -> None:
        """Train without rounding, and for the bits that were found; and judge the checkpoint as it is."""
        budget = min(BUDGETS)
        if ("result", "searched", seed, "together", budget) in self.losses:
            return
        learner = Learner(self.checkpoint, seed)
        layers = len(learner.model.layers)
        settings: Settings = {("plain", 0): None}
        settings |= {("uniform", bits): uniform(bits, layers) for bits in (max(WIDTHS), *BUDGETS, min(WIDTHS))}
        self._add("result", "checkpoint", seed, learner, settings)
        learner.learn(self._steps, None)
        self._add("result", "plain", seed, learner, {("plain", 0): None})
        learner = Learner(self.checkpoint, seed)
        row = self.found.find(seed, "together", budget)
        assert row is not None
        bits = bits_of(row["bits"])
        learner.learn(self._steps, bits)
        self._add("result", "searched", seed, learner, {("together", budget): bits})

    def _loss(self, *key: object) -> float:
        row = self.losses.find(*key)
        assert row is not None
        return float(row["loss"])

    def power(self, pilot: Sequence[int], planned: int) -> None:
        """Write power.csv, before any seed that counts."""
        first = {seed: self._loss("pilot", "one-shot", seed, "uniform", 3) for seed in pilot}
        second = {seed: self._loss("pilot", ALONE, seed, "uniform", 3) for seed in pilot}
        gaps = [first[seed] - second[seed] for seed in pilot]
        if len(gaps) > 1 and not (self._output / "power.csv").is_file():
            error = stdev(gaps) / math.sqrt(len(gaps))
            needed = statistics.seeds_needed(error, len(gaps), BOUND)
            least = statistics.detectable(stdev(gaps) / math.sqrt(planned), planned - 1)
            row = Power("one-shot at 3 bits, against 3 bits alone", len(gaps), stdev(gaps), needed, planned, least)
            csv_rows.write_rows(self._output / "power.csv", Power._fields, [row], digits=4)


def main(asked: argparse.Namespace) -> None:
    """Train the pilot, then what counts."""
    study, seeds = Study(asked), SEEDS[:2] if asked.quick else SEEDS
    for seed in PILOT:
        study.one_shot("pilot", seed)
        study.alone("pilot", seed)
    study.power(PILOT, len(seeds))
    for seed in seeds:
        study.one_shot("result", seed)
        study.alone("result", seed)
        study.others(seed)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
