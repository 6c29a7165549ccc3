"""A causal language model split into stages: the part common to all families. Each family's module adds the rest.

Chained with plain tensors, the stages are bit-identical to transformers' whole model for any number of stages, in fp32
and bf16, with and without dropout. Input and output embeddings are not tied: tied ones would be in both the first and
the last stage, which would have to exchange their gradients at every step.
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
from testbed.workloads.precision import autocast

EMBEDDING = "embedding"
"""Stands for the layer's number in the key of the embedding's dropout."""


def dropout_key(seed: int, step: int, microbatch: int, layer: int | str) -> int:
    """Return the seed of torch's generator before that layer. Its Mersenne Twister takes only 32 bits."""
    return keyed.key(f"dropout {seed} {step} {microbatch} {layer}", size_bytes=4)


class Submodule(NamedTuple):
    """A module of a stage with its location, for codecs that replace modules."""

    owner: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        """The current module."""
        return getattr(self.owner, self.name)  # type: ignore[no-any-return]

    def replace(self, module: nn.Module) -> None:
        """Put another module in its place."""
        setattr(self.owner, self.name, module)


class StageModel(nn.Module, ABC):
    """One stage's share of a model. Its parameters have the names of transformers' whole model.

    The first stage has the embeddings, the last the final norm and the output layer; a single stage has all.
    """

    whole_class: ClassVar[Any]
    """transformers' class of the whole model."""
    table_names: ClassVar[tuple[str, ...]]
    """Its names of the embeddings: of tokens, and of positions where they are learned."""
    first_names: ClassVar[tuple[str, ...]] = ()
    """Other modules of the first stage."""
    layers_name: ClassVar[str]
    norm_name: ClassVar[str]
    """Name of the norm before the output layer."""
    dropout_names: ClassVar[tuple[str, ...]]
    """Its configuration's names of dropout rates."""

    def __init__(self, whole: Any, size: ModelSize, layers: range, spec: TextSpec, seed: int) -> None:
        """Take `layers` from the `whole` model of that `size`, plus the modules of the first and the last stage. `spec`
        has dropout and precision, `seed` keys the dropout.
        """
        super().__init__()
        self.first, self.last, self.layers = layers.start == 0, layers.stop == size.layers, layers
        self.width, self.context, self.vocabulary = size.width, size.context, size.vocabulary
        self.learned_positions = models.family(size.family).learned_positions
        self.kept: dict[str, Any] = {}
        """State that codecs in the model share between this stage's two boundaries."""
        self._dropout, self._bf16, self._seed = spec.dropout, spec.precision == "bf16", seed
        self._drawn_for: tuple[int, int] | None = None
        source = whole.base_model
        blocks = getattr(source, self.layers_name)
        names = (*self.table_names, *self.first_names) if self.first else ()
        parts: dict[str, nn.Module] = {name: getattr(source, name) for name in names}
        parts[self.layers_name] = nn.ModuleDict({str(layer): blocks[layer] for layer in layers})
        if self.last:
            parts[self.norm_name] = getattr(source, self.norm_name)
        self.add_module(self.whole_class.base_model_prefix, nn.ModuleDict(parts))
        if self.last:
            self.lm_head: nn.Module = whole.lm_head

    @property
    def parts(self) -> Any:
        """All modules except the output layer, by transformers' names."""
        return getattr(self, self.whole_class.base_model_prefix)

    @classmethod
    def config_options(cls, dropout: float) -> dict[str, Any]:
        """Return the configuration options that a workload sets, even for a checkpoint."""
        # sdpa on one thread is deterministic, forward and backward.
        options = {"use_cache": False, "attn_implementation": "sdpa", "tie_word_embeddings": False}
        return {**dict.fromkeys(cls.dropout_names, dropout), **options}

    @classmethod
    def config(cls, size: ModelSize, dropout: float = 0.0) -> Any:
        """Return transformers' configuration of a model of this size."""
        names = models.family(size.family).config_names
        sizes = {name: getattr(size, field) for field, name in names.items()}
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return cls.whole_class.config_class(**sizes, **tokens, **cls.config_options(dropout))

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Compute hidden states (b, n, d) from token ids (b, n) int64; at the first stage only."""

    @abstractmethod
    def blocks(self, hidden: Tensor) -> Iterable[Callable[[Tensor], Tensor]]:
        """Return this stage's layers in order, each from hidden states (b, n, d) to the next; `hidden` are the first
        ones.
        """

    def head(self, hidden: Tensor) -> Tensor:
        """Compute logits (b, n, v) from hidden states (b, n, d); at the last stage only."""
        logits: Tensor = self.lm_head(self.parts[self.norm_name](hidden))
        return logits

    def tables(self) -> tuple[Submodule, ...]:
        """Return the embeddings whose rows sum to the first hidden states: of tokens, and of positions where they are
        learned.

        Empty except at the first stage.
        """
        return tuple(Submodule(self.parts, name) for name in self.table_names) if self.first else ()

    def by_token(self) -> list[nn.Parameter]:
        """Return the weights of this stage that have a row per token or position: embeddings and the output layer."""
        modules = [table.module for table in self.tables()] + ([self.lm_head] if self.last else [])
        return [parameter for module in modules for parameter in module.parameters()]

    @abstractmethod
    def writers(self) -> tuple[Submodule, ...]:
        """Return the linear layers whose outputs are added to the hidden states, in order; nothing else changes these.

        Each is a torch Linear, or a transformers Conv1D, whose weight is the transpose.
        """

    def draw(self, step: int, microbatch: int) -> None:
        """Set the step and micro-batch of the next forward passes: dropout depends only on seed, step, micro-batch and
        layer.

        It is independent of the cut, the order of micro-batches, and recomputation.
        """
        self._drawn_for = (step, microbatch)

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute hidden states fp32 from token ids (b, n) int64 at the first stage, or from hidden states (b, n, d)
        fp32.

        The last stage returns logits (b, n, v). torch's global generators are unchanged. A GPU draws other dropout.
        """
        drawn, on = self.training and self._dropout > 0, inputs.device
        forked = [on.index or 0] if on.type == "cuda" else []
        generator = torch.cuda.default_generators[forked[0]] if forked else torch.default_generator
        with autocast(on.type, bf16=self._bf16), torch.random.fork_rng(devices=forked, enabled=drawn):
            hidden = inputs
            if self.first:
                self._key(EMBEDDING, drawn, generator)
                hidden = self.embed(inputs)
            for layer, block in zip(self.layers, self.blocks(hidden), strict=True):
                self._key(layer, drawn, generator)
                hidden = block(hidden)
            return self.head(hidden) if self.last else hidden.float()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats over the b * n tokens, a scalar, equal to the whole model's loss from
        shifted labels.
        """
        with autocast(logits.device.type, bf16=self._bf16):
            return nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))

    def _key(self, layer: int | str, drawn: bool, generator: torch.Generator) -> None:
        if drawn:
            assert self._drawn_for is not None, "call draw() before a forward pass with dropout"
            generator.manual_seed(dropout_key(self._seed, *self._drawn_for, layer))
