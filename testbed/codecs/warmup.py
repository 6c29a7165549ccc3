"""warmup: values as they are for the first steps, then another codec.

What compresses with a memory, or through an optimiser that has not settled, does most harm at the beginning: 1-bit Adam
(Tang et al., arXiv 2102.02888) and CocktailSGD (Wang et al., ICML 2023) send everything until then.
"""

from __future__ import annotations

from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.dense.cast import Fp32


class WarmUp:
    """The payload is fp32's in messages of the first steps, then the inner codec's; both ends know the step.

    Law: the inner codec's, from then on. State: the inner codec's, which nothing has reached before.
    """

    def __init__(self, context: Context, inner: Codec, steps: int) -> None:
        """Nothing in the context matters here."""
        self.inner, self._first, self._steps = inner, Fp32(context), steps

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode with the step's codec."""
        return self._of(key).encode(tensor, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the step's codec."""
        return self._of(key).decode(payload, key)

    def _of(self, key: MessageKey) -> Codec:
        return self._first if key.step < self._steps else self.inner
