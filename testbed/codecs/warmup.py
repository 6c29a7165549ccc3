"""warmup: uncompressed values in the first steps, then another codec.

Compression with memory, or before the optimiser has settled, does the most harm at the beginning, so 1-bit Adam (Tang
et al., arXiv 2102.02888) and CocktailSGD (Wang et al., ICML 2023) first send uncompressed values.
"""

from __future__ import annotations

from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.dense.cast import Fp32


class WarmUp:
    """Sends messages of the first steps as fp32, later ones through the inner codec; both ends know the step.

    Law: the inner codec's, after the warm-up. State: the inner codec's, which sees no earlier message.
    """

    on_device = True

    def __init__(self, context: Context, inner: Codec, steps: int) -> None:
        """Messages of the first `steps` training steps are sent as fp32."""
        self.inner, self._first, self._steps = inner, Fp32(context), steps

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode with the step's codec."""
        return self._of(key).encode(tensor, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the step's codec."""
        return self._of(key).decode(payload, key)

    def _of(self, key: MessageKey) -> Codec:
        return self._first if key.phase == "train" and key.step < self._steps else self.inner
