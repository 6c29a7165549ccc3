"""Bases and tables that several stages must hold alike: drawn from a key, made orthonormal in fp32, checked when they
cross.

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
"""How far from the identity the product of a basis with itself may be: bf16 rounding leaves less."""
_NO_RANK = 1e-12
"""The square of a singular value that is fp32's rounding, as a share of the largest one's."""


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

    It is the Q of the QR whose R has a positive diagonal, so that a small change of `matrix` changes the basis little.
    """
    q, r = torch.linalg.qr(matrix)
    basis: Tensor = q * r.diagonal().sign()
    return basis.contiguous()


def drawn(purpose: str, width: int, rank: int) -> Tensor:
    """Draw a basis (d, k) of a subspace that is uniformly random: orthonormalised isotropic noise."""
    return orthonormal(normal(purpose, width, rank))


def polar(matrix: Tensor) -> Tensor:
    """Return M (M^T M)^(-1/2) of a matrix (d, k), fp32: for full rank, the nearest matrix with orthonormal columns.

    Where the rank is lower, the singular values that are not there stay 0. Iterations such as Newton and Schulz's (or
    Polar Express) tend to the same; k is small enough to compute it outright.
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
    """Say what is wrong with a basis that crossed as bf16; None where its columns are orthonormal, but for rounding."""
    skew = (matrix.float().T @ matrix.float() - torch.eye(matrix.shape[1])).abs().max()
    return None if float(skew) <= _SKEW else "is no basis: its columns are not orthonormal"


def rank_of(width: int, ratio: float) -> int:
    """Return k for a hidden size d and a ratio d/k: the nearest whole number, at least 1 and at most d."""
    return max(1, min(width, round(width / ratio)))
