"""Our codecs as a compression of hivemind, for averagers and optimisers. Needs `pip install testbed[hivemind]`.

    compression = testbed.torch.hivemind.compression("int4(group=64)", peer=number)
    hivemind.Optimizer(..., grad_compression=compression, state_averaging_compression=compression)

A receiver looks up a compression by one of six names in the message, so ours replaces one of them: every peer must call
this with the same codec, before its averager starts. Groups of peers change, and averaged parts are returned as
differences, so a codec with state is rejected. A message begins with 8 bytes: the number of its sender and its own
number, which serve as the step in the message key.
"""

from __future__ import annotations

import itertools
import struct
import threading
from typing import Any

import torch

from testbed.codecs.contract import Context, Stateful
from testbed.codecs.make import build_codec
from testbed.codecs.wrap import capability, decode_as
from testbed.errors import CodecError, SpecError, UnknownNameError
from testbed.message_key import MessageKey
from testbed.nodes.bucket import fixed_bytes
from testbed.nodes.fragments import SMALL
from testbed.torch.exchanges import CODED, parse_exchanged

_NUMBERS = struct.Struct("<II")
_SAMPLE = 1 << 16
"""Size of a part, in values, for which the ratio is estimated."""


def compression(text: str, *, peer: int, seed: int = 0, replaces: str = "UNIFORM_8BIT") -> Any:
    """Return a `hivemind.compression.CompressionBase` that has replaced another. `peer` makes codecs draw differently.

    Integers and tensors of fewer than 1,024 values are not compressed. SpecError or UnknownNameError for an unsuitable
    codec, or an unknown name to replace.
    """
    from hivemind.compression import CompressionBase, NoCompression, serialization
    from hivemind.proto import runtime_pb2

    codec = build_codec(parse_exchanged(text), Context(seed, 0, "backward"))
    if capability(codec, Stateful) is not None:
        raise SpecError(f"codec {text!r} remembers what it sent, and hivemind's peers change; take one that does not")
    if replaces not in (known := runtime_pb2.CompressionType.keys()) or replaces == "NONE":
        raise UnknownNameError("compression of hivemind that can be replaced", replaces, {*known} - {"NONE"})
    plain, lock, count = NoCompression(), threading.Lock(), itertools.count()  # hivemind compresses in several threads

    class CodecCompression(CompressionBase):  # type: ignore[misc]
        compression_type = runtime_pb2.CompressionType.Value(replaces)

        def compress(self, tensor: torch.Tensor, info: Any, allow_inplace: bool = False) -> Any:
            if tensor.dtype not in CODED or tensor.numel() < SMALL:
                return plain.compress(tensor, info, allow_inplace)
            with lock:
                numbers = _NUMBERS.pack(peer, next(count))
                payload = codec.encode(tensor.detach().float(), _key(numbers))
            dtype = str(tensor.dtype).removeprefix("torch.")
            told = {"size": tensor.shape, "dtype": dtype, "requires_grad": tensor.requires_grad}
            return runtime_pb2.Tensor(compression=self.compression_type, buffer=numbers + bytes(payload), **told)

        def extract(self, serialized_tensor: Any) -> torch.Tensor:
            message, shape = memoryview(serialized_tensor.buffer), torch.Size(serialized_tensor.size)
            if len(message) < _NUMBERS.size:
                raise CodecError(f"a message of {len(message)} bytes: its two numbers alone take {_NUMBERS.size}")
            with lock:
                value = decode_as(codec, message[_NUMBERS.size :], _key(message[: _NUMBERS.size]), shape)
            return value.to(getattr(torch, serialized_tensor.dtype)).requires_grad_(serialized_tensor.requires_grad)

        def estimate_compression_ratio(self, info: Any) -> float:
            size = fixed_bytes(codec, (_SAMPLE,))
            return 1.0 if size is None else 8 * size / _SAMPLE / torch.finfo(info.descriptor.dtype).bits

    made = serialization._BASE_COMPRESSION_TYPES[replaces] = CodecCompression()
    return made


def _key(numbers: bytes | memoryview) -> MessageKey:
    return MessageKey("train", int.from_bytes(numbers, "little"), 0, ())
