"""The start of a payload: the code of its body, a visit number and the shape. Writes and checks it.

Little-endian: code u8, number of axes u8, visit u8, a zero byte, each axis u32. The body follows; the shape decides its
length. Wrappers have their own header of 4 bytes (`wrap.frame`); both start with a code that is unique to a codec.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from testbed.codecs.contract import MessageKey, Payload
from testbed.errors import CodecError

MAX_AXES = 8
VISIT_AT = 2
"""The offset of the visit number's byte."""
_FIXED = struct.Struct("<BBBB")
# An empty tensor may claim long axes at no cost in bytes, and torch multiplies them into strides.
_MAX_STRIDE = 2**48

Shape = tuple[int, ...]


def rows_of(shape: Shape) -> tuple[int, int]:
    """Return (rows, width) of a shape; rows lie along the last axis.

    A scalar is one row of one value; an empty tensor has no rows.
    """
    width = shape[-1] if shape else 1
    return (math.prod(shape) // width if width else 0), width


def header_bytes(axes: int) -> int:
    """Return the length of a header: a multiple of 4, so that fp32 values behind it are aligned if the payload is."""
    return _FIXED.size + 4 * axes


def allocate(code: int, shape: Shape, body_bytes: int) -> tuple[memoryview, Tensor]:
    """Return a fresh payload of visit 0 with its header written, and its body as a uint8 tensor to be filled.

    CodecError for a shape too large.
    """
    if len(shape) > MAX_AXES or any(axis >= 2**32 for axis in shape):
        raise CodecError(
            f"cannot encode a tensor of shape {shape}: a payload holds at most {MAX_AXES} axes, each below 2**32"
        )
    start = header_bytes(len(shape))
    store: npt.NDArray[np.uint8] = np.empty(start + body_bytes, np.uint8)
    struct.pack_into(f"<BBBB{len(shape)}I", store.data, 0, code, len(shape), 0, 0, *shape)
    return store.data, torch.from_numpy(store[start:])


class Opened(NamedTuple):
    """A payload whose length agrees with its header."""

    shape: Shape
    visit: int
    body: memoryview

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def open_payload(payload: Payload, code: int, body_bytes: Callable[[Shape], int]) -> Opened:
    """Check a payload against the code expected and the length that its shape requires, without allocating memory.

    CodecError says what was found.
    """
    view = memoryview(payload)
    if not view.contiguous:
        raise CodecError("cannot decode a payload that is not one contiguous buffer")
    view = view.cast("B") if view.nbytes else memoryview(b"")
    if len(view) < _FIXED.size:
        raise CodecError(f"cannot decode a payload of {len(view)} bytes: a header has at least {_FIXED.size}")
    first, axes, visit, zero = _FIXED.unpack_from(view)
    if first != code or zero != 0 or axes > MAX_AXES:
        raise CodecError(
            f"cannot decode a payload that begins {view[:4].hex(' ')}: expected body code {code}, at most "
            f"{MAX_AXES} axes"
        )
    start = header_bytes(axes)
    if len(view) < start:
        raise CodecError(f"cannot decode a payload of {len(view)} bytes: its header of {axes} axes has {start}")
    shape = struct.unpack_from(f"<{axes}I", view, _FIXED.size)
    if math.prod(axis for axis in shape if axis) > _MAX_STRIDE or len(view) != start + body_bytes(shape):
        raise CodecError(
            f"cannot decode a payload of {len(view)} bytes: shape {shape} in its header does not fit that length"
        )
    body = view[start:]
    # torch has no read-only tensors and warns about such memory; bytes objects are copied, receive buffers are not.
    return Opened(shape, visit, memoryview(bytearray(body)) if body.readonly else body)


def open_any(payload: Payload, code: int) -> Opened:
    """Check only a payload's header, for bodies whose length depends on more than the shape."""
    size = memoryview(payload).nbytes
    return open_payload(payload, code, lambda shape: size - header_bytes(len(shape)))


def as_tensor(body: memoryview, dtype: torch.dtype, count: int, *, offset: int = 0) -> Tensor:
    """Return `count` values as a flat tensor over the body's memory. Do not write to that of a received body."""
    return torch.frombuffer(body, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)


def check_input(tensor: Tensor) -> Tensor:
    """Return the tensor detached from autograd. CodecError unless it is fp32 or bf16 on the CPU."""
    if tensor.dtype not in (torch.float32, torch.bfloat16) or tensor.device.type != "cpu":
        raise CodecError(
            f"cannot encode a {tensor.dtype} tensor on {tensor.device}: a codec takes float32 or bfloat16 on the CPU"
        )
    return tensor.detach()


def check_finite(tensor: Tensor, key: MessageKey, what: str, doing: str = "encode") -> None:
    """Raise a CodecError that names the message key if the tensor holds NaN or infinity, which `what` cannot carry."""
    # The sum is one cheap pass; large values may overflow it, so a sum that is not finite needs a closer look.
    if not math.isfinite(tensor.sum().item()) and not bool(torch.isfinite(tensor).all()):
        shape = tuple(tensor.shape)
        raise CodecError(
            f"cannot {doing} {key}: the tensor of shape {shape} holds NaN or infinity, which {what} cannot carry"
        )


def check_transformed(coefficients: Tensor, key: MessageKey) -> None:
    """Raise a CodecError that names the message key if a coefficient is not finite, or too large to be transformed back
    once it is rounded.
    """
    if coefficients.numel() and not (largest := float(torch.linalg.vector_norm(coefficients, math.inf))) <= 2.0**120:
        check_finite(coefficients, key, "a transform")
        raise CodecError(f"cannot encode {key}: a coefficient of {largest:g} is too large to be transformed back")
