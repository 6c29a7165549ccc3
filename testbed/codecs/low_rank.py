"""Low rank: sends the matrix of a message (a row per token, a column per channel) as two thin factors.

`PowerSGD` sends the factors as bf16 or fp32; `CodedLowRank` sends each through another codec.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.in_model import bases
from testbed.codecs.sparse.sparsifier import DTYPES, ValueType
from testbed.codecs.wire import header, noise
from testbed.codecs.wire.header import Shape, check_finite, rows_of
from testbed.codecs.wire.message import Body, BodyCodec, Field, check_written
from testbed.codecs.wrap import Wrapper, check_keys, decode_as, size_of, twin
from testbed.errors import CodecError
from testbed.message_key import Phase

_LARGEST = float.fromhex("0x1p+120")
"""Limit of the largest magnitude times the root of the number of rows. It keeps the norms of columns, and with them the
factors, well within fp32 and bf16.
"""
_SMALLEST = 1e-20
"""A column of Q with a smaller norm, after M was scaled, counts as zero."""
_LENGTH = struct.Struct("<Q")


class PowerSGD(BodyCodec):
    """Sends M (b n, d) as P (b n, r), orthonormal, and Q (d, r): one step of power iteration, M ~ P Q^T.

    From the previous message's Q (warm start), P = orth(M Q), then Q = M^T P; both are sent. The dominant channels
    drift slowly with the weights, so the Q of another micro-batch is a good start despite its different examples. Only
    the sender has state: one Q per phase. start=cold draws a new Q from the message key each time.

    Law: M's columns are projected onto r directions, P P^T M, up to the rounding of the factors (bf16: 2**-8 each); the
    error is orthogonal to the decoded tensor. Bits per value: 16 r (1/d + 1/(b n)). `ef(powersgd(4))` is PowerSGD with
    error feedback.
    Source: Vogels et al., NeurIPS 2019; on activations: Bian et al., MLSys 2024. (Q stays orthogonal enough for fp32
    because P is made orthonormal in every message.)
    """

    on_device = True
    code = 46

    def __init__(
        self, context: Context, *, rank: int, start: Literal["warm", "cold"] = "warm", values: ValueType = "bf16"
    ) -> None:
        self._context, self._rank, self._warm, self._dtype = context, rank, start == "warm", DTYPES[values]
        self._starts: dict[Phase, Tensor] = {}

    def fields(self, shape: Shape) -> tuple[Field, ...]:
        """Return P and Q."""
        rows, width = rows_of(shape)
        rank = _rank_in(shape, self._rank)
        return Field(self._dtype, rows * rank), Field(self._dtype, width * rank)

    def fill(self, x: Tensor, body: Body, key: MessageKey) -> None:
        """Write the factors. CodecError names the message key for NaN, infinity, or magnitudes above 2**120 over the
        root of the number of tokens.
        """
        for field, factor in zip(body, self.factors(x, key), strict=True):
            field.copy_(factor.reshape(-1))

    def values(self, body: Body, shape: Shape, key: MessageKey) -> Tensor:
        """Return P Q^T. CodecError for factors that are not finite, or whose product is not."""
        rank = _rank_in(shape, self._rank)
        p, q = (factor.to(torch.float32).view(-1, rank) for factor in body)
        return _product(p, q, key)

    def factors(self, x: Tensor, key: MessageKey) -> tuple[Tensor, Tensor]:
        """Return P (b n, r) and Q (d, r), fp32. The next message starts from this Q. CodecError as in `fill`."""
        m = x.reshape(rows_of(x.shape))
        largest = torch.maximum(m.amax(), m.amin().neg()).item()
        if not largest * math.sqrt(len(m)) < _LARGEST:
            check_finite(x, key, "a low-rank approximation")
            raise CodecError(
                f"cannot encode {key}: a magnitude of {largest:g} is too large for the factors of {len(m)} tokens"
            )
        # A power of two, so nothing is rounded: products of values far from 1 would overflow or vanish.
        scale = math.ldexp(1.0, max(math.frexp(largest)[1], -125)) if largest else 1.0
        if not 2.0**-32 < scale < 2.0**32:
            m = m / scale
        else:
            scale = 1.0
        p = bases.orthonormal(m @ self._start(key, m.shape[1], _rank_in(x.shape, self._rank)).to(m.device))
        q = m.T @ p
        if self._warm:
            self._starts[key.phase] = q
        return p, q * scale

    def shared(self) -> Mapping[str, Tensor]:
        """Return nothing: the receiver needs only the Q in the message."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the sender's Q of each phase."""
        return {"starts": {phase: start.clone() for phase, start in self._starts.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned. CodecError for anything else."""
        check_keys(state, {"starts"})
        starts = state["starts"].values() if isinstance(state["starts"], Mapping) else [None]
        if not all(isinstance(start, Tensor) and start.dtype == torch.float32 and start.ndim == 2 for start in starts):
            raise CodecError("cannot load a state: a start is not an fp32 matrix")
        self._starts = {phase: start.clone() for phase, start in state["starts"].items()}

    def reset(self) -> None:
        """Discard every Q, so that the next message starts from a random one. Any receiver accepts every message."""
        self._starts = {}

    def _start(self, key: MessageKey, width: int, rank: int) -> Tensor:
        """Return the last message's Q with columns of length 1; drawn if there is none, or where a column vanished."""
        held = self._starts.get(key.phase)
        if held is not None and held.shape == (width, rank):
            lengths = torch.linalg.vector_norm(held, dim=0)
            gone = lengths < _SMALLEST
            if not bool(gone.any()):
                return held.div(lengths)
            return torch.where(gone, self._draw(key, width, rank).to(held.device), held / lengths.clamp_min(_SMALLEST))
        return self._draw(key, width, rank)

    def _draw(self, key: MessageKey, width: int, rank: int) -> Tensor:
        return bases.normal(f"low-rank start {noise.seed_of(self._context, key, 'low-rank start')}", width, rank)


class CodedLowRank(Wrapper):
    """Sends PowerSGD's P and Q through another codec each, such as int4. Only the sender keeps a warm start.

    Wire: the common header with the tensor's shape, u64 length of the coded P, the coded P (b n, r), the coded Q (d,
    r). Bits per element with a codec of c bits: c r (1/d + 1/bn).
    Source: modelled on CompactFusion's low-rank compressor with INT4 factors, from memory.
    """

    code = 65
    payload_bytes: Callable[[Shape], int]
    """Length of a payload for a shape. Absent if the inner codec does not define its own."""

    def __init__(self, context: Context, inner: Codec, rank: int = 32) -> None:
        """P and Q have separate instances of the inner codec, because a stateful one would mix them up."""
        self._power = PowerSGD(context, rank=rank)
        self.inner, self._second, self._rank = inner, twin(inner), rank
        super().__init__(inner=inner, second=self._second, power=self._power)
        if (of_factor := size_of(inner)) is not None:
            self.payload_bytes = lambda shape: self._coded_bytes(shape, of_factor)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode both factors. CodecError from PowerSGD or the inner codec."""
        x = header.check_input(tensor).to(torch.float32)
        left = right = b""  # type: Payload
        with self.parts_unchanged_on_error():
            if x.numel():
                p, q = self._power.factors(x, key)
                left, right = self.inner.encode(p, key), self._second.encode(q, _second(key))
            content = bytearray().join((_LENGTH.pack(memoryview(left).nbytes), left, right))
            payload, body = header.allocate(self.code, tuple(x.shape), len(content))
        body.numpy()[:] = content
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode both factors and multiply them. CodecError if they do not match the shape."""
        opened = header.open_any(payload, self.code)
        if opened.visit or len(opened.body) < _LENGTH.size:
            raise CodecError(
                f"cannot decode {key}: {len(opened.body)} bytes, visit number {opened.visit}, do not hold two factors"
            )
        (length,) = _LENGTH.unpack_from(opened.body)
        left, right = opened.body[_LENGTH.size :][:length], opened.body[_LENGTH.size :][length:]
        if not opened.elements:
            check_written(not len(left) and not len(right), key, "factors of a tensor without values")
            return torch.empty(opened.shape)
        (rows, width), rank = rows_of(opened.shape), _rank_in(opened.shape, self._rank)
        with self.parts_unchanged_on_error("inner", "second"):
            p = decode_as(self.inner, left, key, torch.Size((rows, rank)))
            q = decode_as(self._second, right, _second(key), torch.Size((width, rank)))
            return _product(p, q, key).view(opened.shape)

    def _coded_bytes(self, shape: Shape, of_factor: Callable[[Shape], int]) -> int:
        (rows, width), rank = rows_of(shape), _rank_in(shape, self._rank)
        factors = of_factor((rows, rank)) + of_factor((width, rank)) if rank else 0
        return header.header_bytes(len(shape)) + _LENGTH.size + factors


def _rank_in(shape: Shape, rank: int) -> int:
    """Return the rank, limited to the largest that a matrix of this shape can have."""
    return min(rank, *rows_of(shape))


def _product(p: Tensor, q: Tensor, key: MessageKey) -> Tensor:
    """Return P Q^T. CodecError if it is not finite."""
    value = p @ q.T
    check_finite(value, key, "a low-rank approximation", doing="decode")
    return value


def _second(key: MessageKey) -> MessageKey:
    """Return Q's message key: with P's, both would be rounded with the same noise, and their product biased."""
    return key._replace(microbatch=-1 - key.microbatch)
