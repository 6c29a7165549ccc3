"""One end of the boundary between two stages: a codec for each direction on top of the connection to the neighbour."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from testbed.codecs.contract import Codec, Context, Hook, MessageKey, ModelCodec, ObservesLink, Paired, ReportsChoice
from testbed.codecs.dense.cast import Fp32
from testbed.codecs.wrap import capability
from testbed.message_key import incoming, outgoing
from testbed.pipeline.carried import Carried
from testbed.pipeline.pacing import Stopwatch
from testbed.pipeline.transport import Neighbour

_FP32_BYTES = 4
_ALIGNMENT_BYTES = 64
"""Alignment of what torch allocates. Vectorised kernels sum in another order where a tensor begins elsewhere (seen: a
codec that wrapped its payload's memory), and then the cut would touch the numbers."""


class Boundary:
    """Tensors to and from the neighbour on one side."""

    def __init__(
        self,
        connection: Neighbour,
        *,
        index: int,
        seed: int,
        make: Callable[[Context], Codec],
        timeout_s: float,
    ) -> None:
        """`index` counts boundaries (0 lies between the stages 0 and 1); `make` makes a codec; `timeout_s` is the
        longest wait for one frame.
        """
        self._connection, self._timeout_s = connection, timeout_s
        out, back = (
            Context(seed=seed, boundary=index, direction=direction(connection.side))
            for direction in (outgoing, incoming)
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
        """Return the part that the activations' codec has in the stage's model, a torch Module; None where it leaves
        the model alone.
        """
        return None if self._model_codec is None else self._model_codec.hook(model, self._connection.side)

    def receive(self, key: MessageKey, watch: Stopwatch) -> Tensor:
        """Wait for the neighbour's tensor and decode it. `watch` is told when it arrived and when it was decoded."""
        decoder = self._plain_decoder if key.phase == "uncompressed" else self._decoder
        arrival = self._connection.take(key, self._timeout_s)
        input_ns = time.monotonic_ns()
        tensor = decoder.decode(arrival.payload, key)
        if tensor.data_ptr() % _ALIGNMENT_BYTES:
            tensor = tensor.clone()
        watch.received(arrival.last_byte_ns, input_ns, time.monotonic_ns())
        return tensor

    def send(self, tensor: Tensor, key: MessageKey, watch: Stopwatch, *, raw_values: int) -> None:
        """Encode a tensor and queue its payload. `watch` says when it may go at the earliest, and is told when it was
        free to go.

        `raw_values` is how many values the tensor stands for: more than it has where a codec in the model has left
        fewer of them.
        """
        plain = key.phase == "uncompressed"
        if self._observed is not None and not plain:
            observer, carried = self._observed
            observer.observe(*carried.read())
        payload = (self._plain_encoder if plain else self._encoder).encode(tensor, key)
        choice = None if self._choosing is None or plain else self._choosing.choice
        raw_bytes = raw_values * _FP32_BYTES
        not_before_ns = watch.encoded()
        watch.queued(
            self._connection.send(key, payload, raw_bytes=raw_bytes, choice=choice, not_before_ns=not_before_ns)
        )
