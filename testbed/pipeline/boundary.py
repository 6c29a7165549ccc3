"""One end of the boundary between two stages: a codec for each direction on top of a port."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from testbed.codecs.contract import Codec, Context, Hook, MessageKey, ModelCodec, ObservesLink, Paired, ReportsChoice
from testbed.codecs.dense.cast import Fp32
from testbed.codecs.wrap import capability
from testbed.pipeline.carried import Carried
from testbed.pipeline.port import Place, Port, Side, sends, takes
from testbed.pipeline.transport import Connection

_FP32_BYTES = 4
_ALIGNMENT_BYTES = 64
"""Of what torch allocates. Vectorised kernels sum in another order where a tensor begins elsewhere (seen: a codec that wrapped
its payload's memory), and then the cut would touch the numbers."""


class Received(NamedTuple):
    """A tensor, and when its last byte had arrived, when it was at hand as bytes, and when it was a tensor again."""

    tensor: Tensor
    arrived_ns: int
    input_ns: int
    decoded_ns: int


class Boundary(Port):
    """Tensors to and from the neighbour on one side."""

    def __init__(
        self,
        side: Side,
        *,
        index: int,
        seed: int,
        make: Callable[[Context], Codec],
        connection: Connection,
        timeout_s: float,
    ) -> None:
        """`index` counts boundaries (0 lies between the stages 0 and 1); `make` makes a codec."""
        super().__init__(side, connection=connection, timeout_s=timeout_s)
        out, back = (
            Context(seed=seed, boundary=index, direction=direction) for direction in (sends(side), takes(side))
        )
        self._encoder, self._decoder = make(out), make(back)
        forward, backward = (
            (self._encoder, self._decoder) if out.direction == "forward" else (self._decoder, self._encoder)
        )
        if (paired := capability(backward, Paired)) is not None:
            paired.pair(forward)
        self._model_codec = capability(forward, ModelCodec)
        self._observed: tuple[ObservesLink, Carried] | None = None
        if (observer := capability(self._encoder, ObservesLink)) is not None:
            self._observed = observer, connection.measure()
        self._choosing = capability(self._encoder, ReportsChoice)
        # The codec under test is not to see the message keys of an evaluation without it: its state would advance.
        self._plain_encoder, self._plain_decoder = Fp32(out), Fp32(back)

    def hook(self, model: Any) -> Hook | None:
        """The part that the activations' codec has in the stage's model, a torch Module; None where it leaves the model alone."""
        return None if self._model_codec is None else self._model_codec.hook(model, self.side)

    def send(
        self, tensor: Tensor, key: MessageKey, place: Place, encoded: Callable[[], int], raw_values: int | None = None
    ) -> int:
        """Encode and queue. Returns the time (ns) at which the payload was with the send thread, free to go.

        `place` is the message's in the records; `encoded`, called in between, says when it may go at the earliest; `raw_values`
        how many values the tensor stands for, where a codec in the model has left fewer of them.
        """
        plain = key.phase == "uncompressed"
        if self._observed is not None and not plain:
            observer, carried = self._observed
            observer.observe(*carried.read())
        payload = (self._plain_encoder if plain else self._encoder).encode(tensor, key)
        choice = None if self._choosing is None or plain else self._choosing.choice
        raw_bytes = (raw_values or tensor.numel()) * _FP32_BYTES
        return self.post(place, payload, raw_bytes, not_before_ns=encoded(), choice=choice)

    def receive(self, key: MessageKey, place: Place) -> Received:
        """Wait for the neighbour's tensor and decode it."""
        decoder = self._plain_decoder if key.phase == "uncompressed" else self._decoder
        arrival = self.take(place)
        input_ns = time.monotonic_ns()
        tensor = decoder.decode(arrival.payload, key)
        if tensor.data_ptr() % _ALIGNMENT_BYTES:
            tensor = tensor.clone()
        decoded_ns = time.monotonic_ns()
        self.note(place, arrival)
        return Received(tensor, arrival.last_byte_ns, input_ns, decoded_ns)
