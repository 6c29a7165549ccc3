"""A model cut into stages whose boundaries have codes of as many bits as one likes: shared by the programs of
mixed_precision.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from testbed import paths
from testbed.codecs.contract import Context
from testbed.codecs.make import make
from testbed.message_key import MessageKey
from testbed.workloads import checkpoints
from testbed.workloads.build_stage import build_stage
from testbed.workloads.data import Batch, Data
from testbed.workloads.prepare import prepare_tokens
from testbed.workloads.real_tensors import specification
from testbed.workloads.stage_model import StageModel

HERE = Path(__file__).resolve().parent
WIDTHS = (8, 6, 4, 3, 2, 1)
GROUP = 64
"""Values that share a scale of 16 bits."""
_KEY = MessageKey("train", 0, 0, ())


def codec(bits: int) -> str:
    """Return the codec of a width; at 2 bits with all four levels, of which the symmetric grid would leave one."""
    return f"int{bits}(group={GROUP}, nearest{', midrise' if bits == 2 else ''})"


def bits_per_value(bits: int) -> float:
    """Return what a value takes on the wire, scales included."""
    return bits + 16 / GROUP


class _Through(torch.autograd.Function):
    """What arrives, forward; backward the gradient as it is."""

    @staticmethod
    def forward(context: object, hidden: Tensor, bits: int) -> Tensor:  # type: ignore[override]
        ends = [make(codec(bits), Context(0, 0, "forward")) for _ in range(2)]
        return ends[1].decode(ends[0].encode(hidden, _KEY), _KEY)

    @staticmethod
    def backward(context: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


class Passed(NamedTuple):
    """A forward pass."""

    logits: Tensor
    received: list[Tensor]
    """Behind each boundary, (b, n, d)."""
    sent: list[Tensor]
    """Before it."""


class Cut:
    """A pipeline in one process. Only activations are coded; gradients cross as they are."""

    def __init__(self, model: str, stages: int, *, sequences: int, length: int, seed: int, precision: str) -> None:
        """Build the model as its checkpoint has it, made first where it is not on this machine; batches of `sequences`
        of `length` tokens, in an order of the seed's.
        """
        checkpoints.make(model)
        spec = specification(model, sequences).model_copy(update={"sequence_length": length, "precision": precision})
        text = prepare_tokens(spec.text, model, paths.cache_folder())
        self.parts: list[StageModel] = [
            build_stage(spec, stage=stage, stages=stages, seed=0, vocabulary=text.vocabulary) for stage in range(stages)
        ]
        self.data = Data(np.load(text.path, mmap_mode="r"), spec, seed)
        self.boundaries = stages - 1

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return all parameters."""
        return [parameter for part in self.parts for parameter in part.parameters()]

    def forward(self, inputs: Tensor, widths: Sequence[int | None], *, stage: int = 0) -> Passed:
        """Go through the stages; a width of None is a boundary without a codec. `inputs` are token ids, or what `stage`
        receives where it begins at another than the first.
        """
        hidden, received, sent = inputs, list[Tensor](), list[Tensor]()
        for at in range(stage, len(self.parts)):
            hidden = self.parts[at](hidden)
            if at < self.boundaries:
                sent.append(hidden)
                hidden = self.cross(hidden, widths[at])
                received.append(hidden)
        return Passed(hidden, received, sent)

    @staticmethod
    def cross(hidden: Tensor, bits: int | None) -> Tensor:
        """Return what arrives behind a boundary."""
        return hidden if bits is None else _Through.apply(hidden, bits)

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the mean cross-entropy in nats."""
        return self.parts[-1].loss(logits, batch.targets)

    def train(self, learning: bool) -> None:
        """Say whether what follows is training."""
        for part in self.parts:
            part.train(learning)

    @torch.no_grad()
    def judged(self, widths: Sequence[int | None], batches: int) -> list[float]:
        """Return the loss of each held-out batch."""
        self.train(False)
        held = (self.data.validation(number, 0, 1) for number in range(batches))
        return [float(self.loss(self.forward(batch.inputs, widths).logits, batch)) for batch in held]


def divergence(teacher: Tensor, logits: Tensor) -> Tensor:
    """Return KL(teacher || logits) in nats per token, of logits (b, n, v)."""
    wanted, given = (each.flatten(0, 1).float().log_softmax(-1) for each in (teacher, logits))
    return torch.nn.functional.kl_div(given, wanted, reduction="batchmean", log_target=True)
