"""Train four workers by each method of the DiLoCo family, with 25 times the parameters of local_steps_or_codec:
`python experiments/diloco_scale/train.py`, or on a GPU, with 800 times and longer, with `--device cuda`.

This writes runs.csv, a row for each training. A method's learning rate is the one with the least loss after half the
batches over TUNING_SEED, which does not count; one more seed at that rate says beforehand what the others can resolve
(figures.py). Trainings have checkpoints; the same command continues after an interruption, and keeps what is finished.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from testbed import csv_rows
from testbed.errors import DivergedError
from testbed.records import StepRecord
from testbed.spec import (
    DataParallelSpec,
    OptimiserSpec,
    OuterSpec,
    PipelineSpec,
    Recipe,
    TextSpec,
    TrainingDevice,
    TrainingSpec,
)
from testbed.sweep.trainings import is_trained, load_training
from testbed.sweep.tune import value_beyond
from testbed.training.alone import AloneJob, train_alone
from testbed.workloads import characters

WORKERS, VALIDATION_CHARACTERS = 4, 16_384
TUNING_SEED, PILOT_SEEDS = 100, (101,)
PARTS = 2
"""A tuning or pilot training is one of so many parts of a whole one."""
WIDEN = 2
"""Rates that are added while the best is at an end of the list."""
MEAN = OuterSpec(learning_rate=1.0, momentum=0.0, nesterov=False)
SMALL_OUTER = {8: 0.175}
"""Outer rates that were best in local_steps_or_codec; with more local steps it was the published 0.7."""


class Arm(NamedTuple):
    """One method."""

    name: str
    codec: str
    rate: float
    """The middle of the rates that are tried, as a multiple of the form's."""
    local_steps: int = 1
    outer: OuterSpec | None = None
    sign: bool = False
    """The update is the sign of the mean message."""
    frozen: bool = False
    """1-bit Adam."""


class Form(NamedTuple):
    """One size of the experiment."""

    device: TrainingDevice
    model: str
    length: int
    """Characters of a sequence."""
    sequences: int
    """Per batch, of all workers together."""
    batches: int
    local_steps: tuple[int, ...]
    varied: tuple[int, ...]
    """Local steps that two bits and SparseLoCo are trained with, too."""
    rates: tuple[float, ...]
    """Of all-reduce: the middle one and its neighbours are tried."""
    seeds: int

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The methods, the baseline first."""
        local = []
        for steps in self.local_steps:
            nesterov = OuterSpec(learning_rate=SMALL_OUTER.get(steps, 0.7), momentum=0.9, nesterov=True)
            local.append(Arm(f"DiLoCo {steps}", "fp32", 1.0, steps, nesterov))
            if steps not in self.varied:
                continue
            local += [
                Arm(f"DiLoCo {steps}, 2 bits", "ef(int2(group=64))", 1.0, steps, nesterov),
                Arm(f"SparseLoCo {steps}", "ef-decay(topk-chunk(0.0156), 0.95)", 1.0, steps, MEAN),
            ]
        return (
            Arm("all-reduce", "fp32", 1.0),
            *local,
            Arm("DeMo", "ef-decay(dct(topk-chunk(0.03125, 1024)), 0.999)", 0.5, sign=True),
            Arm("PowerSGD", "ef(powersgd(4))", 1.0),
            Arm("1-bit Adam", f"warmup(ef(onebit), {self.frozen_after})", 1.0, frozen=True),
        )

    @property
    def frozen_after(self) -> int:
        """Batches before 1-bit Adam freezes its second moment: 15 %, as published."""
        return self.batches * 3 // 20


CPU = Form("cpu", "gpt2-characters-shallow", 64, 8, 1024, (8, 32), (32,), (0.001, 0.002, 0.004), 3)
GPU = Form(
    "cuda", "gpt2-characters-wide", 128, 128, 2048, (8, 32, 128, 512), (8, 32, 128, 512), (0.00025, 0.0005, 0.001), 3
)
QUICK = CPU._replace(batches=16, local_steps=(8,), varied=(8,), rates=(0.002,), seeds=2)


class Row(NamedTuple):
    """A line of runs.csv."""

    device: str
    use: str
    """tuning, pilot, or result."""
    method: str
    learning_rate: float
    seed: int
    batches: int
    loss: float
    """Validation loss after the last batch, in nats per character; NaN where training diverged."""
    bits: float
    """Bits per parameter of a worker's last message."""
    sent_bits: float
    """Bits that a worker sends per batch and parameter, mean over the training."""


class Lab:
    """The trainings of one form, and their table."""

    def __init__(self, form: Form, results: Path, output: Path, text: Path | None) -> None:
        self.form, self._results = form, results
        self.table = csv_rows.Table(output / "runs.csv", Row, *Row._fields[:5], digits=6)
        results.mkdir(parents=True, exist_ok=True)
        symbols = characters.characters() if text is None else characters.symbols_of(text.read_bytes())
        self._tokens = results / f"{'bundled' if text is None else text.stem}.npy"
        np.save(self._tokens, symbols)

    def recipe(self, arm: Arm, rate: float, seed: int, batches: int) -> Recipe:
        """Return the recipe of a training."""
        form = self.form
        return Recipe(
            codec=arm.codec,
            workload=TextSpec(
                family="gpt2",
                model=form.model,
                text="bundled",
                sequence_length=form.length,
                batch_size=form.sequences,
                validation_batches=VALIDATION_CHARACTERS // (form.length * form.sequences),
                precision="bf16" if form.device == "cuda" else "fp32",
            ),
            pipeline=PipelineSpec(stages=1, microbatches=1, schedule="gpipe", in_flight=1),
            data=DataParallelSpec(
                workers=WORKERS, exchange="star", answer="fp32", staleness=0, local_steps=arm.local_steps,
                outer=arm.outer,
            ),
            optimiser=OptimiserSpec(
                learning_rate=rate,
                weight_decay=0.0,
                beta1=0.0 if arm.sign else 0.9,
                beta2=0.0 if arm.sign else 0.99,
                clip_norm=1e9 if arm.sign else 1.0,
                frozen_after=form.frozen_after if arm.frozen else None,
            ),
            training=TrainingSpec(
                steps=batches // arm.local_steps, warmup_steps=0, seed=seed, evaluate_every=0,
                device=form.device,
            ),
        )  # fmt: skip

    def run(self, use: str, trials: Sequence[tuple[Arm, float, int]]) -> None:
        """Train what the table lacks: methods, each with a rate and a seed."""
        batches = self.form.batches // (1 if use == "result" else PARTS)
        for arm, rate, seed in trials:
            key = (self.form.device, use, arm.name, rate, seed)
            if (*key[:3], f"{rate:.6g}", seed) not in self.table:
                self.table.add([Row(*key, batches, *self._measured(self.recipe(arm, rate, seed, batches), batches))])

    def _measured(self, recipe: Recipe, batches: int) -> tuple[float, float, float]:
        """Train a recipe if it is not; returns the numbers of a row."""
        folder = self._results / recipe.id
        try:
            if not is_trained(folder):
                train_alone(
                    AloneJob(
                        recipe=recipe,
                        vocabulary=characters.VOCABULARY,
                        tokens=str(self._tokens),
                        folder=str(folder),
                        checkpoint_every=max(1, 256 // recipe.parallelism.batches_per_step),
                    )
                )
        except DivergedError:
            return math.nan, math.nan, math.nan
        return measure(load_training(folder), batches)

    def tried(self, arm: Arm) -> dict[float, float]:
        """Return the rates that the tuning seed has tried, with its losses; infinite if it diverged."""
        wanted = [self.form.device, "tuning", arm.name]
        rows = (row for row in self.table.rows if list(map(str, row[:3])) == wanted)
        losses = {float(row[3]): float(row[6]) for row in rows}
        return {rate: loss if math.isfinite(loss) else math.inf for rate, loss in losses.items()}

    def best_rate(self, arm: Arm) -> float:
        """Return the best rate, after adding up to WIDEN while the best is at an end of the list."""
        while len(losses := self.tried(arm)) < len(self.form.rates) + WIDEN:
            if (rate := value_beyond(losses)) is None:
                break
            self.run("tuning", [(arm, rate, TUNING_SEED)])
        return min(sorted(losses), key=lambda rate: losses[rate])


def measure(nodes: Sequence[Sequence[StepRecord]], batches: int) -> tuple[float, float, float]:
    """Return the last loss, the bits per parameter of a worker's last message, and those sent per batch."""
    loss = next(record.loss for record in reversed(nodes[-1]) if record.phase == "evaluation")
    assert loss is not None
    sent = [frame for record in nodes[0] for frame in record.sent]
    bits = [32 * frame.payload_bytes / frame.raw_bytes for frame in sent]
    return loss, bits[-1], sum(bits) / batches


def main(asked: argparse.Namespace) -> None:
    """Tune all methods, train the pilots, and then seed by seed all methods."""
    form = QUICK if asked.quick else GPU if asked.device == "cuda" else CPU
    lab = Lab(form, asked.results, asked.output, asked.text)
    lab.run("tuning", [(arm, rate * arm.rate, TUNING_SEED) for arm in form.arms for rate in form.rates])
    chosen: dict[Arm, float] = {}
    for arm in form.arms:
        chosen[arm] = lab.best_rate(arm)
    for seed in PILOT_SEEDS:
        lab.run("pilot", [(arm, rate, seed) for arm, rate in chosen.items()])
    for seed in range(0 if asked.pilot else form.seeds):
        lab.run("result", [(arm, rate, seed) for arm, rate in chosen.items()])


if __name__ == "__main__":
    csv_rows.run_program(
        main,
        __doc__,
        __file__,
        device={"choices": ["cpu", "cuda"], "default": "cpu", "help": "where to train, which also decides the size"},
        results={"type": Path, "default": Path("results/diloco_scale"), "help": "folder for the trainings"},
        text={"type": Path, "help": "another text than the bundled one"},
        pilot={"action": "store_true", "help": "stop before the trainings that count"},
    )
