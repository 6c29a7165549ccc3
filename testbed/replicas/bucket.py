"""All tensors of a worker as one message, so that a link's delay is paid once.

Payload: for each tensor of at least `SMALL` values, in the model's order, the length of its codec's payload (4 bytes,
little-endian) and that payload; then the values of all other tensors, fp32. Both ends know the tensors' shapes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from testbed.codecs.catalogue.codec_spec import parse_codec
from testbed.codecs.contract import Codec, Context, Payload, Stateful
from testbed.codecs.make import build_codec
from testbed.codecs.wrap import capability
from testbed.errors import CodecError
from testbed.message_key import MessageKey
from testbed.replicas.fragments import SMALL

_LENGTH = struct.Struct("<I")
_ALIGNMENT_BYTES = 64
"""Of what torch allocates: vectorised kernels round otherwise where a tensor begins elsewhere."""


class Bucket:
    """One end of one sender's messages: a codec for each large tensor, with what it remembers of that tensor."""

    def __init__(self, shapes: Sequence[Sequence[int]], codec: str, *, seed: int, sender: int) -> None:
        """`sender` counts workers, and a server after them; with the tensor's number it keys what codecs draw."""
        self._shapes = [tuple(shape) for shape in shapes]
        self._values = [math.prod(shape) for shape in self._shapes]
        self._contexts = {
            tensor: Context(seed=seed, boundary=sender * len(shapes) + tensor, direction="backward")
            for tensor, values in enumerate(self._values)
            if values >= SMALL
        }
        self._text = codec
        self._codecs = self._made(codec)

    @property
    def raw_bytes(self) -> int:
        """All tensors as fp32."""
        return 4 * sum(self._values)

    def change(self, codec: str) -> None:
        """Go on with another codec, which takes over what the one before remembers. CodecError where it cannot."""
        if codec == self._text:
            return
        changed = self._made(codec)
        for tensor, new in changed.items():
            before, after = capability(self._codecs[tensor], Stateful), capability(new, Stateful)
            if before is not None and after is not None:
                after.load(before.state())
        self._text, self._codecs = codec, changed

    def encode(self, tensors: Sequence[Tensor], step: int) -> bytes:
        """Turn a worker's tensors, fp32, into the payload of that step's message. CodecError as from the codecs."""
        parts: list[Payload] = []
        for tensor, codec in self._codecs.items():
            payload = codec.encode(tensors[tensor], _key(step))
            parts += [_LENGTH.pack(memoryview(payload).nbytes), payload]
        small = [value.reshape(-1) for tensor, value in enumerate(tensors) if tensor not in self._codecs]
        if small:
            parts.append(torch.cat(small).numpy().tobytes())
        return b"".join(parts)

    def decode(self, payload: Payload, step: int) -> list[Tensor]:
        """Return new tensors from a payload. CodecError where it is not of these tensors, or as from the codecs."""
        view, at, decoded = memoryview(payload), 0, dict[int, Tensor]()
        for tensor, codec in self._codecs.items():
            length = _LENGTH.unpack(self._cut(view, at, _LENGTH.size, step))[0]
            at += _LENGTH.size
            value = codec.decode(self._cut(view, at, length, step), _key(step))
            if tuple(value.shape) != self._shapes[tensor]:
                raise CodecError(
                    f"the message of step {step}: tensor {tensor} has shape {tuple(value.shape)}, and "
                    f"{self._shapes[tensor]} was to come"
                )
            decoded[tensor] = value.clone() if value.data_ptr() % _ALIGNMENT_BYTES else value
            at += length
        for tensor, (shape, values) in enumerate(zip(self._shapes, self._values, strict=True)):
            if tensor not in decoded:
                own = bytearray(self._cut(view, at, 4 * values, step))
                decoded[tensor] = torch.frombuffer(own, dtype=torch.float32).view(shape).clone()
                at += 4 * values
        if at != view.nbytes:
            raise CodecError(
                f"the message of step {step} has {view.nbytes} bytes, of which {view.nbytes - at} are over"
            )
        return [decoded[tensor] for tensor in range(len(self._shapes))]

    def _made(self, codec: str) -> dict[int, Codec]:
        spec = parse_codec(codec)
        return {tensor: build_codec(spec, context) for tensor, context in self._contexts.items()}

    def _cut(self, view: memoryview, at: int, length: int, step: int) -> memoryview:
        if at + length > view.nbytes:
            raise CodecError(f"the message of step {step} has {view.nbytes} bytes, and {at + length} were to come")
        return view[at : at + length]


def _key(step: int) -> MessageKey:
    return MessageKey("train", step, 0, ())
