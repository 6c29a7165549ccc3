"""Real activations and their gradients from a short training, for benchmarks: `python -m testbed.workloads.capture
FILE`.

A GPT-2 of width 768 and three layers, from random numbers, on the bundled text, cut after its second layer. Written as
one .npz: `forward` and `backward` (messages, b, n, d) fp32, of consecutive steps, and `about`, a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from testbed import paths
from testbed.spec import WorkloadSpec
from testbed.workloads.data import Data
from testbed.workloads.gpt2 import Gpt2Stage
from testbed.workloads.models import ModelSize
from testbed.workloads.prepare import prepare_tokens

STEPS, KEPT = 120, 4
"""Optimiser steps before, and messages kept."""
_CUT, _LAYERS, _WIDTH, _TOKENS = 2, 3, 768, 256
_TRAINED, _SEQUENCES = 2, 4
"""Sequences in a batch while it learns, and in a message."""
_RATE = 6e-4


def _specification(sequences: int) -> WorkloadSpec:
    return WorkloadSpec(
        family="gpt2",
        model="gpt2-mini",
        text="bundled",
        sequence_length=_TOKENS,
        batch_size=sequences,
        validation_batches=1,
    )


def _stages(seed: int) -> tuple[Gpt2Stage, Gpt2Stage]:
    size = ModelSize(
        family="gpt2",
        layers=_LAYERS,
        width=_WIDTH,
        heads=12,
        key_heads=12,
        inner=4 * _WIDTH,
        context=_TOKENS,
        vocabulary=4096,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        whole = Gpt2Stage.whole_class(Gpt2Stage.config(size))
    spec = _specification(_TRAINED)
    return Gpt2Stage(whole, size, range(_CUT), spec, seed), Gpt2Stage(whole, size, range(_CUT, _LAYERS), spec, seed)


def capture(steps: int = STEPS, kept: int = KEPT, seed: int = 0) -> dict[str, Any]:
    """Train for `steps` steps, then `kept` more whose tensors at the cut are returned beside `about`: what they are."""
    torch.set_num_threads(1)
    began = time.monotonic()
    upper, lower = _stages(seed)
    parameters = [*upper.parameters(), *lower.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=0.1)
    tokens = np.load(prepare_tokens("bundled", "gpt2-mini", paths.cache_folder()).path, mmap_mode="r")
    learning, large = (Data(tokens, _specification(count), seed) for count in (_TRAINED, _SEQUENCES))
    kept_tensors: dict[str, list[Any]] = {"forward": [], "backward": []}
    losses = []
    for step in range(steps + kept):
        batch = (learning if step < steps else large).train(step, 0, 1)
        for group in optimiser.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 10)
        hidden = upper(batch.inputs)
        received = hidden.detach().requires_grad_()
        loss = lower.loss(lower(received), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        hidden.backward(received.grad)
        losses.append(float(loss.detach()))
        if step >= steps:
            assert received.grad is not None
            kept_tensors["forward"].append(received.detach().numpy().copy())
            kept_tensors["backward"].append(received.grad.numpy().copy())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()
    about = {
        "model": f"GPT-2 of width {_WIDTH}, {_LAYERS} layers, random at first, cut after layer {_CUT}",
        "text": "bundled",
        "steps": steps,
        "loss": round(float(np.mean(losses[-kept:])), 3),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began),
    }
    return {**{name: np.stack(tensors) for name, tensors in kept_tensors.items()}, "about": np.array(json.dumps(about))}


def main(arguments: list[str]) -> int:
    """Write the file; whole or not at all."""
    target = Path(arguments[0])
    scratch = target.with_suffix(".part.npz")
    np.savez(scratch, **capture())
    scratch.rename(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
