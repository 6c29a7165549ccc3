"""Save real activations and gradients for benchmarks: `python -m testbed.workloads.real_tensors FILE [--model MODEL]`.

Without a model they come from a randomly initialised GPT-2 of width 768 and three layers, after a short training on the
bundled text, cut after its second layer. With a model they come from its initial state, cut in the middle. Written as
one .npz: `forward` and `backward` (messages, b, n, d) fp32, of consecutive steps, and `about`, a line of JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from testbed import paths
from testbed.errors import status_of
from testbed.spec import TextSpec
from testbed.workloads import models
from testbed.workloads.build_stage import build_stage
from testbed.workloads.checkpoints import weights_digest
from testbed.workloads.data import Batch, Data
from testbed.workloads.gpt2 import Gpt2Stage
from testbed.workloads.prepare import prepare_tokens
from testbed.workloads.stage_model import StageModel

STEPS, KEPT = 120, 4
"""Optimiser steps of the randomly initialised model before saving, and number of saved messages."""
_CUT, _LAYERS, _TOKENS = 2, 3, 256
_TRAINED, _SEQUENCES = 2, 4
"""Sequences per batch during training, and per message."""
_RATE, FINE_RATE = 6e-4, 1e-4
"""Learning rates: of training from random weights, and between the messages of a given model."""


class BoundaryCrossing(NamedTuple):
    """The tensors that cross a boundary in one step."""

    forward: Tensor
    """Activations (b, n, d) fp32."""
    backward: Tensor
    """Gradients of the mean loss over all tokens."""


class Chain:
    """A model in parts, trained in one process, that returns the tensors crossing each boundary."""

    def __init__(self, parts: Sequence[StageModel]) -> None:
        """`parts` are the stages of a model, in order."""
        self._parts = tuple(parts)
        self._parameters = [parameter for part in parts for parameter in part.parameters()]
        self._optimiser = torch.optim.AdamW(self._parameters, weight_decay=0.1)

    def step(self, batch: Batch, rate: float) -> tuple[float, list[BoundaryCrossing]]:
        """Train on a batch; returns the loss before the update, and the tensors crossing each boundary."""
        received, sent = [batch.inputs], []
        for part in self._parts:
            sent.append(part(received[-1]))
            received.append(sent[-1].detach().requires_grad_())
        loss = self._parts[-1].loss(sent[-1], batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        crossings: list[BoundaryCrossing] = []
        for hidden, taken in zip(reversed(sent[:-1]), reversed(received[1:-1]), strict=True):
            assert taken.grad is not None
            hidden.backward(taken.grad)
            crossings.insert(0, BoundaryCrossing(taken.detach(), taken.grad))
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self._optimiser.zero_grad()
        return float(loss.detach()), crossings


def specification(model: str, sequences: int = _SEQUENCES) -> TextSpec:
    """Return the workload whose batches are captured: sequences of 256 tokens of the bundled text, or of the model's
    context if shorter.
    """
    size = models.model_size(model)
    return TextSpec(
        family=size.family,
        model=model,
        weights=weights_digest(model),
        text="bundled",
        sequence_length=min(_TOKENS, size.context),
        batch_size=sequences,
        validation_batches=1,
    )


def chain_of(model: str, stages: int, seed: int = 0) -> tuple[Chain, Data]:
    """Build a model in its initial state, split into `stages`, and open its text. SpecError if it is not on this
    machine.
    """
    spec = specification(model)
    text = prepare_tokens(spec.text, model, paths.cache_folder())
    parts = [
        build_stage(spec, stage=stage, stages=stages, seed=seed, vocabulary=text.vocabulary) for stage in range(stages)
    ]
    return Chain(parts), Data(np.load(text.path, mmap_mode="r"), spec, seed)


def _stages(seed: int) -> tuple[Gpt2Stage, Gpt2Stage]:
    size = dataclasses.replace(models.SIZES["gpt2"], layers=_LAYERS, context=_TOKENS, vocabulary=4096)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        whole = Gpt2Stage.whole_class(Gpt2Stage.config(size))
    spec = specification("gpt2-mini", _TRAINED)
    return Gpt2Stage(whole, size, range(_CUT), spec, seed), Gpt2Stage(whole, size, range(_CUT, _LAYERS), spec, seed)


def capture(steps: int = STEPS, kept: int = KEPT, seed: int = 0) -> dict[str, Any]:
    """Train the random model for `steps` steps, then `kept` more, whose tensors at the cut are returned with their
    description `about`.
    """
    torch.set_num_threads(1)
    chain = Chain(_stages(seed))
    tokens = np.load(prepare_tokens("bundled", "gpt2-mini", paths.cache_folder()).path, mmap_mode="r")
    learning, large = (Data(tokens, specification("gpt2-mini", count), seed) for count in (_TRAINED, _SEQUENCES))
    name = f"GPT-2 of width 768, {_LAYERS} layers, random at first, cut after layer {_CUT}"
    return _kept(chain, [learning] * steps + [large] * kept, kept, name, warmup=10, rate=_RATE)


def capture_model(model: str, kept: int = KEPT, seed: int = 0) -> dict[str, Any]:
    """Return the tensors of a model's first `kept` steps at the cut in its middle, and `about` like `capture`."""
    torch.set_num_threads(1)
    chain, data = chain_of(model, 2, seed)
    first = models.split_layers(models.model_size(model).layers, 2)[0]
    return _kept(chain, [data] * kept, kept, f"{model}, cut after layer {len(first)}", warmup=1, rate=FINE_RATE)


def _kept(chain: Chain, batches: Sequence[Data], kept: int, name: str, *, warmup: int, rate: float) -> dict[str, Any]:
    """Take a step with each of `batches`; returns the last `kept` tensors and their description."""
    began = time.monotonic()
    messages: list[BoundaryCrossing] = []
    losses = []
    for step, data in enumerate(batches):
        loss, (crossing,) = chain.step(data.train(step, 0, 1), rate * min(1.0, (step + 1) / warmup))
        losses.append(loss)
        if step >= len(batches) - kept:
            messages.append(crossing)
    about = {
        "model": name,
        "text": "bundled",
        "steps": len(batches) - kept,
        "loss": round(float(np.mean(losses[-kept:])), 3),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began),
    }
    tensors = {way: np.stack([getattr(one, way).numpy() for one in messages]) for way in BoundaryCrossing._fields}
    return {**tensors, "about": np.array(json.dumps(about))}


def main(arguments: list[str] | None = None) -> int:
    """Write the file atomically. Errors go to stderr as one message; returns the error's exit status."""
    parser = argparse.ArgumentParser(prog="python -m testbed.workloads.real_tensors")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", help="a named size or a checkpoint; default: a random model after some steps")
    asked = parser.parse_args(arguments)

    def write() -> None:
        scratch = asked.file.with_suffix(".part.npz")
        np.savez(scratch, **(capture() if asked.model is None else capture_model(asked.model)))
        scratch.rename(asked.file)

    return status_of(write)


if __name__ == "__main__":
    sys.exit(main())
