"""Optional claims of a codec's class beyond the two methods of the contract, which the conformance tests verify.

For shipped codecs the table's row has the other claims. A class or an instance may also name a law in an attribute
`law`, and claim lossless hidden states in an attribute `exact`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

CLAIMS = ("bound", "kept_bound", "payload_bytes", "residual")
"""Methods of a codec: the largest error of each value of a message key's first tensor, and of each value that is kept;
the length of a payload of a shape, for stateful codecs of a message key's first; what a message key's inputs are still
owed, so that the sum of decoded tensors + residual == the sum of inputs. The README of `codecs` has the details.
"""


@runtime_checkable
class Agreeing(Protocol):
    """A hook that states which data the other end of its boundary must share."""

    def agreed(self) -> Mapping[str, Tensor]:
        """Return tensors by name that are bit-identical at both ends after a message.

        Those named 'basis...' have orthonormal columns.
        """
        ...


@runtime_checkable
class Constraining(Protocol):
    """A hook that reports how well its constraint on the stage's weights holds."""

    def outside(self) -> float | None:
        """Return the maximum share of a weight's norm outside the constraint; None if this end constrains nothing."""
        ...
