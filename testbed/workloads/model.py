"""A causal language model cut into stages: what is the same for every family. gpt2.py and llama.py fill in the rest.

Chained with plain tensors, the stages do the same operations in the same order as transformers' whole model, bit for bit,
whatever the number of stages. Input and output embeddings are not tied: tied ones would lie in the first and the last stage, and
their gradients would have to be exchanged at every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class StageModel(nn.Module, ABC):
    """One stage's share. Its parameters bear the names that they have in transformers' whole model.

    The first stage has the embeddings, the last the final norm and the output layer; one stage alone has all.
    """

    def __init__(self, *, first: bool, last: bool, layers: range, width: int, context: int) -> None:
        """`layers` of the whole model are here; `width` is the hidden size, `context` the longest sequence in tokens."""
        super().__init__()
        self.first, self.last, self.layers, self.width, self.context = first, last, layers, width, context

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Token ids (b, n) int64 to hidden states (b, n, d); at the first stage only."""

    @abstractmethod
    def through(self, hidden: Tensor) -> Tensor:
        """Hidden states (b, n, d) through this stage's layers."""

    @abstractmethod
    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states (b, n, d) to logits (b, n, v); at the last stage only."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Token ids (b, n) int64 at the first stage, hidden states (b, n, d) fp32 at others, to hidden states.

        The last stage returns logits (b, n, v).
        """
        hidden = self.through(self.embed(inputs) if self.first else inputs)
        return self.head(hidden) if self.last else hidden

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the b * n tokens, a scalar: what the whole model computes from shifted labels."""
        return nn.functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))
