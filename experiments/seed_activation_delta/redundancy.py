"""Measure how much a tensor at a boundary has in common with an earlier one: `python
.../seed_activation_delta/redundancy.py`.

This trains the GPT-2 mini of sweep.toml, from random and from learned weights (the fp32 arms, in one process, without
a network), and writes redundancy.csv: the norm of X_t - X_{t-gap} over that of X_t, and what int8 makes of both, early
and late in training. figures.py draws it.
"""

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from testbed import csv_rows, paths
from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.make import make
from testbed.nodes.optimise import Optimiser, learning_rate
from testbed.spec import Cell
from testbed.sweep import plan
from testbed.workloads.build_stage import build_stage
from testbed.workloads.data import Data
from testbed.workloads.prepare import prepare_tokens

HERE = Path(__file__).resolve().parent
GAPS = (1, 2, 5, 10, 20, 50, 100)
"""Steps between the two tensors."""
MODELS, MOMENTS = ("gpt2-mini", "gpt2-mini-trained"), (20, 110)
"""`MOMENTS`: steps done when tensors are compared, besides all."""
WINDOW = 5
"""Consecutive steps whose ratios are averaged."""
FRESH, SAME, LEARNED = "a new batch each step", "one batch, not learned", "one batch, learned at each step"
"""What is sent at each step. SAME is a batch of the validation split, read at each step while other batches are
learned."""


class Row(NamedTuple):
    """A line of redundancy.csv."""

    model: str
    seed: int
    batches: str
    """FRESH, SAME or LEARNED."""
    tensor: str
    """X: activations; G: their gradients."""
    step: int
    """Optimiser steps done before the last of the window's tensors."""
    gap: int
    norm_ratio: float
    """|X_t - X_{t-gap}| / |X_t|, mean over the window."""
    int8_error: float
    """|decoded - X_t| / |X_t| of int8, sent as it is."""
    delta_error: float
    """The same of X_{t-gap} + int8 of the difference: what a receiver has that holds X_{t-gap} exactly."""
    int8_bits: float
    """Bits per value of X_t through 'entropy(int8)': what is left to save once the codes are packed."""
    delta_bits: float
    """Bits per value of the difference through the same."""


class Training:
    """A cell's model in two parts, trained in one process, that hands out what would cross the boundary."""

    def __init__(self, cell: Cell) -> None:
        """Build the model of `cell`, which has two stages and is trained as its fp32 arm, in one micro-batch.

        The text is prepared if it is not yet.
        """
        text = prepare_tokens(cell.workload.text, cell.workload.model, paths.cache_folder())
        seed = cell.training.seed
        self._cell = cell
        self._upper, self._lower = (
            build_stage(
                cell.workload, stage=stage, stages=2, seed=seed, vocabulary=text.vocabulary, layers=cell.pipeline.layers
            )
            for stage in range(2)
        )
        self._data = Data(np.load(text.path, mmap_mode="r"), cell.workload, seed)
        self._optimiser = Optimiser([*self._upper.parameters(), *self._lower.parameters()], cell.optimiser)

    def step(self, step: int, steps: int) -> tuple[Tensor, Tensor]:
        """Learn from a step's batch; its activations and gradients at the boundary, (b, n, d) fp32."""
        batch = self._data.train(step, 0, 1)
        hidden = self._upper(batch.inputs)
        received = hidden.detach().requires_grad_()
        self._lower.loss(self._lower(received), batch.targets).backward()  # type: ignore[no-untyped-call]
        assert received.grad is not None
        hidden.backward(received.grad)
        norm = sum(self._optimiser.squares()) ** 0.5
        self._optimiser.update(norm, learning_rate(self._cell.optimiser, step, steps))
        return received.detach(), received.grad

    @torch.no_grad()
    def held_out(self) -> Tensor:
        """Return the activations (b, n, d) of the first validation batch."""
        activations: Tensor = self._upper(self._data.validation(0, 0, 1).inputs)
        return activations


def compare(model: str, seed: int, batches: str, tensor: str, step: int, kept: deque[Tensor]) -> Iterator[Row]:
    """Yield the rows of one moment; `kept` ends with that step's tensor."""
    key = MessageKey("train", step, 0, ())
    context = Context(seed, 0, "forward" if tensor == "X" else "backward")

    def through(text: str, x: Tensor) -> tuple[Tensor, float]:
        payload = make(text, context).encode(x, key)
        return make(text, context).decode(payload, key), 8 * memoryview(payload).nbytes / x.numel()

    for gap in GAPS:
        ratios = []
        for now in range(len(kept) - WINDOW, len(kept)) if len(kept) >= gap + WINDOW else ():
            x, before = kept[now], kept[now - gap]
            norm, change = float(x.norm()), x - before
            errors = [float((through("int8", part)[0] - part).norm()) / norm for part in (x, change)]
            bits = [through("entropy(int8)", part)[1] for part in (x, change)]
            ratios.append((float(change.norm()) / norm, *errors, *bits))
        if ratios:
            yield Row(model, seed, batches, tensor, step, gap, *map(fmean, zip(*ratios, strict=True)))


def follow(cell: Cell, steps: int, moments: tuple[int, ...]) -> Iterator[Row]:
    """Train a cell for `steps`; yield the rows of the moments, which are numbers of steps done."""
    training = Training(cell)
    repeated = cell.workload.training_sequences == cell.workload.batch_size
    names = [(LEARNED, "X"), (LEARNED, "G")] if repeated else [(FRESH, "X"), (FRESH, "G"), (SAME, "X")]
    kept: list[deque[Tensor]] = [deque(maxlen=max(GAPS) + WINDOW) for _ in names]
    for step in range(steps):
        held_out = [] if repeated else [training.held_out()]
        for series, tensor in zip(kept, [*training.step(step, steps), *held_out], strict=True):
            series.append(tensor)
        if step + 1 in moments:
            for (batches, tensor_name), series in zip(names, kept, strict=True):
                yield from compare(cell.workload.model, cell.training.seed, batches, tensor_name, step, series)


def cells(models: Sequence[str]) -> tuple[Cell, ...]:
    """Return sweep.toml's fp32 cells with these models and its first seed, on new batches and on one; engine and
    network do not matter.
    """
    only = ["codec=fp32", "profile=datacenter", *(f"workload.model={model}" for model in models)]
    planned = plan.cells(plan.load_experiment(str(HERE / "sweep.toml")), "relay", only=only)
    return tuple(cell for cell in planned if cell.training.seed == 0)


def main(asked: argparse.Namespace) -> None:
    """Write redundancy.csv, whole or not at all."""
    rows = []
    for cell in cells(MODELS[:1] if asked.quick else MODELS):
        steps, moments = (8, (6,)) if asked.quick else (cell.training.steps, MOMENTS)
        for row in follow(cell, steps, (*moments, steps)):
            print(*row, flush=True)  # noqa: T201
            rows.append(row)
    csv_rows.write_rows(asked.output / "redundancy.csv", Row._fields, rows)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, HERE)
