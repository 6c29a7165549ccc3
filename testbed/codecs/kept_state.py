"""The state of a node for a checkpoint: a class names in `keeps` the attributes that outlive a step.

A kept attribute is a tensor, a plain value, a torch module or optimiser, a codec, another object that keeps something
or has the methods `state` and `load`, or a list, tuple or dictionary of these. Subclasses add to the names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from testbed.codecs.wire.header import DeviceMessage, DevicePayload
from testbed.codecs.wrap import parts_of, walk
from testbed.errors import SpecError

_PLAIN = (type(None), bool, int, float, str, bytes, bytearray, memoryview, Tensor, DevicePayload, DeviceMessage)


def state_of(it: Any) -> Any:
    """Return the state of something kept, which may share memory with it. SpecError for what declares no state."""
    if isinstance(it, _PLAIN):
        return it
    if isinstance(it, nn.Module | torch.optim.Optimizer):
        return dict(it.state_dict())
    if isinstance(it, Mapping):
        return {key: state_of(each) for key, each in it.items()}
    if isinstance(it, list | tuple):
        return (list if isinstance(it, list) else tuple)(map(state_of, it))
    if silent := [part for part in walk(it) if not (_is_ours(type(part)) or _has_methods(part) or _declares(part))]:
        raise _undeclared(silent[0])
    if _declares(it):
        return {name: state_of(getattr(it, name)) for name in _kept(it)}
    if _has_methods(it):
        return it.state()
    if not hasattr(it, "encode") or hasattr(it, "work"):  # a codec of ours without these has no memory
        raise _undeclared(it)
    return state_of(parts_of(it))


def load_into(it: Any, state: Any) -> Any:
    """Restore what `state_of` returned for an equal object, in place where possible; returns the result. Raises the
    codec's CodecError, or ValueError, KeyError, TypeError or RuntimeError for the state of another object.
    """
    if isinstance(it, Tensor) and isinstance(state, Tensor) and _alike(it, state):
        with torch.no_grad():
            return it.copy_(state)
    if isinstance(it, _PLAIN):
        return state
    if isinstance(it, nn.Module | torch.optim.Optimizer):
        it.load_state_dict(state)
    elif isinstance(it, Mapping):
        return _loaded(it, state, list(it))
    elif isinstance(it, list | tuple):
        return _loaded(it, state, range(len(it)))
    elif _declares(it):
        for name in _kept(it):
            before = getattr(it, name)
            if (after := load_into(before, state[name])) is not before:
                setattr(it, name, after)
    elif _has_methods(it):
        it.load(state)
    else:
        load_into(parts_of(it), state)
    return it


def _loaded(many: Any, state: Any, keys: Sequence[Any]) -> Any:
    """Restore a container: into its objects if it has any, or else with what was saved."""
    if not any(isinstance(many[key], nn.Parameter) or not isinstance(many[key], _PLAIN) for key in keys):
        return state
    if len(state) != len(many):
        raise ValueError(f"a state of {len(state)} parts does not fit {len(many)}")
    parts = [load_into(many[key], state[key]) for key in keys]
    if all(part is many[key] for part, key in zip(parts, keys, strict=True)):
        return many
    return dict(zip(keys, parts, strict=True)) if isinstance(many, Mapping) else type(many)(parts)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Return whether a tensor is to be restored in place. ValueError for a trained parameter of another shape."""
    if isinstance(one, nn.Parameter):
        if one.shape != other.shape:
            raise ValueError(f"a parameter of shape {tuple(other.shape)} does not fit {tuple(one.shape)}")
        return True
    return (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(f"{__package__.partition('.')[0]}.")


def _has_methods(it: object) -> bool:
    return hasattr(it, "state") and hasattr(it, "load")


def _declares(it: object) -> bool:
    """Return whether its class states `keeps`; what a stranger's class inherits from ours leaves out its own state."""
    kinds = [kind for kind in type(it).__mro__ if "keeps" in vars(kind)]
    return bool(kinds) and (_is_ours(type(it)) or not _is_ours(kinds[0]))


def _kept(it: object) -> list[str]:
    return list(dict.fromkeys(name for kind in reversed(type(it).__mro__) for name in vars(kind).get("keeps", ())))


def _undeclared(it: object) -> SpecError:
    return SpecError(
        f"cannot save {type(it).__module__}.{type(it).__qualname__} in a checkpoint: it does not state what outlives a "
        "step. A codec with memory has the methods shared, state, load and reset; other classes state keeps = (...), "
        "names of attributes, and so does a codec without memory: keeps = (). Or remove training.checkpoint_every"
    )


def digest_of(weights: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors in the order of their names: of each one the name, type, shape and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()
