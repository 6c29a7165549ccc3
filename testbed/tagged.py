"""A state of tensors and plain values in two files that hold no code: NAME.safetensors, and NAME.json for all else.

JSON has no tuples, bytes, keys that are numbers, or tensors, so each of these is an object with one key, its tag.
Reading returns what was written, to the bit, the type and the device, in memory of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from testbed.errors import ResultsError, SpecError

_PLAIN = (type(None), bool, int, float, str)


def write_tagged(path: Path, value: Any, types: Sequence[type] = ()) -> None:
    """Write a state; returns once both files, PATH.json and PATH.safetensors, are on the disk. `types`: the NamedTuples
    that it may contain. SpecError for a value of another kind, OSError as from the file system.
    """
    text, tensors = take_apart(value, types)
    files = path.with_suffix(".safetensors"), path.with_suffix(".json")
    try:
        save_file(tensors, files[0])
    except SafetensorError as error:
        raise OSError(f"cannot write {files[0]}: {error}") from None
    files[1].write_text(text, encoding="utf8")
    for each in files:
        with each.open("rb") as file:
            os.fsync(file.fileno())


def read_tagged(path: Path, types: Sequence[type] = ()) -> Any:
    """Read a state, written with the same `types`. ResultsError if the files are missing or no state."""
    try:
        tensors = load(path.with_suffix(".safetensors").read_bytes())
        return put_together(path.with_suffix(".json").read_text(encoding="utf8"), tensors, types)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, IndexError, RuntimeError) as error:
        raise ResultsError(f"cannot read the state {path}: {type(error).__name__}: {error}") from None


def take_apart(value: Any, types: Sequence[type] = ()) -> tuple[str, dict[str, Tensor]]:
    """Return a state's JSON and its tensors, by name, which may share the state's memory. SpecError as from
    `write_tagged`.
    """
    tensors: dict[str, Tensor] = {}
    return json.dumps(_tagged(value, tensors, {}, types)), tensors


def put_together(text: str, tensors: Mapping[str, Tensor], types: Sequence[type] = ()) -> Any:
    """Return the state of which `take_apart` made this. ValueError, KeyError, TypeError or IndexError for others."""
    return _untagged(json.loads(text), tensors, {kind.__name__: kind for kind in types})


def _tagged(value: Any, tensors: dict[str, Tensor], known: dict[Any, Any], types: Sequence[type]) -> Any:
    def tagged(each: Any) -> Any:
        return _tagged(each, tensors, known, types)

    match value:
        case None | bool() | int() | float() | str() if type(value) in _PLAIN:
            return value
        case list():
            return list(map(tagged, value))
        case tuple() if type(value) is tuple:
            return {"tuple": list(map(tagged, value))}
        case tuple() if type(value) in types:
            return {"named": [type(value).__name__, *map(tagged, value)]}
        case Mapping():
            return {"dict": [[tagged(key), tagged(each)] for key, each in value.items()]}
        case bytes() | bytearray() | memoryview():
            flat = bytearray(value)
            content = torch.frombuffer(flat, dtype=torch.uint8) if flat else torch.empty(0, dtype=torch.uint8)
            name = str(len(tensors))
            tensors[name] = content
            return {type(value).__name__: name}
        case Tensor():
            strides: tuple[int, ...] = value.stride()
            order = sorted(range(value.ndim), key=lambda axis: (-strides[axis], axis))
            here = value.device.type == "cpu"
            of = (value.data_ptr(), value.dtype, value.shape, strides) if value.numel() and here else len(known)
            if of not in known:
                known[of] = str(len(tensors))
                dense = value.detach().cpu().permute(order).contiguous()
                # Copied only where its memory holds more than it: files take no tensors that share memory.
                memory = dense.untyped_storage()
                whole = memory.nbytes() == dense.nbytes and known.setdefault(memory.data_ptr(), of) == of
                tensors[known[of]] = dense if whole else dense.clone()
            on = {} if here else {"on": str(value.device)}
            return {"tensor": known[of], **({} if order == sorted(order) else {"order": order}), **on}
    raise SpecError(
        f"cannot save a {type(value).__module__}.{type(value).__qualname__}: a state holds tensors, numbers, texts, "
        "bytes, None, and lists, tuples and dictionaries of these"
    )


def _untagged(value: Any, tensors: Mapping[str, Tensor], types: Mapping[str, Any]) -> Any:
    def untagged(each: Any) -> Any:
        return _untagged(each, tensors, types)

    match value:
        case list():
            return list(map(untagged, value))
        case {"tuple": parts}:
            return tuple(map(untagged, parts))
        case {"named": [name, *parts]}:
            return types[name](*map(untagged, parts))
        case {"dict": items}:
            return dict(untagged(items))
        case {"tensor": str(name), **more}:
            # A clone has the alignment of torch's allocations, on which rounding depends.
            axes: list[int] = list(more.get("order", range(tensors[name].ndim)))  # type: ignore[call-overload]
            dense = tensors[name].clone().to(str(more.get("on", "cpu")))
            return dense.permute([axes.index(axis) for axis in range(len(axes))])
        case {"bytes": name}:
            return tensors[name].numpy().tobytes()
        case {"bytearray": name}:
            return bytearray(tensors[name].numpy().tobytes())
        case {"memoryview": name}:
            return memoryview(bytearray(tensors[name].numpy().tobytes()))
    return value
