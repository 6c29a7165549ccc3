"""Train a shipped model from which workloads can start, once per machine: `python -m testbed.training.pretrain
gpt2-mini-trained`.

`LEARNED` defines each training: the whole model, in one process, with the arithmetic of a pipeline of one stage.
Training resumes from its last saved state after any interruption, and the same torch build on the same kind of
processor yields the same bytes. The folder in our cache is a checkpoint as transformers writes it, with tokenizer.json
and the seal of its weights (`workloads.weights`), and curve.csv: losses and learning rates by step.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from testbed import paths, results
from testbed.codecs.kept_state import load_into, state_of
from testbed.csv_rows import write_rows
from testbed.devices import flops
from testbed.errors import CapabilityError, StageError, UnknownNameError, status_of
from testbed.nodes.optimise import Optimiser, learning_rate
from testbed.spec import OptimiserSpec, PipelineSpec, Recipe, TextSpec, TrainingSpec, text_of
from testbed.training.memory_need import available_memory, predict_memory
from testbed.units import format_duration, format_size
from testbed.workloads import checkpoints, models, sources
from testbed.workloads.build_stage import build_stage
from testbed.workloads.data import Data
from testbed.workloads.prepare import prepare_tokens, tokenizer_file
from testbed.workloads.stage_model import StageModel

_THREADS = 1
"""Fixed, because another number of threads could sum in another order; and small, because threads that wait for one
another are slow on a busy machine."""
_KEEP_EVERY_S = 60.0
"""Interval between saved states; saving takes a second."""


def _recipe(
    model: str,
    *,
    sequence_length: int,
    batch_size: int,
    steps: int,
    warmup: int,
    rate: float,
    evaluate_every: int,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> Recipe:
    return Recipe(
        codec="fp32",
        workload=TextSpec(
            family="gpt2",
            model=model,
            text="bundled",
            sequence_length=sequence_length,
            batch_size=batch_size,
            validation_batches=16,
            precision=precision,
        ),
        pipeline=PipelineSpec(stages=1, microbatches=1, schedule="gpipe", in_flight=1),
        optimiser=OptimiserSpec(
            learning_rate=rate,
            weight_decay=0.1,
            beta1=0.9,
            beta2=0.99,
            clip_norm=1.0,
            learning_rate_warmup=warmup,
            learning_rate_decay="cosine",
            learning_rate_floor=0.1,
        ),
        training=TrainingSpec(steps=steps, warmup_steps=0, seed=0, evaluate_every=evaluate_every),
    )


LEARNED: dict[str, Recipe] = {
    "gpt2-mini-trained": _recipe(
        "gpt2-mini",
        sequence_length=256,
        batch_size=4,
        precision="bf16",
        steps=1600,
        warmup=100,
        rate=2e-3,
        evaluate_every=100,
    ),
    "gpt2-nano-trained": _recipe(
        "gpt2-nano", sequence_length=64, batch_size=8, steps=240, warmup=20, rate=4e-3, evaluate_every=60
    ),
}


class CurvePoint(NamedTuple):
    """A row of curve.csv: an evaluation."""

    step: int
    """Number of optimiser steps done."""
    train_loss: float
    """Mean training loss since the previous row, in nats."""
    validation_loss: float
    learning_rate: float
    """Learning rate of the last step."""


class Pretraining:
    """A training that can be saved and resumed."""

    keeps = ("step", "_losses", "model", "_optimiser", "curve")

    def __init__(self, recipe: Recipe, cache: Path) -> None:
        """Build the model from the seed; the text is prepared below `cache` if needed."""
        spec, seed = text_of(recipe), recipe.training.seed
        text = prepare_tokens(spec.text, spec.model, cache)
        self.recipe, self.step = recipe, 0
        self.curve: list[CurvePoint] = []
        self.model: StageModel = build_stage(spec, stage=0, stages=1, seed=seed, vocabulary=text.vocabulary)
        self._data = Data(np.load(text.path, mmap_mode="r"), spec, seed)
        self._optimiser = Optimiser(self.model.parameters(), recipe.optimiser, tables=self.model.by_token())
        self._losses: list[float] = []

    def advance(self) -> CurvePoint | None:
        """Take one optimiser step; returns its evaluation if one is due. StageError for a loss that is not finite."""
        training = self.recipe.training
        batch = self._data.train(self.step, 0, 1)
        self.model.train(True)
        loss = self.model.loss(self.model(batch.inputs), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self._losses.append(loss.item())
        norm = math.sqrt(math.fsum(self._optimiser.squares()))
        if not math.isfinite(self._losses[-1] + norm):
            raise StageError(f"step {self.step}: the loss is {self._losses[-1]}, the gradient's norm {norm}")
        rate = learning_rate(self.recipe.optimiser, self.step, training.steps)
        self._optimiser.update(norm, rate)
        self.step += 1
        if self.step % training.evaluate_every and self.step != training.steps:
            return None
        self.curve.append(CurvePoint(self.step, math.fsum(self._losses) / len(self._losses), self._validate(), rate))
        self._losses = []
        return self.curve[-1]

    @torch.no_grad()
    def _validate(self) -> float:
        self.model.train(False)
        count = text_of(self.recipe).validation_batches
        batches = (self._data.validation(number, 0, 1) for number in range(count))
        return math.fsum(self.model.loss(self.model(b.inputs), b.targets).item() for b in batches) / count


# ---------------------------------------------------------------------- once per machine
def pretrain(name: str, say: Callable[[Pretraining, float], None] = lambda training, ahead_s: None) -> Path:
    """Return the checkpoint's folder in the cache, training it if missing.

    `say` is called after each step with the estimated seconds left. UnknownNameError for an unknown model;
    CapabilityError for too little disk or memory; StageError when training diverges.
    """
    if name not in LEARNED:
        raise UnknownNameError("model of ours", name, LEARNED)
    recipe, folder = LEARNED[name], models.made_folder(name)
    results.make_folder(folder.parent, "set XDG_CACHE_HOME to a folder that you can write to")
    with paths.locked(folder.with_name(f"{name}.lock")):
        if not folder.is_dir():
            _check_room(recipe, folder.parent)
            making = results.make_folder(folder.with_name(f".making-{recipe.id}-torch-{torch.__version__}"))
            training = _train(recipe, making / "state.pt", say)
            _place(training, making / "done", folder)
            shutil.rmtree(making, ignore_errors=True)
    return folder


def _check_room(recipe: Recipe, folder: Path) -> None:
    """Check that disk and memory suffice for a training. CapabilityError if not."""
    weights = 4 * flops.whole_model(recipe.workload)
    disk = 2 * 3 * weights + weights + 50_000_000  # two states, with AdamW's moments; the checkpoint; the text's tokens
    for what, needed, free in (
        ("memory", predict_memory(recipe), available_memory()),
        (f"disk in {folder}", disk, shutil.disk_usage(folder).free),
    ):
        if free < needed:
            raise CapabilityError(
                f"training {recipe.workload.model} needs {format_size(needed)} of {what}, "
                f"but only {format_size(max(0, free))} are free"
            )


def _train(recipe: Recipe, kept: Path, say: Callable[[Pretraining, float], None]) -> Pretraining:
    """Train to the end, from the state in `kept` if there is one, and keep that file up to date."""
    torch.set_num_threads(_THREADS)
    torch.use_deterministic_algorithms(True)
    training = Pretraining(recipe, paths.cache_folder())
    if kept.exists():
        load_into(training, torch.load(kept, weights_only=True))
        training.curve = [CurvePoint(*point) for point in training.curve]
    steps, first = recipe.training.steps, training.step
    began = last_kept = time.monotonic()
    while training.step < steps:
        training.advance()
        now = time.monotonic()
        say(training, (now - began) / (training.step - first) * (steps - training.step))
        if now - last_kept > _KEEP_EVERY_S or training.step == steps:
            draft = kept.with_suffix(".draft")
            torch.save(state_of(training), draft)
            sources.place(draft, kept)
            last_kept = time.monotonic()
    return training


def _place(training: Pretraining, draft: Path, folder: Path) -> None:
    """Write a checkpoint atomically."""
    shutil.rmtree(draft, ignore_errors=True)  # one that was killed left it
    draft.mkdir()
    model, workload = training.model, text_of(training.recipe)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    model.config(models.workload_size(workload)).save_pretrained(draft)
    shutil.copyfile(tokenizer_file(workload.model), draft / "tokenizer.json")
    results.write_json(draft / "recipe.json", training.recipe)
    write_rows(draft / "curve.csv", CurvePoint._fields, training.curve)
    checkpoints.finish(draft, folder)


def _print_progress(training: Pretraining, ahead_s: float) -> None:
    """Overwrite the progress line in a terminal; elsewhere print a line at each evaluation."""
    steps, curve = training.recipe.training.steps, training.curve
    evaluated = bool(curve) and curve[-1].step == training.step
    terminal = sys.stderr.isatty()
    if not (terminal or evaluated):
        return
    losses = f"; loss {curve[-1].train_loss:.3f}, validation loss {curve[-1].validation_loss:.3f}" if curve else ""
    line = f"step {training.step} of {steps}{losses}; {format_duration(ahead_s)} left"
    sys.stderr.write(("\r\x1b[K" if terminal else "") + line + ("\n" if evaluated else ""))
    sys.stderr.flush()


def main(arguments: list[str] | None = None) -> int:
    """Print the folder. Progress and errors go to stderr; returns the error's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m testbed.training.pretrain",
        description="Train a model from which workloads can start, once per machine.",
    )
    parser.add_argument("model", choices=list(LEARNED))
    name = parser.parse_args(arguments).model
    try:
        return status_of(lambda: sys.stdout.write(f"{pretrain(name, _print_progress)}\n"))
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; run the same command to resume from the last saved state\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
