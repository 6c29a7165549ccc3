"""Low rank with coded factors: PowerSGD's P and Q, each through another codec, such as int4.

Wire: the common header with the tensor's shape, u64 length of the coded P, the coded P (b n, r), the coded Q (d, r). Bits per
element with a codec of c bits: c r (1/d + 1/bn).
Source: after the low-rank compressor with INT4 factors of CompactFusion, from memory; P and Q as in `lowrank`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.low_rank import PowerSGD
from testbed.codecs.wire import header
from testbed.codecs.wrap import Wrapper, decode_as, size_of, twin
from testbed.errors import CodecError

_LENGTH = struct.Struct("<Q")


class CodedLowRank(Wrapper):
    """PowerSGD in fp32, taken apart before the wire and put together behind it. Only the sender remembers (its warm start)."""

    payload_bytes: Callable[[header.Shape], int]
    """The length of a payload of a shape. Not there where the inner codec does not say its own."""

    def __init__(self, context: Context, inner: Codec, rank: int = 32) -> None:
        """P and Q have codecs of their own, because one that remembers would mix them up."""
        self._power = PowerSGD(context, rank=rank, values="fp32")
        self.inner, self._second, self._rank = inner, twin(inner), rank
        super().__init__(inner=inner, second=self._second, power=self._power)
        if (of_factor := size_of(inner)) is not None:
            self.payload_bytes = lambda shape: self._of_factors(shape, of_factor)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """CodecError as PowerSGD and the inner codec have it."""
        with self.parts_unchanged_on_error():
            opened = header.open_payload(self._power.encode(tensor, key), header.LOW_RANK, self._factor_bytes)
            left = right = b""  # type: Payload
            if opened.elements:
                p, q = self._factors(header.as_tensor(opened.body, torch.float32, len(opened.body) // 4), opened.shape)
                left, right = self.inner.encode(p, key), self._second.encode(q, _second(key))
        size = _LENGTH.size + len(left) + len(right)
        payload, body = header.allocate(header.CODED_LOW_RANK, opened.shape, size)
        body.numpy()[:] = bytearray().join((_LENGTH.pack(len(left)), left, right))
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """CodecError where the factors do not fit the shape."""
        size = len(memoryview(payload).cast("B")) if len(payload) else 0
        opened = header.open_payload(
            payload, header.CODED_LOW_RANK, lambda shape: size - header.header_bytes(len(shape))
        )
        if opened.visit or len(opened.body) < _LENGTH.size:
            raise CodecError(
                f"cannot decode {key}: {len(opened.body)} bytes with visit number {opened.visit} of two factors"
            )
        (length,) = _LENGTH.unpack_from(opened.body)
        left, right = opened.body[_LENGTH.size :][:length], opened.body[_LENGTH.size :][length:]
        if not opened.elements:
            if len(left) or len(right):
                raise CodecError(
                    f"cannot decode {key}: factors of a tensor of shape {opened.shape}, which has no values"
                )
            return torch.empty(opened.shape)
        rows, width = header.rows_of(opened.shape)
        rank = min(self._rank, rows, width)
        with self.parts_unchanged_on_error("inner", "second"):
            p = decode_as(self.inner, left, key, torch.Size((rows, rank)))
            q = decode_as(self._second, right, _second(key), torch.Size((width, rank)))
            plain, body = header.allocate(header.LOW_RANK, opened.shape, self._factor_bytes(opened.shape))
            for target, factor in zip(self._factors(body.view(torch.float32), opened.shape), (p, q), strict=True):
                target.copy_(factor)
            return self._power.decode(plain, key)

    def _of_factors(self, shape: header.Shape, of_factor: Callable[[header.Shape], int]) -> int:
        rows, width = header.rows_of(shape)
        rank = min(self._rank, rows, width)
        factors = of_factor((rows, rank)) + of_factor((width, rank)) if rank else 0
        return header.header_bytes(len(shape)) + _LENGTH.size + factors

    def _factors(self, flat: Tensor, shape: header.Shape) -> tuple[Tensor, Tensor]:
        """P and Q as they lie in PowerSGD's body."""
        rows, width = header.rows_of(shape)
        rank = min(self._rank, rows, width)
        return flat[: rows * rank].view(rows, rank), flat[rows * rank :].view(width, rank)

    def _factor_bytes(self, shape: header.Shape) -> int:
        return self._power.payload_bytes(shape) - header.header_bytes(len(shape))


def _second(key: MessageKey) -> MessageKey:
    """Q's message key: with P's the two would be rounded with the same noise, and products of equal noise have a mean."""
    return key._replace(microbatch=-1 - key.microbatch)
