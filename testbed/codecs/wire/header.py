"""The start of a payload: the code of its body, a visit number and the shape. Writes and checks it.

Little-endian: code u8, number of axes u8, visit u8, a zero byte, each axis u32. The body follows; the shape decides its
length. Wrappers have their own header of 4 bytes (`wrap.frame`); both start with a code that is unique to a codec.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from testbed.codecs.contract import MessageKey, Payload
from testbed.errors import CodecError

CPU = torch.device("cpu")
DEVICES = {"cuda"}
"""Types of other devices, for codecs that work on them."""
MAX_AXES = 8
VISIT_AT = 2
"""The offset of the visit number's byte."""
_FIXED = struct.Struct("<BBBB")
# An empty tensor may claim long axes at no cost in bytes, and torch multiplies them into strides.
_MAX_STRIDE = 2**48

Shape = tuple[int, ...]


class DevicePayload(NamedTuple):
    """A payload whose body is still on the encoder's device, for a decoder there; as long as its bytes.

    It is passed in place of a `Payload` among codecs that work on devices (`wrap.works_on_devices`) in one process.
    """

    head: bytearray | memoryview
    """All headers, which are small."""
    body: Tensor
    """Flat uint8."""

    def __len__(self) -> int:
        return len(self.head) + self.body.numel()

    def to_bytes(self) -> bytes:
        """Return the bytes that the same message has on the CPU."""
        return bytes(self.head) + self.body.cpu().numpy().tobytes()


class ArrivedPayload(DevicePayload):
    """A payload that came over a link: its head holds all bytes not read yet, and its body, on the device, all bytes,
    because only a decoder knows where the headers end.
    """

    __slots__ = ()

    def __len__(self) -> int:
        return len(self.head)


class DeviceMessage(NamedTuple):
    """Several payloads as one message to a node of the same process, as long as their bytes with a length each."""

    device: str
    """The device of the tensors."""
    parts: tuple[Any, ...]
    """Payloads of either kind, and fp32 tensors that are not coded."""

    def __len__(self) -> int:
        return sum(4 * part.numel() if isinstance(part, Tensor) else 4 + len(part) for part in self.parts)


def cut_head(payload: Payload, size: int) -> tuple[memoryview, Payload]:
    """Return the first bytes of a payload, or of its head, and the rest of it."""
    if isinstance(payload, DevicePayload):
        rest: Any = type(payload)(payload.head[size:], payload.body)
        return memoryview(payload.head)[:size], rest
    view = memoryview(payload)
    return view[:size], view[size:]


def rows_of(shape: Shape) -> tuple[int, int]:
    """Return (rows, width) of a shape; rows lie along the last axis.

    A scalar is one row of one value; an empty tensor has no rows.
    """
    width = shape[-1] if shape else 1
    return (math.prod(shape) // width if width else 0), width


def header_bytes(axes: int) -> int:
    """Return the length of a header: a multiple of 4, so that fp32 values behind it are aligned if the payload is."""
    return _FIXED.size + 4 * axes


def allocate(code: int, shape: Shape, body_bytes: int, device: torch.device = CPU) -> tuple[memoryview, Tensor]:
    """Return a fresh payload of visit 0 with its header written, and its body as a uint8 tensor to be filled: a
    memoryview, or for another device than the CPU a `DevicePayload`.

    CodecError for a shape too large.
    """
    if len(shape) > MAX_AXES or any(axis >= 2**32 for axis in shape):
        raise CodecError(
            f"cannot encode a tensor of shape {shape}: a payload holds at most {MAX_AXES} axes, each below 2**32"
        )
    start = header_bytes(len(shape))
    here = device.type == CPU.type
    store: npt.NDArray[np.uint8] = np.empty(start + body_bytes if here else start, np.uint8)
    struct.pack_into(f"<BBBB{len(shape)}I", store.data, 0, code, len(shape), 0, 0, *shape)
    if not here:
        made: Any = DevicePayload(bytearray(store), torch.empty(body_bytes, dtype=torch.uint8, device=device))
        return made, made.body
    return store.data, torch.from_numpy(store[start:])


class Opened(NamedTuple):
    """A payload whose length agrees with its header."""

    shape: Shape
    visit: int
    body: memoryview
    """Empty if the body is on a device alone."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def open_payload(payload: Payload, code: int, body_bytes: Callable[[Shape], int]) -> Opened:
    """Check a payload against the code expected and the length that its shape requires, without allocating memory.

    CodecError says what was found.
    """
    view = memoryview(payload.head if isinstance(payload, DevicePayload) else payload)
    if not view.contiguous:
        raise CodecError("cannot decode a payload that is not one contiguous buffer")
    view = view.cast("B") if view.nbytes else memoryview(b"")
    size = len(payload) if isinstance(payload, DevicePayload) else len(view)
    if len(view) < _FIXED.size:
        raise CodecError(f"cannot decode a payload of {size} bytes: a header has at least {_FIXED.size}")
    first, axes, visit, zero = _FIXED.unpack_from(view)
    if first != code or zero != 0 or axes > MAX_AXES:
        raise CodecError(
            f"cannot decode a payload that begins {view[:4].hex(' ')}: expected body code {code}, at most "
            f"{MAX_AXES} axes"
        )
    start = header_bytes(axes)
    if len(view) < start:
        raise CodecError(f"cannot decode a payload of {size} bytes: its header of {axes} axes has {start}")
    shape = struct.unpack_from(f"<{axes}I", view, _FIXED.size)
    if math.prod(axis for axis in shape if axis) > _MAX_STRIDE or size != start + body_bytes(shape):
        raise CodecError(
            f"cannot decode a payload of {size} bytes: shape {shape} in its header does not fit that length"
        )
    body = view[start:]
    # torch has no read-only tensors and warns about such memory; bytes objects are copied, receive buffers are not.
    return Opened(shape, visit, memoryview(bytearray(body)) if body.readonly else body)


def body_of(payload: Payload, opened: Opened) -> Tensor:
    """Return a payload's body as a flat uint8 tensor over its memory; an arrived one's is copied, for its alignment."""
    if isinstance(payload, ArrivedPayload):
        return payload.body[payload.body.numel() - len(opened.body) :].clone()
    if isinstance(payload, DevicePayload):
        return payload.body
    return as_tensor(opened.body, torch.uint8, len(opened.body))


def open_any(payload: Payload, code: int) -> Opened:
    """Check only a payload's header, for bodies whose length depends on more than the shape."""
    size = memoryview(payload).nbytes
    return open_payload(payload, code, lambda shape: size - header_bytes(len(shape)))


def as_tensor(body: memoryview, dtype: torch.dtype, count: int, *, offset: int = 0) -> Tensor:
    """Return `count` values as a flat tensor over the body's memory. Do not write to that of a received body."""
    return torch.frombuffer(body, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)


def check_input(tensor: Tensor, *, on_device: bool = False) -> Tensor:
    """Return the tensor detached from autograd. CodecError unless it is fp32 or bf16 on the CPU, or, for codecs that
    work `on_device`, on one of `DEVICES`.
    """
    known = tensor.dtype in (torch.float32, torch.bfloat16)
    if not known or tensor.device.type not in (CPU.type, *(DEVICES if on_device else ())):
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
