"""Bases and tables that must be identical at several stages: drawn from a key, orthonormalised in fp32, checked when
received.

Both ends compute them from the same numbers with the same instructions, so they are bit-identical and cost no bytes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from testbed import keyed

_CHUNK = 1 << 22
_SKEW = 0.05
"""Largest deviation of a basis's Gram matrix from the identity; bf16 rounding causes less."""
_NO_RANK = 1e-12
"""Squared singular values below this share of the largest one are fp32 rounding."""


def normal(purpose: str, *shape: int) -> Tensor:
    """Draw fp32 numbers of mean 0 and variance 1 that depend on `purpose` alone.

    Box and Muller (1958), on 32-bit words of Philox.
    """
    count = math.prod(shape)
    numbers = torch.empty(count)
    stream = np.random.Philox(key=keyed.key(purpose))
    for start in range(0, count, _CHUNK):
        part = numbers[start : start + _CHUNK]
        pairs = -(-len(part) // 2)
        words = torch.from_numpy(np.asarray(stream.random_raw(pairs), dtype="<u8").view("<u4").astype(np.float32))
        words = words.add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2**-24)
        radius, angle = words[:pairs].log().mul_(-2).sqrt_(), words[pairs:].mul_(2 * math.pi)
        part.copy_(torch.cat([radius * angle.cos(), radius * angle.sin()])[: len(part)])
    return numbers.view(shape)


def orthonormal(matrix: Tensor) -> Tensor:
    """Return an orthonormal basis, fp32, of the columns of a matrix (d, k), k <= d, of full rank.

    It is the Q of the QR decomposition with a positive diagonal in R, so a small change of `matrix` changes it little.
    """
    q, r = torch.linalg.qr(matrix)
    basis: Tensor = q * r.diagonal().sign()
    return basis.contiguous()


def drawn(purpose: str, width: int, rank: int) -> Tensor:
    """Draw a basis (d, k) of a subspace that is uniformly random: orthonormalised isotropic noise."""
    return orthonormal(normal(purpose, width, rank))


def polar(matrix: Tensor) -> Tensor:
    """Return M (M^T M)^(-1/2) of a matrix (d, k), fp32: for full rank, the nearest matrix with orthonormal columns.

    For a lower rank, singular values of 0 stay 0. Iterations such as Newton-Schulz (or Polar Express) converge to the
    same matrix; k is small enough to compute it directly.
    """
    matrix = matrix.double()  # squaring doubles the digits that are needed
    values, vectors = torch.linalg.eigh(matrix.T @ matrix)
    inverse = torch.where(
        values > _NO_RANK * values.amax(), values.clamp_min(torch.finfo(torch.float64).tiny).rsqrt(), 0.0
    )
    inverse_root = (vectors * inverse) @ vectors.T
    nearest: Tensor = matrix @ inverse_root
    return nearest.float().contiguous()


def fault_of(matrix: Tensor) -> str | None:
    """Describe the fault of a basis received as bf16; None if its columns are orthonormal, up to rounding."""
    skew = (matrix.float().T @ matrix.float() - torch.eye(matrix.shape[1], device=matrix.device)).abs().max()
    return None if float(skew) <= _SKEW else "is not a basis: its columns are not orthonormal"


def rank_of(width: int, ratio: float) -> int:
    """Return k for a hidden size d and a ratio d/k: the nearest whole number, at least 1 and at most d."""
    return max(1, min(width, round(width / ratio)))
