"""One end of the boundary between two stages: a codec for each direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, Hook, MessageKey, ModelCodec, ObservesLink, Paired, ReportsChoice
from testbed.codecs.dense.cast import Fp32
from testbed.codecs.wire.header import CPU, ArrivedPayload, DevicePayload
from testbed.codecs.wrap import States, capability, works_on_devices
from testbed.errors import UserError
from testbed.message_key import Side, incoming, outgoing
from testbed.nodes.bucket import at_alignment, fixed_bytes, memory_of
from testbed.runtime.carried import Carried


class Boundary:
    """Encodes and decodes the tensors exchanged with the neighbour on one side."""

    keeps = ("_encoder", "_decoder")

    def __init__(
        self,
        side: Side,
        *,
        index: int,
        seed: int,
        make: Callable[[Context], Codec],
        measure: Callable[[], Carried] | None,
        device: torch.device = CPU,
    ) -> None:
        """`side` is the neighbour's side. `index` counts boundaries (0 lies between the stages 0 and 1); `make` makes a
        codec. `measure` starts to measure the link to the neighbour, for codecs that observe it; UserError if such a
        codec has none. Tensors are on `device`; codecs that work only on the CPU get copies.
        """
        self._side, self._device = side, device
        out, back = (Context(seed=seed, boundary=index, direction=way(side)) for way in (outgoing, incoming))
        self._encoder, self._decoder = make(out), make(back)
        self._copies, self._copies_in = (
            device.type != CPU.type and not works_on_devices(codec) for codec in (self._encoder, self._decoder)
        )
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
                    "its codec adapts to its link, so training depends on the network; run such cells with "
                    'timing = "live"'
                )
            self._observed = observer, measure()
        self._choosing = capability(self._encoder, ReportsChoice)
        # Message keys of an evaluation without the codec must not reach it: its state would advance.
        self._plain_encoder, self._plain_decoder = Fp32(out), Fp32(back)

    def hook(self, model: Any) -> Hook | None:
        """Return the activation codec's part of the stage's model, a torch Module; None if it does not change the
        model.
        """
        return None if self._model_codec is None else self._model_codec.hook(model, self._side)

    @property
    def memory(self) -> States:
        """State of its codecs."""
        return memory_of({"encoder": self._encoder, "decoder": self._decoder})

    def payload_bytes(self, shape: Sequence[int], *, out: bool) -> int | None:
        """Return the length of every payload of tensors of a shape; None if it depends on more than the shape."""
        return fixed_bytes(self._encoder if out else self._decoder, shape)

    def decode(self, payload: Any, key: MessageKey) -> Tensor:
        """Decode the neighbour's tensor. Raises the codec's CodecError."""
        if self._copies_in and isinstance(payload, ArrivedPayload):
            payload = payload.head
        tensor = (self._plain_decoder if key.phase == "uncompressed" else self._decoder).decode(payload, key)
        if self._device.type != CPU.type:
            return tensor.to(self._device)
        return at_alignment(tensor)

    def encode(self, tensor: Tensor, key: MessageKey) -> tuple[Any, str | None]:
        """Return the bytes for the neighbour, and the codec's choice if it makes one. Raises the codec's CodecError."""
        if key.phase == "uncompressed":
            return as_bytes(self._plain_encoder.encode(tensor, key)), None
        if self._observed is not None:
            observer, carried = self._observed
            observer.observe(*carried.read())
        payload = self._encoder.encode(tensor.cpu() if self._copies else tensor, key)
        return as_bytes(payload), None if self._choosing is None else self._choosing.choice


def as_bytes(payload: Any) -> Any:
    """Return a payload as bytes, so that its length is its size; as it is if it is on a device."""
    if isinstance(payload, DevicePayload):
        return payload
    view = memoryview(payload)
    return view.cast("B") if view.nbytes else memoryview(b"")
