"""Train newer methods and their baselines on single characters: `python experiments/newer_methods/train.py`.

This writes runs.csv, a row for each training. The learning rate of each arm is the one with the least loss over
TUNING_SEED, which is not among the seeds that count. Workers run the one job program with the nodes that also run over
links (`testbed.training.workers`); models that are cut into stages are trained side by side
(`testbed.studies.stacked_text`).
"""

from __future__ import annotations

import argparse
import io
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from testbed import csv_rows
from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.make import make
from testbed.errors import DivergedError
from testbed.jobs.kind import Setting
from testbed.nodes.worker import Evaluated
from testbed.records import StepRecord
from testbed.spec import (
    AlignedSpec,
    DataParallelSpec,
    LowRankSpec,
    OptimiserSpec,
    OuterSpec,
    PipelineSpec,
    Recipe,
    TextSpec,
    TrainingSpec,
)
from testbed.studies.stacked import Trial
from testbed.studies.stacked_text import TextMethod, train
from testbed.training.alone import train_together
from testbed.training.workers import ReplicasTraining
from testbed.workloads import characters

WIDTH = characters.WIDTH
WORKERS, BATCH, BATCHES, QUICK_BATCHES = 4, 8, 120, 60
SEEDS, TUNING_SEED = range(5), 100
NESTEROV = OuterSpec(learning_rate=0.7, momentum=0.9, nesterov=True)
GOSSIP = OuterSpec(learning_rate=0.7, momentum=0.5, nesterov=False)
BASES, WIDER = LowRankSpec(rank=8, refresh=8), LowRankSpec(rank=8, refresh=1, directions=2)
TABLES = (0, 1, 6)
"""The matrices that are embeddings or the output layer."""


class Arm(NamedTuple):
    """One method, with the learning rates that are tried; of one exchange per batch, only the rate that was best in
    local_steps_or_codec. `data` are fields of a cell's table `data`; empty: the model is cut into stages.
    """

    name: str
    codec: str
    rates: tuple[float, ...]
    data: Mapping[str, Any] = MappingProxyType({})
    muon: bool = False
    apart: bool = False
    """Each matrix by itself, as with Muon and with bases; otherwise all rows are one matrix."""


def _local(steps: int, exchange: str = "all-reduce", outer: OuterSpec = NESTEROV) -> dict[str, Any]:
    return {"exchange": exchange, "local_steps": steps, "outer": outer}


ARMS = (
    Arm("DiLoCo", "fp32", (0.004, 0.008, 0.016), _local(20)),
    Arm("MuLoCo, 2 bits", "ef(int2(group=64))", (0.008, 0.016), _local(20, "all-gather"), muon=True),
    Arm("DiLoCo, 2 bits", "ef(int2(group=64))", (0.004, 0.008, 0.016), _local(20, "all-gather")),
    Arm("NoLoCo", "fp32", (0.004, 0.008, 0.016), _local(20, "pairs", GOSSIP)),
    Arm("stages, bf16", "bf16", (0.008, 0.016)),
    Arm("stages, rvq", "rvq(12)", (0.004, 0.008)),
    Arm("stages, PowerSGD", "powersgd(2)", (0.004, 0.008)),
    Arm(
        "ARC-Top-K",
        "fp32",
        (0.004, 0.008, 0.016),
        {"exchange": "all-reduce", "aligned": AlignedSpec(share=0.125, directions=1)},
    ),
    Arm("top-k", "ef(topk(0.0777, tensor))", (0.008, 0.016, 0.032), {"exchange": "all-gather"}),
    Arm("all-reduce", "fp32", (0.004, 0.008, 0.016), {"exchange": "all-reduce"}),
    Arm("DiLoCo, 30 steps", "fp32", (0.004, 0.008), _local(30)),
    Arm("TSR-Adam", "fp32", (0.016, 0.032, 0.064, 0.128), {"exchange": "all-reduce", "low_rank": BASES}),
    Arm("PowerSGD", "ef(powersgd(1))", (0.002, 0.004, 0.008, 0.016), {"exchange": "all-gather"}, apart=True),
    Arm("top-k, 3.5 %", "ef(topk(0.0347, tensor))", (0.008, 0.016, 0.032, 0.064), {"exchange": "all-gather"}),
    Arm("TSR-Adam, 20 local", "fp32", (0.008, 0.016, 0.032, 0.064, 0.128), {**_local(20), "low_rank": WIDER}),
)


class Row(NamedTuple):
    """A line of runs.csv."""

    use: str
    """tuning, or result."""
    method: str
    learning_rate: float
    seed: int
    batches: int
    """Of each worker."""
    loss: float
    """Validation loss after the last batch, in nats; NaN where training diverged."""
    bits: float
    """Bits per value: of what a worker sends per exchange and parameter; of a message between stages."""
    sent_bits: float
    """Bits that a worker sends per batch and parameter; 0 between stages."""


class Characters:
    """A `worker.Learner` of the model of single characters: each matrix by itself, or all rows as one."""

    parts = 1

    def __init__(self, seed: int, number: int, workers: int, apart: bool) -> None:
        weights = characters.first_weights(seed)
        parts = [part[0] for part in characters.matrices(weights[None])] if apart else [weights.view(-1, WIDTH)]
        self.parameters = [Parameter(part.clone()) for part in parts]
        self.tables = [self.parameters[number] for number in TABLES] if apart else []
        self._batches = characters.Batches(workers=workers, batch_size=BATCH, seed=seed)
        self._number = number

    def loss(self, batch: int, part: int) -> Tensor:
        """Return the loss on the worker's sequences of a batch."""
        return characters.losses(self._flat(), self._batches.batch(batch)[self._number][None])[0]

    @torch.no_grad()
    def evaluate(self) -> Evaluated:
        """Return the loss on the validation sequences."""
        return Evaluated(characters.losses(self._flat(), characters.validation()[None]).item())

    def _flat(self) -> Tensor:
        return torch.cat([parameter.reshape(-1) for parameter in self.parameters])[None]


class CharactersTraining(ReplicasTraining):
    """A data parallel training of that model."""

    def __init__(self, recipe: Recipe, apart: bool) -> None:
        super().__init__(Setting(recipe, 0, ""))
        self._apart = apart

    def learner(self, number: int) -> Characters:
        """Make a worker's learner."""
        return Characters(self.recipe.training.seed, number, self.data.workers, self._apart)


def recipe_of(arm: Arm, rate: float, seed: int, batches: int) -> Recipe:
    """Return the recipe of a training; of its workload only the number of tokens counts."""
    local = arm.data.get("local_steps", 1)
    text = TextSpec(
        family="gpt2",
        model="gpt2-nano",
        text="none",
        sequence_length=characters.SEQUENCE,
        batch_size=WORKERS * BATCH,
        validation_batches=1,
    )
    return Recipe(
        codec=arm.codec,
        workload=text,
        pipeline=PipelineSpec(stages=1, microbatches=1, schedule="gpipe", in_flight=1),
        data=DataParallelSpec(**{"workers": WORKERS, "staleness": 0, "local_steps": 1, **arm.data}),
        optimiser=OptimiserSpec(
            algorithm="muon" if arm.muon else "adamw",
            learning_rate=rate,
            weight_decay=0.0,
            beta1=0.9,
            beta2=0.99,
            clip_norm=1.0,
        ),
        training=TrainingSpec(steps=batches // local, warmup_steps=0, seed=seed, evaluate_every=0),
    )


def train_workers(arm: Arm, rate: float, seed: int, batches: int) -> Row:
    """Train an arm's workers once."""
    outputs, local = [io.StringIO() for _ in range(WORKERS)], arm.data.get("local_steps", 1)
    try:
        apart = arm.muon or arm.apart or "low_rank" in arm.data
        train_together(CharactersTraining(recipe_of(arm, rate, seed, batches), apart), outputs)
    except DivergedError:
        return Row("", arm.name, rate, seed, batches, math.nan, math.nan, math.nan)
    records = [[StepRecord.model_validate_json(line) for line in out.getvalue().splitlines()] for out in outputs]
    loss = records[-1][-1].loss
    assert loss is not None
    last = [node[-2] for node in records]
    sent = sum(8 * frame.payload_bytes for record in last for frame in record.sent) / WORKERS / characters.VALUES
    return Row("", arm.name, rate, seed, batches, round(loss, 5), round(sent, 4), round(sent / local, 5))


def train_stages(arm: Arm, trials: Sequence[tuple[float, int]], batches: int) -> list[Row]:
    """Train one model in stages with each rate and seed."""
    method = TextMethod("fp32", "values", workers=1, batch_size=WORKERS * BATCH, split=(0,), boundary=arm.codec)
    runs = [Trial(*trial) for trial in trials]
    ended = {each.run: each.loss for each in train(runs, method, batches=batches, evaluate_every=batches)}
    bits = message_bits(arm.codec)
    return [
        Row("", arm.name, *trial, batches, round(ended.get(run, math.nan), 5), bits, 0.0)
        for run, trial in enumerate(trials)
    ]


def message_bits(codec: str) -> float:
    """Return the bits per value of a message between stages, as encoded."""
    tokens = WORKERS * BATCH * characters.SEQUENCE
    sent = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(0))
    payload = make(codec, Context(0, 0, "forward")).encode(sent, MessageKey("train", 0, 0, ()))
    return round(8 * memoryview(payload).nbytes / sent.numel(), 4)


def trained(arm: Arm, trials: Sequence[tuple[float, int]], batches: int) -> list[Row]:
    """Train an arm with each rate and seed."""
    if not arm.data:
        return train_stages(arm, trials, batches)
    return [train_workers(arm, *trial, batches) for trial in trials]


def train_arm(arm: Arm, quick: bool) -> list[Row]:
    """Choose an arm's rate, and train all seeds with it."""
    batches, rates = QUICK_BATCHES if quick else BATCHES, arm.rates[:1] if quick else arm.rates
    tuning = trained(arm, [(rate, TUNING_SEED) for rate in rates], batches) if len(rates) > 1 else []
    best = min(tuning, key=_loss_of).learning_rate if tuning else rates[0]
    results = trained(arm, [(best, seed) for seed in (SEEDS[:2] if quick else SEEDS)], batches)
    return [row._replace(use="tuning") for row in tuning] + [row._replace(use="result") for row in results]


def _loss_of(row: Row) -> float:
    return math.inf if math.isnan(row.loss) else row.loss


def main(asked: argparse.Namespace) -> None:
    """Train all arms. An arm that the table has is not trained again."""
    asked.output.mkdir(parents=True, exist_ok=True)
    path = asked.output / "runs.csv"
    lines: list[Sequence[Any]] = list(csv_rows.read_rows(path))
    for arm in ARMS:
        if all(line[1] != arm.name for line in lines):
            lines += train_arm(arm, asked.quick)
            csv_rows.write_rows(path, Row._fields, lines)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
