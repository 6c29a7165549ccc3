"""One end of the boundary between two stages: a codec for each direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from testbed.codecs.contract import Codec, Context, Hook, MessageKey, ModelCodec, ObservesLink, Paired, ReportsChoice
from testbed.codecs.dense.cast import Fp32
from testbed.codecs.wrap import capability
from testbed.errors import UserError
from testbed.message_key import Side, incoming, outgoing
from testbed.pipeline.carried import Carried

_ALIGNMENT_BYTES = 64
"""Alignment of what torch allocates. Vectorised kernels sum in another order where a tensor begins elsewhere (seen: a
codec that wrapped its payload's memory), and then the cut would touch the numbers."""


class Boundary:
    """Tensors to and from the neighbour on one side, as payloads."""

    def __init__(
        self,
        side: Side,
        *,
        index: int,
        seed: int,
        make: Callable[[Context], Codec],
        measure: Callable[[], Carried] | None,
    ) -> None:
        """`side` is where the neighbour is. `index` counts boundaries (0 lies between the stages 0 and 1); `make` makes
        a codec. `measure` begins to measure the link to the neighbour, and is called where the codec goes by that;
        UserError without.
        """
        self._side = side
        out, back = (Context(seed=seed, boundary=index, direction=way(side)) for way in (outgoing, incoming))
        self._encoder, self._decoder = make(out), make(back)
        forward, backward = (
            (self._encoder, self._decoder) if out.direction == "forward" else (self._decoder, self._encoder)
        )
        if (paired := capability(backward, Paired)) is not None:
            paired.pair(forward)
        self._model_codec = capability(forward, ModelCodec)
        self._observed: tuple[ObservesLink, Carried] | None = None
        if (observer := capability(self._encoder, ObservesLink)) is not None:
            if measure is None:
                raise UserError(
                    "its codec goes by what its link carries, so the network takes part in the maths and it cannot be "
                    'trained without one; run such cells with timing = "live"'
                )
            self._observed = observer, measure()
        self._choosing = capability(self._encoder, ReportsChoice)
        # The codec under test is not to see the message keys of an evaluation without it: its state would advance.
        self._plain_encoder, self._plain_decoder = Fp32(out), Fp32(back)

    def hook(self, model: Any) -> Hook | None:
        """Return the part that the activations' codec has in the stage's model, a torch Module; None where it leaves
        the model alone.
        """
        return None if self._model_codec is None else self._model_codec.hook(model, self._side)

    def decode(self, payload: memoryview, key: MessageKey) -> Tensor:
        """Return the neighbour's tensor. CodecError as from the codec."""
        tensor = (self._plain_decoder if key.phase == "uncompressed" else self._decoder).decode(payload, key)
        return tensor.clone() if tensor.data_ptr() % _ALIGNMENT_BYTES else tensor

    def encode(self, tensor: Tensor, key: MessageKey) -> tuple[memoryview, str | None]:
        """Return the bytes for the neighbour, and what the codec chose where it has a choice. CodecError as from the
        codec.
        """
        if key.phase == "uncompressed":
            return _as_bytes(self._plain_encoder.encode(tensor, key)), None
        if self._observed is not None:
            observer, carried = self._observed
            observer.observe(*carried.read())
        payload = self._encoder.encode(tensor, key)
        return _as_bytes(payload), None if self._choosing is None else self._choosing.choice


def _as_bytes(payload: bytes | bytearray | memoryview) -> memoryview:
    """Return a payload as bytes, so that its length is what it weighs."""
    view = memoryview(payload)
    return view.cast("B") if view.nbytes else memoryview(b"")
