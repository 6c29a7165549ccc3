"""Read from a checkpoint the weights of one stage, and no others: .safetensors or torch's .bin files, whole or in
shards.
"""

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
    """Read the tensors of `wanted`, fp32, in memory of their own; each may lie in the files under any of the names
    given for it.

    SpecError when there are no such files, one cannot be read, or a tensor is in none of them or of integers.
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
        raise SpecError(f"the checkpoint in {folder} lacks {len(missing)} weights, the first is {missing[0]}")
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Collection[str], _Read]]:
    """Open a file: gives the names of its tensors, and what reads one; the rest of the file stays on disk."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt", device="cpu") as file:
            yield set(file.keys()), file.get_tensor
    else:
        # files of torch before 1.6 are no archives and cannot be mapped
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        yield content.keys(), content.__getitem__


def _full_precision(tensor: Tensor, where: str) -> Tensor:
    if not tensor.is_floating_point():
        raise SpecError(f"{where} is of {tensor.dtype}; quantised checkpoints cannot be trained, use the original")
    return tensor.to(torch.float32, copy=True)
