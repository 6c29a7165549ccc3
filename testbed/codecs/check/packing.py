"""Plain values and tensors as bytes, between the kit and a process that it does not trust: unpacking runs no code."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from testbed.codecs.check.verdicts import Broken
from testbed.codecs.contract import MessageKey

_LENGTH = 8
_MOST_VALUES = 1 << 28


def pack(value: Any) -> bytes:
    """Return a value as bytes. TypeError for what is neither plain nor a tensor.

    A tensor keeps its strides; a named tuple becomes a tuple, unless it is a message key.
    """
    buffers: list[bytes] = []
    head = json.dumps([_plain(value, buffers), [len(buffer) for buffer in buffers]]).encode()
    return b"".join((len(head).to_bytes(_LENGTH, "little"), head, *buffers))


def unpack(packed: bytes) -> Any:
    """Return the value. Broken for bytes that `pack` did not make."""
    try:
        body = _LENGTH + int.from_bytes(packed[:_LENGTH], "little")
        told, lengths = json.loads(packed[_LENGTH:body])
        ends = [body, *(body + sum(lengths[: at + 1]) for at in range(len(lengths)))]
        if ends[-1] != len(packed):
            raise ValueError(f"{len(packed)} bytes in place of {ends[-1]}")
        return _value(told, iter([packed[begin:end] for begin, end in itertools.pairwise(ends)]))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, StopIteration) as error:
        raise Broken(f"a process answered what cannot be read: {type(error).__name__}: {error}") from None


def _plain(value: Any, buffers: list[bytes]) -> Any:
    """Return numbers and texts as they are, and all else as a list that begins with its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        buffers.append(bytes(value))
        return ["bytes"]
    if isinstance(value, Tensor):
        strides = list(value.stride())
        if not value.is_meta:
            size = 1 + sum((n - 1) * step for n, step in zip(value.shape, strides, strict=True)) if value.numel() else 0
            flat = value.detach().as_strided((size,), (1,), value.storage_offset())
            buffers.append(flat.view(torch.uint8).numpy().tobytes())
        kind = str(value.dtype).removeprefix("torch.")
        return ["tensor", kind, list(value.shape), strides, value.requires_grad, value.is_meta]
    if isinstance(value, dict):
        return ["dict", *(_plain(each, buffers) for pair in value.items() for each in pair)]
    if isinstance(value, list | tuple):
        kind = "key" if isinstance(value, MessageKey) else "list" if isinstance(value, list) else "tuple"
        return [kind, *(_plain(each, buffers) for each in value)]
    raise TypeError(f"a {type(value).__name__} is neither a plain value nor a tensor")


def _value(told: Any, buffers: Iterator[bytes]) -> Any:
    if not isinstance(told, list):
        return told
    kind, *parts = told
    if kind == "bytes":
        return next(buffers)
    if kind == "tensor":
        name, shape, strides, grad, meta = parts
        dtype = getattr(torch, name)
        if meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        content, values = bytearray(next(buffers)), math.prod(shape)
        if values > _MOST_VALUES:
            raise ValueError(f"a tensor of shape {shape}")
        tensor = (
            torch.frombuffer(content, dtype=dtype).as_strided(shape, strides)
            if values
            else torch.empty(shape, dtype=dtype)
        )
        return tensor.requires_grad_(grad)
    each = [_value(part, buffers) for part in parts]
    if kind == "dict":
        return dict(zip(each[::2], each[1::2], strict=True))
    makers: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "key": MessageKey._make}
    return makers[kind](each)
