"""Train a model in stages through each codec, and evaluate it 16 times on the way:
`python experiments/subspace_growth/train.py`, or on a GPU, larger and longer, with `--device cuda`.

This writes curves.csv, a row for each evaluation. Learning rates are constant after a warm-up, so that losses on the
way are those of shorter trainings. The rates of bf16, which all codecs that leave the model unchanged use, and of the
first subspace, which the others use, are chosen after an eighth of the batches, with a seed that does not count. The
spread of PILOT_SEEDS says beforehand what the others can resolve (figures.py). Trainings have checkpoints; the
same command continues after an interruption, and keeps what is finished.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from testbed import csv_rows
from testbed.errors import DivergedError
from testbed.records import StepRecord
from testbed.spec import OptimiserSpec, PipelineSpec, Recipe, TextSpec, TrainingDevice, TrainingSpec
from testbed.sweep.trainings import floors_of, is_trained, load_training
from testbed.sweep.tune import value_beyond
from testbed.training.alone import AloneJob, train_alone
from testbed.workloads import characters, models

VALIDATION_SEQUENCES, EVALUATIONS, PILOT = 128, 16, 8
"""Sequences per evaluation, and evaluations; a pilot is one of so many parts of a training."""
PILOT_SEEDS = (100, 101)
"""The first one tries the rates of bf16 and of the first subspace."""
WIDEN = 2
"""Rates that are added while the best is at an end of the list."""


class Form(NamedTuple):
    """One size of the experiment."""

    device: TrainingDevice
    model: str
    length: int
    """Characters per sequence."""
    sequences: int
    """Per batch."""
    batches: int
    ratios: tuple[int, ...]
    """Of the subspaces: channels per coordinate."""
    rank: int
    """Of PowerSGD, so that it sends as many bytes as the first subspace."""
    rates: tuple[float, ...]
    seeds: int
    every: int
    """Batches between checkpoints."""

    @property
    def arms(self) -> tuple[str, ...]:
        """The codecs, the baseline first."""
        return ("bf16", *(f"subspace({ratio})" for ratio in self.ratios), f"powersgd({self.rank})", "int4(group=64)")


CPU = Form("cpu", "gpt2-characters", 64, 8, 640, (8, 32), 7, (0.002, 0.004, 0.008), 3, 160)
GPU = Form("cuda", "gpt2-characters-large", 128, 128, 1824, (8, 32, 100), 62, (0.0005, 0.001, 0.002), 4, 228)
QUICK = CPU._replace(model="gpt2-characters-shallow", batches=32, ratios=(8,), rates=(0.004,), seeds=2)


class Row(NamedTuple):
    """A line of curves.csv."""

    device: str
    use: str
    """pilot, or result."""
    codec: str
    learning_rate: float
    seed: int
    tokens: int
    """Characters trained on so far."""
    loss: float
    """Validation loss with the codec in place, in nats per character; NaN where training diverged."""
    bits: float
    """Bits per value sent, of payloads in both directions."""
    unigram_floor: float
    bigram_floor: float


class Lab:
    """The trainings of one form, and their table."""

    def __init__(self, form: Form, results: Path, output: Path, text: Path | None) -> None:
        self.form, self._results = form, results
        self._table = csv_rows.Table(
            output / "curves.csv", Row, *Row._fields[:3], "learning_rate", "seed", digits=6, say=False
        )
        results.mkdir(parents=True, exist_ok=True)
        symbols = characters.characters() if text is None else characters.symbols_of(text.read_bytes())
        self._tokens = results / f"{'bundled' if text is None else text.stem}.npy"
        np.save(self._tokens, symbols)

    def recipe(self, codec: str, rate: float, seed: int, batches: int) -> Recipe:
        """Return the recipe of a training."""
        form = self.form
        stages = models.SIZES[form.model].layers
        return Recipe(
            codec=codec,
            workload=TextSpec(
                family="gpt2",
                model=form.model,
                text="bundled",
                sequence_length=form.length,
                batch_size=form.sequences,
                validation_batches=VALIDATION_SEQUENCES // form.sequences,
                precision="bf16" if form.device == "cuda" else "fp32",
            ),
            pipeline=PipelineSpec(stages=stages, microbatches=1, schedule="gpipe", in_flight=1),
            optimiser=OptimiserSpec(
                learning_rate=rate, weight_decay=0.01, beta1=0.9, beta2=0.99, clip_norm=1.0,
                learning_rate_warmup=form.batches // 64,
            ),
            training=TrainingSpec(
                steps=batches, warmup_steps=0, seed=seed, evaluate_every=form.batches // EVALUATIONS,
                device=form.device,
            ),
        )  # fmt: skip

    def run(self, use: str, trials: Sequence[tuple[str, float, int]]) -> None:
        """Train what the table lacks: codecs, each with a rate and a seed."""
        batches = self.form.batches // (PILOT if use == "pilot" else 1)
        for trial in trials:
            if (self.form.device, use, *trial) not in self._table:
                self._table.add(self._rows(use, trial, self.recipe(*trial, batches)))

    def _rows(self, use: str, trial: tuple[str, float, int], recipe: Recipe) -> Iterator[Row]:
        folder = self._results / recipe.id
        print(*trial, folder, flush=True)  # noqa: T201
        try:
            if not is_trained(folder):
                train_alone(
                    AloneJob(
                        recipe=recipe,
                        vocabulary=characters.VOCABULARY,
                        tokens=str(self._tokens),
                        folder=str(folder),
                        checkpoint_every=self.form.every,
                    )
                )
        except DivergedError:
            yield Row(self.form.device, use, *trial, 0, math.nan, math.nan, math.nan, math.nan)
            return
        stages, floors = load_training(folder), floors_of(folder)
        bits = bits_per_value(stages)
        for record in stages[-1]:
            if record.phase == "evaluation" and record.loss is not None:
                tokens = record.step * self.form.sequences * self.form.length
                both = (floors.unigram or math.nan, floors.bigram or math.nan)
                yield Row(self.form.device, use, *trial, tokens, record.loss, bits, *both)

    def tried(self, codec: str) -> dict[float, float]:
        """Return the rates that the first pilot seed has tried, with its last losses; infinite if it diverged."""
        wanted = [self.form.device, "pilot", codec, str(PILOT_SEEDS[0])]
        rows = (row for row in self._table.rows if [*map(str, row[:3]), str(row[4])] == wanted)
        losses = {float(row[3]): float(row[6]) for row in rows}
        return {rate: loss if math.isfinite(loss) else math.inf for rate, loss in losses.items()}

    def best_rate(self, codec: str) -> float:
        """Return the best rate, after adding up to WIDEN while the best is at an end of the list."""
        while len(losses := self.tried(codec)) < len(self.form.rates) + WIDEN:
            if (rate := value_beyond(losses)) is None:
                break
            self.run("pilot", [(codec, rate, PILOT_SEEDS[0])])
        return min(sorted(losses), key=lambda rate: losses[rate])


def bits_per_value(stages: Sequence[Sequence[StepRecord]]) -> float:
    """Return the mean over all messages of the last training step."""
    last = [[record for record in records if record.phase == "train"][-1] for records in stages]
    sent = [frame for record in last for frame in record.sent]
    return 32 * sum(frame.payload_bytes for frame in sent) / sum(frame.raw_bytes for frame in sent)


def main(asked: argparse.Namespace) -> None:
    """Train the pilots, and then seed by seed all arms."""
    form = QUICK if asked.quick else GPU if asked.device == "cuda" else CPU
    lab = Lab(form, asked.results, asked.output, asked.text)
    tuned = dict.fromkeys(form.arms[:2], 0.0)
    lab.run("pilot", [(codec, rate, PILOT_SEEDS[0]) for codec in tuned for rate in form.rates])
    for codec in tuned:
        tuned[codec] = lab.best_rate(codec)
    plain, inside = tuned.values()
    chosen = {codec: inside if codec.startswith("subspace") else plain for codec in form.arms}
    lab.run("pilot", [(codec, rate, seed) for seed in PILOT_SEEDS for codec, rate in chosen.items()])
    for seed in range(0 if asked.pilot else form.seeds):
        lab.run("result", [(codec, rate, seed) for codec, rate in chosen.items()])


if __name__ == "__main__":
    csv_rows.run_program(
        main,
        __doc__,
        __file__,
        device={"choices": ["cpu", "cuda"], "default": "cpu", "help": "where to train, which also decides the size"},
        results={"type": Path, "default": Path("results/subspace_growth"), "help": "folder for the trainings"},
        text={"type": Path, "help": "another text than the bundled one, which a GPU reads six times"},
        pilot={"action": "store_true", "help": "stop after the pilots"},
    )
