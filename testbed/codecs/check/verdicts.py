"""Results of checks, and bit-exact comparison of values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from testbed.message_key import Direction

Verdict = Literal["PASS", "FAIL", "-"]


class CheckResult(NamedTuple):
    """The result of one check for one direction of a codec."""

    check: str
    direction: Direction
    verdict: Verdict
    """'-': the check does not apply to this codec; the detail has the reason."""
    detail: str


class Broken(Exception):
    """Raised by a check that fails, with expectation and observation."""


class NothingToAsk(Exception):
    """Raised by a check that does not apply, with the reason."""


def require(condition: bool, otherwise: str) -> None:
    """Raise Broken unless the condition holds."""
    if not condition:
        raise Broken(otherwise)


def same(a: Any, b: Any) -> bool:
    """Compare tensors and arrays by type, shape and bytes (so NaN equals itself and 0.0 is not -0.0), containers by
    their contents.
    """
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and _same_tensor(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return bool(a == b)


def _same_tensor(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    # cloned, because a single value may have a stride of 0, and then no bytes
    return tensor.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the names in which two states differ, for error messages."""
    names = sorted(str(key) for key in a.keys() | b.keys() if key not in a or key not in b or not same(a[key], b[key]))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
