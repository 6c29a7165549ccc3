"""Train one model for all widths, and one for each: `python experiments/mixed_precision/train.py`.

This writes losses.csv: the loss on held-out text of each trained model at each width, every boundary alike, and without
a codec. All arms go on from the same trained GPT-2 with the same batches and learning rate:

none      no codec
1, 2, 4   that width at every boundary, in every step: one model for each
drawn     each boundary's width drawn anew in each step
one-shot  the paper's: in each step a pass at the most bits, which is the teacher of two passes at drawn widths: half of
          their loss is the divergence from it, and at boundaries that drew their smallest width, what arrives is pulled
          to what arrived in the teacher's pass; the smallest width is withheld from the least stable boundaries
"""

import argparse
import random
from collections.abc import Sequence
from typing import NamedTuple

import boundaries
import torch
from torch import Tensor

from testbed import csv_rows, keyed
from testbed.policies import precision
from testbed.workloads.data import Batch

MODEL, STAGES, SEQUENCES, LENGTH = "gpt2-mini-trained", 4, 4, 128
QUICK = ("gpt2-nano", 3, 2, 64)
DRAWN = (8, 4, 2, 1)
FIXED = (4, 2, 1)
ARMS = ("none", *map(str, FIXED), "drawn", "one-shot")
STEPS, WARMUP, RATE = 60, 10, 1e-4
SEEDS = range(3)
HELD_OUT = 8
"""Batches."""
STUDENTS = 2
"""Passes at drawn widths in a step of one-shot; the paper has three."""
PULL = 0.01
"""The weight of what arrives at the smallest width being pulled to the teacher's."""
EVERY = 20
"""Steps between two choices of the boundaries from which the smallest width is withheld."""


class Loss(NamedTuple):
    """A line of losses.csv."""

    arm: str
    seed: int
    steps: int
    passes: int
    """Forward and backward passes of the whole training."""
    bits: int
    """Of every boundary; 0: no codec."""
    loss: float


class Learner:
    """A model that is trained in one of the ways."""

    def __init__(self, arm: str, seed: int, steps: int, cut: boundaries.Cut) -> None:
        self._arm, self._steps, self._cut = arm, steps, cut
        self._draw = random.Random(keyed.key(f"widths {seed}", size_bytes=8))
        self._parameters = cut.parameters()
        self._optimiser = torch.optim.AdamW(self._parameters, lr=RATE, betas=(0.9, 0.99), weight_decay=0.1)
        self._errors = [0.0] * cut.boundaries
        """Relative errors of the smallest width, of late: what is not stable."""
        self._withheld: frozenset[int] = frozenset()
        self.passes = 0

    def step(self, number: int) -> None:
        """Learn from one batch."""
        batch = self._cut.data.train(number, 0, 1)
        for group in self._optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (number + 1) / WARMUP)
        self._cut.train(True)
        if self._arm == "one-shot":
            self._one_shot(batch)
            if number >= EVERY and not number % EVERY:
                self._withheld = precision.withheld(self._errors, number / self._steps)
        else:
            self._learn(self._cut.loss(self._cut.forward(batch.inputs, self._widths()).logits, batch))
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimiser.step()
        self._optimiser.zero_grad()

    def _widths(self) -> list[int | None]:
        count = self._cut.boundaries
        if self._arm == "none":
            return [None] * count
        if self._arm in ("drawn", "one-shot"):
            return [self._draw.choice(DRAWN[:-1] if boundary in self._withheld else DRAWN) for boundary in range(count)]
        return [int(self._arm)] * count

    def _learn(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.passes += 1

    def _one_shot(self, batch: Batch) -> None:
        best = self._cut.forward(batch.inputs, [max(DRAWN)] * self._cut.boundaries)
        self._learn(self._cut.loss(best.logits, batch))
        teacher, received = best.logits.detach(), [each.detach() for each in best.received]
        for _ in range(STUDENTS):
            widths = self._widths()
            found = self._cut.forward(batch.inputs, widths)
            loss = 0.5 * self._cut.loss(found.logits, batch) + 0.5 * boundaries.divergence(teacher, found.logits)
            for boundary, bits in enumerate(widths):
                if bits == min(DRAWN):
                    wanted = received[boundary]
                    loss = loss + PULL * (found.received[boundary] - wanted).square().mean() / wanted.square().mean()
                    sent = found.sent[boundary].detach()
                    error = float((found.received[boundary].detach() - sent).norm() / sent.norm())
                    self._errors[boundary] += 0.1 * (error - self._errors[boundary])
            self._learn(loss)


def trained(arm: str, seed: int, steps: int, setting: tuple[str, int, int, int], held_out: int) -> list[Loss]:
    """Train, and judge at every width."""
    model, stages, sequences, length = setting
    cut = boundaries.Cut(model, stages, sequences=sequences, length=length, seed=1 + seed, precision="bf16")
    learner = Learner(arm, seed, steps, cut)
    for number in range(steps):
        learner.step(number)
    at: Sequence[int] = (0, *DRAWN)
    means = [sum(each) / len(each) for bits in at for each in [cut.judged([bits or None] * cut.boundaries, held_out)]]
    return [Loss(arm, seed, steps, learner.passes, bits, loss) for bits, loss in zip(at, means, strict=True)]


def main(asked: argparse.Namespace) -> None:
    """Train all arms; those in the table are kept."""
    seeds, steps, setting, held_out = SEEDS, STEPS, (MODEL, STAGES, SEQUENCES, LENGTH), HELD_OUT
    if asked.quick:
        seeds, steps, setting, held_out = range(2), 4, QUICK, 2
    table = csv_rows.Table(asked.output / "losses.csv", Loss, "arm", "seed")
    for seed in seeds:
        for arm in ("untrained", *ARMS):
            if (arm, seed) not in table and (arm != "untrained" or not seed):
                table.add(trained(arm, seed, 0 if arm == "untrained" else steps, setting, held_out))


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, boundaries.HERE)
