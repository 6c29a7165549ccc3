"""A causal language model cut into stages: what is the same for every family. Each family's module fills in the rest.

Chained with plain tensors, the stages do the same operations in the same order as transformers' whole model, bit for
bit, whatever the number of stages, in fp32 and in bf16, with and without dropout. Input and output embeddings are not
tied: tied ones would lie in the first and the last stage, and their gradients would have to be exchanged at every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from testbed import keyed
from testbed.spec import TextSpec
from testbed.workloads import models
from testbed.workloads.models import ModelSize

EMBEDDING = "embedding"
"""Stands for the layer's number where the embedding's dropout is drawn."""


def dropout_key(seed: int, step: int, microbatch: int, layer: int | str) -> int:
    """Return what torch's generator is seeded with before that layer. Its Mersenne Twister takes only 32 bits."""
    return keyed.key(f"dropout {seed} {step} {microbatch} {layer}", size_bytes=4)


class Submodule(NamedTuple):
    """A module of a stage, and where it hangs: what a codec that changes the model takes and puts back."""

    owner: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        """The module that is there now."""
        return getattr(self.owner, self.name)  # type: ignore[no-any-return]

    def replace(self, module: nn.Module) -> None:
        """Put another module in its place."""
        setattr(self.owner, self.name, module)


class StageModel(nn.Module, ABC):
    """One stage's share of a model. Its parameters bear the names that they have in transformers' whole model.

    The first stage has the embeddings, the last the final norm and the output layer; one stage alone has all.
    """

    whole_class: ClassVar[Any]
    """transformers' class of the whole model."""
    embedding_name: ClassVar[str]
    """The token embedding's parameter, which published checkpoints may tie to the output layer."""

    def __init__(self, size: ModelSize, layers: range, spec: TextSpec, seed: int) -> None:
        """`layers` of the whole model of that `size` are here. `spec` says dropout and precision, `seed` keys the
        dropout.
        """
        super().__init__()
        self.first, self.last, self.layers = layers.start == 0, layers.stop == size.layers, layers
        self.width, self.context, self.vocabulary = size.width, size.context, size.vocabulary
        self.learned_positions = models.family(size.family).learned_positions
        self.kept: dict[str, Any] = {}
        """What codecs that change the model keep with this stage, so that its two boundaries find the same."""
        self._dropout, self._bf16, self._seed = spec.dropout, spec.precision == "bf16", seed
        self._drawn_for: tuple[int, int] | None = None

    @staticmethod
    @abstractmethod
    def config_options(dropout: float) -> dict[str, Any]:
        """Return what a workload decides about a configuration, a checkpoint's too."""

    @classmethod
    @abstractmethod
    def config(cls, size: ModelSize, dropout: float = 0.0) -> Any:
        """Return transformers' description of a named size."""

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Compute hidden states (b, n, d) from token ids (b, n) int64; at the first stage only."""

    @abstractmethod
    def blocks(self, hidden: Tensor) -> Iterable[Callable[[Tensor], Tensor]]:
        """Return this stage's layers in order, each from hidden states (b, n, d) to the next; `hidden` are the first
        ones.
        """

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits (b, n, v) from hidden states (b, n, d); at the last stage only."""

    @abstractmethod
    def tables(self) -> tuple[Submodule, ...]:
        """Return the embeddings whose rows add up to the first hidden states: of tokens, and of positions where they
        are learned.

        Empty except at the first stage.
        """

    @abstractmethod
    def writers(self) -> tuple[Submodule, ...]:
        """Return the linear layers whose outputs are added to the hidden states, in order: nothing else changes those.

        Each is a torch Linear, or a transformers Conv1D, whose weight is the transpose.
        """

    def draw(self, step: int, microbatch: int) -> None:
        """Say what the next forward passes are for: dropout is the same whenever seed, step, micro-batch and layer are.

        So neither the cut nor the order of micro-batches changes it, nor that activations are computed again.
        """
        self._drawn_for = (step, microbatch)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute hidden states fp32 from token ids (b, n) int64 at the first stage, or from hidden states (b, n, d)
        fp32.

        The last stage returns logits (b, n, v). torch's global generator is left as it was.
        """
        drawn = self.training and self._dropout > 0
        with self._autocast(), torch.random.fork_rng(devices=[], enabled=drawn):
            hidden = inputs
            if self.first:
                self._key(EMBEDDING, drawn)
                hidden = self.embed(inputs)
            for layer, block in zip(self.layers, self.blocks(hidden), strict=True):
                self._key(layer, drawn)
                hidden = block(hidden)
            return self.head(hidden) if self.last else hidden.float()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats over the b * n tokens, a scalar: what the whole model computes from
        shifted labels.
        """
        with self._autocast():
            return nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self._bf16)

    def _key(self, layer: int | str, drawn: bool) -> None:
        if drawn:
            assert self._drawn_for is not None, "draw() says what a forward pass with dropout is for"
            torch.default_generator.manual_seed(dropout_key(self._seed, *self._drawn_for, layer))
