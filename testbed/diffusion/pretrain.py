"""Train a diffusion transformer once a machine: `python -m testbed.diffusion.pretrain dit-digits`.

The folder in our cache holds model.safetensors (an exponential mean of the weights), its seal, and curve.csv. The same
torch build on the same kind of processor gives the same bytes. Takes minutes, and starts anew if it was stopped.
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

from testbed import results
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
"""Of the weights, per step."""
_UNEVEN = 0.01
"""Weight of the loss that has experts used alike (Fedus et al., Switch Transformer, 2022)."""
_SAY_EVERY = 100
_CLASSIFIER, _CLASSIFIER_EPOCHS = "digits-cnn", 12

STEPS: Final = {"dit-digits": 2000, "dit-digits-moe": 1200, "dit-digits-nano": 60, "dit-digits-moe-nano": 60}
"""Of each model's training."""


class Point(NamedTuple):
    """A line of curve.csv."""

    step: int
    loss: float
    """Mean squared error of the velocity since the line before; 1.3 or so for a model that knows nothing."""


Say = Callable[[Point], None]


def load_dit(name: str) -> Dit:
    """Return a model that has learned, trained first where it is not in our cache yet. UnknownNameError."""
    if name not in SIZES:
        raise UnknownNameError("diffusion model", name, SIZES)
    model = build_dit(SIZES[name], seed=0)
    model.load_state_dict(load_file(pretrain(name) / "model.safetensors"))
    return model.requires_grad_(False)


def pretrain(name: str, say: Say = lambda point: None) -> Path:
    """Return the checkpoint's folder in our cache, trained where it is not there yet. StageError where the training
    diverges; SpecError where the weights are not what their seal says.
    """
    folder = models.made_folder(name)
    results.make_folder(folder.parent, "set XDG_CACHE_HOME to a folder of yours")
    with results.locked(folder.with_name(f"{name}.lock")):
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
    """Train in place; return the mean of the weights as a model, and losses. StageError where the loss is no number."""
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
    et al., ICML 2024), and how unevenly experts were used.
    """
    times = torch.randn(len(labels), generator=generator).sigmoid()
    noise = torch.randn(images.shape, generator=generator)
    mixed = torch.lerp(noise, images, times[:, None])
    velocity, uneven = model(mixed, times, labels)
    return (velocity - (images - noise)).square().mean(), uneven


@functools.cache
def classifier() -> nn.Module:
    """Return a small network that tells digits, in whose features images are compared: trained in seconds, the same
    every time.
    """
    model, examples = build_network(_CLASSIFIER, DIGITS, 0), images("digits").train
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    batches = ShardBatches(torch.arange(len(examples.labels)).numpy(), _BATCH, seed=1, worker=0)
    for step in range(_CLASSIFIER_EPOCHS * len(examples.labels) // _BATCH):
        optimiser.zero_grad(set_to_none=True)
        batch_loss(model, examples.at(batches.batch(step))).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return model.requires_grad_(False)


def main(arguments: list[str] | None = None) -> int:
    """Print the folder. Progress and errors go to stderr; the status is the error's."""
    parser = argparse.ArgumentParser(
        prog="python -m testbed.diffusion.pretrain", description="Train a diffusion transformer, once a machine."
    )
    parser.add_argument("model", choices=list(SIZES))
    name = parser.parse_args(arguments).model

    def say(point: Point) -> None:
        sys.stderr.write(f"step {point.step} of {STEPS[name]}: {point.loss:.3f}\n")

    return status_of(lambda: sys.stdout.write(f"{pretrain(name, say)}\n"))


if __name__ == "__main__":
    sys.exit(main())
