"""All tensors of a worker as one message, so that a link's delay is paid once.

Payload: for each tensor of at least `SMALL` values, in the model's order, the length of its codec's payload (4 bytes,
little-endian) and that payload; then the values of all other tensors, fp32. Both ends know the tensors' shapes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from testbed.codecs.catalogue.codec_spec import parse_codec
from testbed.codecs.contract import Codec, Context, Payload, Stateful
from testbed.codecs.kept_state import load_into, state_of
from testbed.codecs.make import build_codec
from testbed.codecs.memory.feedback import Feedback
from testbed.codecs.wire.header import CPU, DeviceMessage
from testbed.codecs.wrap import States, capability, parts_with, size_of, works_on_devices
from testbed.errors import CodecError
from testbed.message_key import Direction, MessageKey
from testbed.nodes.fragments import SMALL

Tensors: TypeAlias = list[Tensor]
_LENGTH = struct.Struct("<I")
_ALIGNMENT_BYTES = 64
"""Alignment of torch's allocations."""


def at_alignment(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is not aligned as torch allocates: vectorised kernels sum in another order for
    another alignment, as seen with a codec that wrapped its payload's memory, so the cut would change the numbers.
    """
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT_BYTES else tensor


def weighted_sum(values: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """Return the weighted sum of each tensor, in order from the first; overwrites `values`.

    In a star the server sums in the order of the workers, and the workers apply its decoded reply. Where every worker
    has all messages (all-to-all, all-gather) each computes the sum itself, in the same order. In a ring that reduces,
    part p of the tensors is summed on its way round from worker p: p, p + 1, ...; it is re-encoded at every hop, so
    only codecs that merely round are allowed there.
    """
    total: Tensors = []
    for each, weight in zip(values, weights, strict=True):
        weighed = [value.mul_(weight) for value in each]
        total = [before.add_(value) for before, value in zip(total, weighed, strict=True)] if total else weighed
    return total


class Bucket:
    """One end of one sender's messages: a stateful codec for each large tensor."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], codec: str, *, seed: int, sender: int, direction: Direction = "backward"
    ) -> None:
        """`sender` counts workers, then a server; with the tensor's number it keys the codecs' random draws."""
        self._shapes = [tuple(shape) for shape in shapes]
        self._values = [math.prod(shape) for shape in self._shapes]
        self._contexts = {
            tensor: Context(seed=seed, boundary=sender * len(shapes) + tensor, direction=direction)
            for tensor, values in enumerate(self._values)
            if values >= SMALL
        }
        self._text = codec
        self._codecs = self._made(codec)

    @property
    def raw_bytes(self) -> int:
        """Size of all tensors as fp32."""
        return 4 * sum(self._values)

    def change(self, codec: str) -> None:
        """Switch to another codec, which takes over the state of the previous one. CodecError if it cannot."""
        if codec == self._text:
            return
        changed = self._made(codec)
        for tensor, new in changed.items():
            before, after = capability(self._codecs[tensor], Stateful), capability(new, Stateful)
            if before is not None and after is not None:
                after.load(before.state())
        self._text, self._codecs = codec, changed

    def state(self) -> dict[str, Any]:
        """Return the state of its codecs."""
        return {"codec": self._text, "codecs": state_of(self._codecs)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.change(state["codec"])
        load_into(self._codecs, state["codecs"])

    def encode(self, tensors: Sequence[Tensor], step: int, numbers: Sequence[int] | None = None) -> Any:
        """Encode a worker's fp32 tensors as the payload of that step's message. CodecError as from the codecs.

        `numbers`: the indices of these tensors, in order, if the message does not contain all.
        """
        if tensors and tensors[0].device.type != CPU.type:
            return self._encode_on(tensors, self._all(numbers), _key(step))
        parts: list[Payload] = []
        small = []
        for number, tensor in zip(self._all(numbers), tensors, strict=True):
            if (codec := self._codecs.get(number)) is None:
                small.append(tensor.reshape(-1))
                continue
            payload = codec.encode(tensor, _key(step))
            parts += [_LENGTH.pack(memoryview(payload).nbytes), payload]
        if small:
            parts.append(torch.cat(small).numpy().tobytes())
        return b"".join(parts)

    def _encode_on(self, tensors: Sequence[Tensor], numbers: Sequence[int], key: MessageKey) -> DeviceMessage:
        """Encode tensors that are on a device; codecs that work only on the CPU get copies."""
        parts: list[Any] = []
        for number, tensor in zip(numbers, tensors, strict=True):
            codec = self._codecs.get(number)
            own = tensor if codec is None or works_on_devices(codec) else tensor.cpu()
            parts.append(tensor.detach().clone() if codec is None else codec.encode(own, key))
        return DeviceMessage(str(tensors[0].device), tuple(parts))

    def _decode_on(self, number: int, part: Any, device: str, key: MessageKey) -> Tensor:
        return part.clone() if isinstance(part, Tensor) else self._codecs[number].decode(part, key).to(device)

    def decode(self, payload: Any, step: int, numbers: Sequence[int] | None = None) -> list[Tensor]:
        """Decode a payload into new tensors. CodecError if it does not fit these tensors, or as from the codecs."""
        if isinstance(payload, DeviceMessage):
            sent = zip(self._all(numbers), payload.parts, strict=True)
            return [self._decode_on(*each, payload.device, _key(step)) for each in sent]
        view, at, decoded = memoryview(payload), 0, dict[int, Tensor]()
        for tensor in self._all(numbers):
            if (codec := self._codecs.get(tensor)) is None:
                continue
            length = _LENGTH.unpack(self._cut(view, at, _LENGTH.size, step))[0]
            at += _LENGTH.size
            value = codec.decode(self._cut(view, at, length, step), _key(step))
            if tuple(value.shape) != self._shapes[tensor]:
                raise CodecError(
                    f"the message of step {step}: tensor {tensor} has shape {tuple(value.shape)}, "
                    f"expected {self._shapes[tensor]}"
                )
            decoded[tensor] = at_alignment(value)
            at += length
        for tensor in self._all(numbers):
            if tensor not in decoded:
                values = self._values[tensor]
                own = bytearray(self._cut(view, at, 4 * values, step))
                value = torch.frombuffer(own, dtype=torch.float32) if values else torch.empty(0)
                decoded[tensor] = value.view(self._shapes[tensor]).clone()
                at += 4 * values
        if at != view.nbytes:
            raise CodecError(
                f"the message of step {step} has {view.nbytes} bytes, {view.nbytes - at} more than its tensors need"
            )
        return [decoded[tensor] for tensor in self._all(numbers)]

    def payload_bytes(self, numbers: Sequence[int] | None = None) -> int | None:
        """Return the length of each message of these tensors; None if it depends on values or on earlier messages."""
        total = 0
        for number in self._all(numbers):
            codec = self._codecs.get(number)
            size = 4 * self._values[number] if codec is None else fixed_bytes(codec, self._shapes[number])
            if size is None:
                return None
            total += size + (0 if codec is None else _LENGTH.size)
        return total

    @property
    def memory(self) -> States:
        """State of its codecs."""
        return memory_of({str(tensor): codec for tensor, codec in self._codecs.items()})

    def _all(self, numbers: Sequence[int] | None) -> Sequence[int]:
        return range(len(self._shapes)) if numbers is None else numbers

    def _made(self, codec: str) -> dict[int, Codec]:
        spec = parse_codec(codec)
        return {tensor: build_codec(spec, context) for tensor, context in self._contexts.items()}

    def _cut(self, view: memoryview, at: int, length: int, step: int) -> memoryview:
        if at + length > view.nbytes:
            raise CodecError(f"the message of step {step} has {view.nbytes} bytes, expected at least {at + length}")
        return view[at : at + length]


def _key(step: int) -> MessageKey:
    return MessageKey("train", step, 0, ())


def fixed_bytes(codec: Codec, shape: Sequence[int]) -> int | None:
    """Return the length of every payload of tensors of a shape; None if it depends on values or on earlier messages."""
    while isinstance(codec, Feedback):  # its payloads are the inner codec's
        codec = codec.inner
    size = size_of(codec)
    return None if size is None or capability(codec, Stateful) is not None else size(tuple(shape))


def memory_of(codecs: Mapping[str, Codec]) -> States:
    """Return the state of codecs as one, with each codec's state by name."""
    return States(parts_with(codecs, Stateful))
