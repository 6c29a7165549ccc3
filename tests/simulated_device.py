"""A device that is none: its tensors say that they are on `THERE`, and the CPU computes them.

An operation on tensors of both devices raises, as on a GPU, and so does numpy; copies to the CPU are counted.

THERE is torch's "meta", the only other device whose autograd works in every build of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from testbed.codecs.wire import header
from testbed.training import kinds

THERE = torch.device("meta")
_CROSS = {"copy_", "_to_copy", "_local_scalar_dense", "index", "index_put_", "_index_put_impl_"}
"""Operations that take tensors of both devices."""
_RESHAPES = {"squeeze_", "unsqueeze_", "t_", "transpose_"}


class _There(Tensor):
    """A tensor on THERE: without memory, and beside it the values."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> _There:
        shape = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=THERE)
        made: _There = Tensor._make_subclass(cls, shape)
        made.value = value
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})


class SimulatedDevice(TorchDispatchMode):
    """While it is active, tensors can be made on THERE."""

    def __init__(self) -> None:
        super().__init__()
        self.copied_values = 0
        """Floating-point values of tensors that were copied to the CPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = _run(func, args, kwargs or {})
        if func.overloadpacket.__name__ == "_to_copy" and _is_there(args[0]) and not _is_there(result):
            self.copied_values += result.numel() if result.is_floating_point() else 0
        return result


def _is_there(value: object) -> bool:
    return isinstance(value, _There)


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute on the CPU; the result is where the arguments are, or where it is asked to be."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    far, name = list(filter(_is_there, tensors)), func.overloadpacket.__name__
    if far and name not in _CROSS and any(value.ndim for value in tensors if not _is_there(value)):
        raise RuntimeError(f"{func} mixes tensors of two devices")
    asked = kwargs.get("device")
    goes_there = bool(far) if asked is None else torch.device(asked).type == THERE.type
    if name in _CROSS - {"_to_copy"}:
        goes_there = _is_there(args[0])
    given = {**kwargs, "device": torch.device("cpu")} if asked is not None else kwargs
    result = func(*tree_map(_values, tuple(args)), **tree_map(_values, dict(given)))
    known = {id(tensor.value): tensor for tensor in far}  # an operation in place returns its own argument

    if far and name in _RESHAPES:
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)  # the shape alone

    def put(value: Any) -> Any:
        return known[id(value)] if id(value) in known else _There(value) if isinstance(value, Tensor) else value

    return tree_map(put, result) if goes_there else result


def _values(value: Any) -> Any:
    return value.value if isinstance(value, _There) else value


@contextlib.contextmanager
def simulated() -> Iterator[SimulatedDevice]:
    """Let recipes train on THERE."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter's data cannot be replaced
    try:
        with mock.patch.object(kinds, "device_of", return_value=THERE), SimulatedDevice() as device:
            header.DEVICES.add(THERE.type)
            yield device
    finally:
        header.DEVICES.discard(THERE.type)
        torch.__future__.set_overwrite_module_params_on_conversion(before)
