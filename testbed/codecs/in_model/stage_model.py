"""What a codec that changes the model asks of a stage's model; `workloads` has such models, and nothing here knows which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

from torch import nn

from testbed.errors import SpecError


class Part(Protocol):
    """A module of a stage, and where it hangs."""

    @property
    def module(self) -> nn.Module: ...

    def replace(self, module: nn.Module) -> None: ...


class StageModel(Protocol):
    """A stage's share of a model."""

    first: bool
    last: bool
    width: int
    """The hidden size d."""
    context: int
    """The longest sequence, in tokens."""
    vocabulary: int
    """Rows of the token embedding, of which only the first stage has one."""
    learned_positions: bool
    kept: dict[str, Any]
    """What codecs keep with the stage, by name: its two boundaries find the same."""

    def tables(self) -> Sequence[Part]:
        """The embeddings: of tokens, and of positions where they are learned. Empty but at the first stage."""
        ...

    def writers(self) -> Sequence[Part]:
        """The linear layers whose outputs are added to the hidden states, in order."""
        ...


_NEEDED = ("first", "last", "width", "context", "vocabulary", "learned_positions", "kept", "tables", "writers")


def known(model: nn.Module, codec: str) -> StageModel:
    """The model, if it can be worked on. SpecError if it cannot."""
    if missing := [name for name in _NEEDED if not hasattr(model, name)]:
        raise SpecError(
            f"codec {codec} changes the model, and {type(model).__name__} does not say what there is to change: "
            f"it has no {', no '.join(missing)}"
        )
    return cast("StageModel", model)
