"""PowerSGD's low-rank approximation of the matrix of a message: one row a token, one column a channel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.in_model import bases
from testbed.codecs.sparse.sparsifiers import DTYPES, Values
from testbed.codecs.wire import header, noise
from testbed.codecs.wrap import check_keys
from testbed.errors import CodecError
from testbed.message_key import Phase

_LARGEST = float.fromhex("0x1p+120")
"""Of a magnitude times the root of the number of rows: a column's norm, and with it a factor, stays far within fp32 and bf16."""
_SMALLEST = 1e-20
"""A column of Q that is shorter, after M was scaled, holds nothing."""


class PowerSGD:
    """M (b n, d) is sent as P (b n, r), orthonormal, and Q (d, r): one step of power iteration, M ~ P Q^T.

    With Q of the message before (warm start) P = orth(M Q), then Q = M^T P; both go over. The channels that matter drift slowly
    with the weights, so a Q of another micro-batch is a good start though its examples are others. Only the sender remembers: Q,
    one a phase. start=cold draws Q anew from the message key's key each time.

    Law: a projection of M's columns on r directions, P P^T M, to the rounding of the factors (bf16: 2**-8 each): the error is
    orthogonal to what is decoded. Bits a value: 16 r (1/d + 1/(b n)). `ef(powersgd(4))` is PowerSGD with error feedback.
    Source: Vogels et al., NeurIPS 2019; on activations: Bian et al., MLSys 2024. (Q stays orthogonal enough for fp32 because P is
    made orthonormal in every message.)
    """

    def __init__(
        self, context: Context, *, rank: int, start: Literal["warm", "cold"] = "warm", values: Values = "bf16"
    ) -> None:
        self._context, self._rank, self._warm, self._dtype = context, rank, start == "warm", DTYPES[values]
        self._starts: dict[Phase, Tensor] = {}

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """CodecError names the message key for NaN, infinity, or magnitudes above 2**120 over the root of the number of tokens."""
        shape = tuple(tensor.shape)
        rows, width = header.rows_of(shape)
        payload, body = header.allocate(header.LOW_RANK, shape, self._body_bytes(shape))
        m = header.check_input(tensor).to(torch.float32).reshape(rows, width)
        if rows == 0:
            return payload
        largest = torch.maximum(m.amax(), m.amin().neg()).item()
        if not largest * math.sqrt(rows) < _LARGEST:
            header.check_finite(m, key, "a low-rank approximation")
            raise CodecError(
                f"cannot encode {key}: a magnitude of {largest:g} is too large for the factors of {rows} tokens"
            )
        # A power of two, so nothing is rounded: products of values far from 1 would overflow or vanish.
        scale = math.ldexp(1.0, max(math.frexp(largest)[1], -125)) if largest else 1.0
        if not 2.0**-32 < scale < 2.0**32:
            m = m / scale
        else:
            scale = 1.0
        p = bases.orthonormal(m @ self._start(key, width, self._of(shape)))
        q = m.T @ p
        sent_p, sent_q = self._split(body, shape)
        sent_p.copy_(p)
        sent_q.copy_(q * scale)
        if self._warm:
            self._starts[key.phase] = q
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """CodecError for factors that are not finite, or whose product is not."""
        opened = header.open_payload(payload, header.LOW_RANK, self._body_bytes)
        if opened.visit != 0:
            raise CodecError(
                f"cannot decode a payload with visit number {opened.visit}: a low-rank approximation writes 0"
            )
        if not opened.elements:
            return torch.empty(opened.shape)
        sent_p, sent_q = self._split(header.as_tensor(opened.body, torch.uint8, len(opened.body)), opened.shape)
        value = sent_p.to(torch.float32) @ sent_q.to(torch.float32).T
        header.check_finite(value, key, "a low-rank approximation", doing="decode")
        return value.view(opened.shape)

    def payload_bytes(self, shape: tuple[int, ...]) -> int:
        """The length of a payload of this shape."""
        return header.header_bytes(len(shape)) + self._body_bytes(shape)

    def shared(self) -> Mapping[str, Tensor]:
        """Nothing: the receiver needs no Q but the one in the message."""
        return {}

    def state(self) -> dict[str, Any]:
        """Q of each phase, at the sender."""
        return {"starts": {phase: start.clone() for phase, start in self._starts.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `base.Stateful`."""
        check_keys(state, {"starts"})
        for start in (starts := dict(state["starts"])).values():
            if not isinstance(start, Tensor) or start.dtype != torch.float32 or start.ndim != 2:
                raise CodecError("cannot load a state: a start is not an fp32 matrix")
        self._starts = {phase: start.clone() for phase, start in starts.items()}

    def reset(self) -> None:
        """The next message starts from a random Q. Any receiver accepts every message."""
        self._starts = {}

    def _start(self, key: MessageKey, width: int, rank: int) -> Tensor:
        """Q of the message before with columns of length 1; drawn where there is none, or where a column has vanished."""
        held = self._starts.get(key.phase)
        if held is not None and held.shape == (width, rank):
            lengths = torch.linalg.vector_norm(held, dim=0)
            gone = lengths < _SMALLEST
            if not bool(gone.any()):
                return held.div(lengths)
            return torch.where(gone, self._draw(key, width, rank), held / lengths.clamp_min(_SMALLEST))
        return self._draw(key, width, rank)

    def _draw(self, key: MessageKey, width: int, rank: int) -> Tensor:
        return bases.normal(f"low-rank start {noise.seed_of(self._context, key, 'low-rank start')}", width, rank)

    def _split(self, body: Tensor, shape: header.Shape) -> tuple[Tensor, Tensor]:
        """P and Q as they lie in a payload's body."""
        rank, (rows, width) = self._of(shape), header.rows_of(shape)
        factors = body.view(self._dtype)
        return factors[: rows * rank].view(rows, rank), factors[rows * rank :].view(width, rank)

    def _of(self, shape: header.Shape) -> int:
        """The rank, at most that of any matrix of this shape."""
        return min(self._rank, *header.rows_of(shape))

    def _body_bytes(self, shape: header.Shape) -> int:
        rows, width = header.rows_of(shape)
        return self._of(shape) * (rows + width) * self._dtype.itemsize
