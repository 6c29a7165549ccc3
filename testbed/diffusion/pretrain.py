"""Train a diffusion transformer, once per machine: `python -m testbed.diffusion.pretrain dit-digits`.

The folder in our cache holds model.safetensors (an exponential mean of the weights), its seal, and curve.csv. The same
torch build on the same kind of processor yields the same bytes. Takes minutes, and restarts from the beginning if
interrupted.
"""

from __future__ import annotations

import argparse
import functools
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from testbed import paths, results
from testbed.csv_rows import write_rows
from testbed.diffusion.dit import SIZES, Dit, build_dit, to_tokens
from testbed.errors import StageError, UnknownNameError, status_of
from testbed.workloads import checkpoints, models
from testbed.workloads.images import batch_loss, build_network, images
from testbed.workloads.networks import DIGITS
from testbed.workloads.shards import ShardBatches

_BATCH = 64
_RATE, _FLOOR, _WARMUP = 1.5e-3, 0.05, 100
_MEAN = 0.998
"""Decay of the mean of weights, per step."""
_UNEVEN = 0.01
"""Weight of the load-balancing loss of experts (Fedus et al., Switch Transformer, 2022)."""
_SAY_EVERY = 100
_CLASSIFIER, _CLASSIFIER_EPOCHS = "digits-cnn", 12

STEPS: Final = {"dit-digits": 2000, "dit-digits-moe": 1200, "dit-digits-nano": 60, "dit-digits-moe-nano": 60}
"""Steps of each model's training."""


class Point(NamedTuple):
    """A row of curve.csv."""

    step: int
    loss: float
    """Mean squared error of the velocity since the previous row; about 1.3 for an untrained model."""


Say = Callable[[Point], None]


def load_dit(name: str) -> Dit:
    """Return a trained model, training it first if it is not cached. UnknownNameError for an unknown name."""
    if name not in SIZES:
        raise UnknownNameError("diffusion model", name, SIZES)
    model = build_dit(SIZES[name], seed=0)
    model.load_state_dict(load_file(pretrain(name) / "model.safetensors"))
    return model.requires_grad_(False)


def pretrain(name: str, say: Say = lambda point: None) -> Path:
    """Return the checkpoint's folder in the cache, training it if missing. StageError when training diverges; SpecError
    for weights that differ from their seal.
    """
    folder = models.made_folder(name)
    results.make_folder(folder.parent, "set XDG_CACHE_HOME to a folder that you can write to")
    with paths.locked(folder.with_name(f"{name}.lock")):
        if not folder.is_dir():
            torch.set_num_threads(1)
            model, curve = train(build_dit(SIZES[name], seed=0), STEPS[name], say)
            draft = folder.with_name(f".making-{name}")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            weights = {key: value.contiguous() for key, value in model.state_dict().items()}
            save_file(weights, draft / "model.safetensors")
            write_rows(draft / "curve.csv", Point._fields, curve)
            checkpoints.finish(draft, folder)
    return folder


def train(model: Dit, steps: int, say: Say = lambda point: None) -> tuple[Dit, list[Point]]:
    """Train in place; returns the mean of the weights as a model, and losses. StageError for a loss that is not
    finite.
    """
    examples = images("digits").train
    batches = ShardBatches(torch.arange(len(examples.labels)).numpy(), _BATCH, seed=0, worker=0)
    generator = torch.Generator().manual_seed(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01, betas=(0.9, 0.99))
    mean = {name: value.clone() for name, value in model.state_dict().items()}
    losses: list[float] = []
    curve: list[Point] = []
    for step in range(steps):
        progress = (1 + math.cos(math.pi * step / steps)) / 2
        for group in optimiser.param_groups:
            group["lr"] = _RATE * min(1, (step + 1) / _WARMUP) * (_FLOOR + (1 - _FLOOR) * progress)
        batch = examples.at(batches.batch(step))
        loss, uneven = _flow_loss(model, to_tokens(batch.images * 2 - 1), batch.labels, generator)
        optimiser.zero_grad(set_to_none=True)
        (loss + _UNEVEN * uneven).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        keep = min(_MEAN, (1 + step) / (10 + step))
        with torch.no_grad():
            for name, value in model.state_dict().items():
                mean[name].lerp_(value, 1 - keep)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise StageError(f"step {step}: the loss of the diffusion transformer is {losses[-1]}")
        if (step + 1) % _SAY_EVERY == 0 or step + 1 == steps:
            curve.append(Point(step + 1, math.fsum(losses) / len(losses)))
            losses = []
            say(curve[-1])
    model.load_state_dict(mean)
    return model, curve


def _flow_loss(model: Dit, images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the mean squared error of the velocity of images (T, B, 4) at times of a logit-normal distribution (Esser
    et al., ICML 2024), and the imbalance of experts.
    """
    times = torch.randn(len(labels), generator=generator).sigmoid()
    noise = torch.randn(images.shape, generator=generator)
    mixed = torch.lerp(noise, images, times[:, None])
    velocity, uneven = model(mixed, times, labels)
    return (velocity - (images - noise)).square().mean(), uneven


@functools.cache
def classifier() -> nn.Module:
    """Return a small digit classifier whose features compare images: trained in seconds, deterministically."""
    model, examples = build_network(_CLASSIFIER, DIGITS, 0), images("digits").train
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = ShardBatches(torch.arange(len(examples.labels)).numpy(), _BATCH, seed=1, worker=0)
    for step in range(_CLASSIFIER_EPOCHS * len(examples.labels) // _BATCH):
        optimiser.zero_grad(set_to_none=True)
        batch_loss(model, examples.at(batches.batch(step))).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return model.requires_grad_(False)


def main(arguments: list[str] | None = None) -> int:
    """Print the folder. Progress and errors go to stderr; returns the error's exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m testbed.diffusion.pretrain", description="Train a diffusion transformer, once per machine."
    )
    parser.add_argument("model", choices=list(SIZES))
    name = parser.parse_args(arguments).model

    def say(point: Point) -> None:
        sys.stderr.write(f"step {point.step} of {STEPS[name]}: {point.loss:.3f}\n")

    return status_of(lambda: sys.stdout.write(f"{pretrain(name, say)}\n"))


if __name__ == "__main__":
    sys.exit(main())
