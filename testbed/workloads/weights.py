"""Read only one stage's weights from a checkpoint: .safetensors or torch's .bin files, whole or in shards."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from testbed.errors import SpecError
from testbed.workloads.checkpoints import weight_files

_Read = Callable[[str], Tensor]


def read_weights(folder: Path, wanted: Mapping[str, Sequence[str]]) -> dict[str, Tensor]:
    """Read the tensors of `wanted` as fp32 copies; each may have any of its given names in the files.

    SpecError for missing or unreadable files, and for a tensor that is missing or of integers.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            with _opened(path) as (names, tensor):
                for name, others in wanted.items():
                    for other in [other for other in others if other in names and name not in tensors]:
                        tensors[name] = _full_precision(tensor(other), f"{path}: {other}")
        except (
            OSError,
            ValueError,
            KeyError,
            RuntimeError,
            EOFError,
            SafetensorError,
            pickle.UnpicklingError,
        ) as error:
            raise SpecError(f"cannot load a checkpoint from {path}: {type(error).__name__}: {error}") from None
    if missing := [name for name in wanted if name not in tensors]:
        raise SpecError(f"the checkpoint in {folder} lacks {len(missing)} weights, starting with {missing[0]}")
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Collection[str], _Read]]:
    """Open a file; returns the names of its tensors and a reader of single tensors, which leaves the rest on disk."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt", device="cpu") as file:
            yield set(file.keys()), file.get_tensor
    else:
        # files from torch before 1.6 are not archives and cannot be mapped
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        yield content.keys(), content.__getitem__


def _full_precision(tensor: Tensor, where: str) -> Tensor:
    if not tensor.is_floating_point():
        raise SpecError(f"{where} is of {tensor.dtype}; quantised checkpoints cannot be trained, so use the original")
    return tensor.to(torch.float32, copy=True)
