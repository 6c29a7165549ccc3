"""Encode and decode common to codecs, so that a codec defines only its maths and one statement of its size.

A `BodyCodec` states the fields of its body for a shape, fills them, and turns them into values. This module handles the
rest: the header, the input's type, empty tensors, the length of a payload, and visit numbers.
`testbed/codecs/dense/cast.py` is the shortest example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from testbed.codecs.contract import MessageKey, Payload
from testbed.codecs.wire import header
from testbed.codecs.wire.header import Shape
from testbed.errors import CodecError

Body: TypeAlias = tuple[Tensor, ...]
"""The fields of a body, one flat tensor each, over the payload's own memory."""


class Field(NamedTuple):
    """Consecutive numbers of one type in a body. Packed bits are torch.uint8."""

    dtype: torch.dtype
    length: int


class BodyCodec(ABC):
    """A codec whose payload is the common header and a body whose length depends only on the tensor's shape."""

    code: int
    """First byte of a payload, which identifies the codec: 1 to 199, unique."""
    on_device: ClassVar[bool] = False
    """Whether `fill` and `values` work on every device, without numpy (see `wrap.works_on_devices`)."""
    counts_visits: ClassVar[bool] = False
    """Whether a wrapper writes and reads the header's visit byte. Otherwise it must be 0."""

    @abstractmethod
    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return the body's fields, in order, for a shape without a zero: the codec's one statement of its size.

        Wider types come first, which keeps every field aligned.
        """

    @abstractmethod
    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Write x, which is fp32, contiguous, not empty and not to be changed, to the body's fields.

        CodecError that names the message key if the codec cannot represent x.
        """

    @abstractmethod
    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return the fields' values as a new contiguous fp32 tensor of the shape's size; the fields are read-only.

        CodecError for fields that `fill` does not write (see `check_written`).
        """

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """See the contract. CodecError for another type or device, a shape too large, or from `fill`."""
        tensor = header.check_input(tensor, on_device=self.on_device)
        shape = tuple(tensor.shape)
        fields = self._fields(shape)
        payload, body = header.allocate(self.code, shape, _size_bytes(fields), tensor.device)
        if fields:
            self.fill(tensor.to(torch.float32).contiguous(), _cut(body, fields), key)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """See the contract. CodecError for a wrong header, length or visit, or from `values`."""
        opened = header.open_payload(payload, self.code, self._body_bytes)
        check_written(self.counts_visits or not opened.visit, key, f"visit number {opened.visit} here")
        body = header.body_of(payload, opened)
        if not (fields := self._fields(opened.shape)):
            return torch.empty(opened.shape, device=body.device)
        return self.values(_cut(body, fields), opened.shape, key).view(opened.shape)

    def payload_bytes(self, shape: Shape) -> int:
        """Return the length of a payload of a tensor of this shape, header included."""
        return header.header_bytes(len(shape)) + self._body_bytes(shape)

    def _body_bytes(self, shape: Shape) -> int:
        return _size_bytes(self._fields(shape))

    def _fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return the fields; none where there are no values."""
        return self.fields(shape) if 0 not in shape else ()


def _size_bytes(fields: tuple[Field, ...]) -> int:
    return sum(length * dtype.itemsize for dtype, length in fields)


def _cut(memory: Tensor, fields: tuple[Field, ...]) -> Body:
    parts = torch.split(memory, [length * dtype.itemsize for dtype, length in fields])
    return tuple(part.view(dtype) for part, (dtype, _) in zip(parts, fields, strict=True))


def check_written(sound: bool, key: MessageKey, what: str) -> None:
    """Unless the payload is `sound`, raise a CodecError with the message key and `what` no encoder writes."""
    if not sound:
        raise CodecError(f"cannot decode {key}: no encoder writes {what}")
