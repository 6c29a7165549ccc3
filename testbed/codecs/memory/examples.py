"""State of a per-example codec, at both ends: each example's last decoded tensor, in memory up to a limit, then in a
file.

The file has no name, so the system removes it when the process ends, even if it is killed. TMPDIR selects its folder.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from testbed.codecs.memory.history import Memory
from testbed.codecs.remembered import checked_rows
from testbed.codecs.wire.header import Shape
from testbed.codecs.wrap import check_keys
from testbed.errors import CodecError
from testbed.message_key import Phase

ExampleKey = tuple[Phase, tuple[int, ...]]
"""Phase, and the ids of the tensor's sequences."""

_FP32_BYTES = 4


class _Held(NamedTuple):
    visit: int
    shape: Shape
    value: Tensor | None
    """None: in the file."""
    offset: int


class Examples:
    """A store of fp32 tensors by key. A method that raises leaves all stored tensors as they were."""

    def __init__(self, memory_bytes: float) -> None:
        """Up to `memory_bytes` are kept in memory, the rest in the file."""
        self._limit_bytes = memory_bytes
        self._held: dict[ExampleKey, _Held] = {}
        self._memory_bytes = 0
        self._file: IO[bytes] | None = None
        self._file_bytes = 0

    def visit(self, key: ExampleKey) -> int | None:
        """Return the visit number of the last message; None for an example not seen yet."""
        held = self._held.get(key)
        return None if held is None else held.visit

    def shape(self, key: ExampleKey) -> Shape | None:
        """Return the shape of the stored tensor; None for an example not seen yet."""
        held = self._held.get(key)
        return None if held is None else held.shape

    def gather(self, keys: list[ExampleKey], shape: Shape) -> Tensor:
        """Return the tensors of the keys, all of this shape, as a new tensor (keys, *shape)."""
        out = torch.empty((len(keys), *shape), dtype=torch.float32)
        for target, key in zip(out, keys, strict=True):
            held = self._held[key]
            if held.value is not None:
                target.copy_(held.value)
            elif target.numel():
                self._read(target, held.offset)
        return out

    def put(self, keys: list[ExampleKey], visits: list[int], values: Tensor) -> None:
        """Store copies of `values` (keys, *shape). CodecError if the file cannot grow, before anything is changed."""
        shape = tuple(values.shape[1:])
        size = _FP32_BYTES * math.prod(shape)
        memory_bytes, file_bytes = self._memory_bytes, self._file_bytes
        places: dict[ExampleKey, int | None] = {}
        for key in dict.fromkeys(keys):
            held = self._held.get(key)
            if held is not None and held.shape == shape:
                places[key] = held.offset if held.value is None else None
                continue
            if held is not None and held.value is not None:
                memory_bytes -= _FP32_BYTES * held.value.numel()
            if memory_bytes + size <= self._limit_bytes:
                memory_bytes, places[key] = memory_bytes + size, None
            else:
                file_bytes, places[key] = file_bytes + size, file_bytes
        if file_bytes > self._file_bytes:
            self._grow(file_bytes)
        self._memory_bytes = memory_bytes
        for key, visit, value in zip(keys, visits, values, strict=True):
            place = places[key]
            if place is not None:
                self._write(value, place)
                self._held[key] = _Held(visit, shape, None, place)
                continue
            held = self._held.get(key)
            if held is not None and held.value is not None and held.shape == shape:
                kept = held.value.copy_(value)
            else:
                kept = value.clone()
            self._held[key] = _Held(visit, shape, kept, 0)

    def shared(self) -> dict[str, Tensor]:
        """Return the tensors, from memory and file, and the visit numbers as tensors."""
        tensors: dict[str, Tensor] = {}
        for key, held in self._held.items():
            name = f"{key[0]}/{','.join(map(str, key[1]))}"
            tensors[name] = self.gather([key], held.shape)[0] if held.value is None else held.value
            tensors[f"{name}/visit"] = torch.tensor(held.visit)
        return tensors

    def state(self) -> dict[str, Any]:
        """Return all tensors and visit numbers, which may be large."""
        return {"examples": [(*key, held.visit, self.gather([key], held.shape)[0]) for key, held in self._held.items()]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned. CodecError for anything else."""
        check_keys(state, {"examples"})
        loaded = Examples(self._limit_bytes)
        for key, (visit, value) in checked_rows(dict[ExampleKey, Memory], state["examples"]).items():
            loaded.put([key], [visit], value.unsqueeze(0))
        self.reset()
        self.__dict__.update(loaded.__dict__)

    def reset(self) -> None:
        """Discard all examples, and close the file."""
        if self._file is not None:
            self._file.close()
        self._held.clear()
        self._file, self._memory_bytes, self._file_bytes = None, 0, 0

    def _grow(self, size: int) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="testbed-examples-", buffering=0)  # noqa: SIM115
            # Reserve the space now, so that a full disk is detected before anything is written.
            os.posix_fallocate(self._file.fileno(), self._file_bytes, size - self._file_bytes)
        except OSError as error:
            raise CodecError(
                f"cannot hold {size} bytes of examples in a file in {tempfile.gettempdir()}: {error.strerror}; set "
                "TMPDIR to a disk with more space, or raise the codec's memory_mb"
            ) from error
        self._file_bytes = size

    def _read(self, out: Tensor, offset: int) -> None:
        self._move(os.preadv, out.view(-1).view(torch.uint8).numpy(), offset)

    def _write(self, value: Tensor, offset: int) -> None:
        self._move(os.pwritev, value.contiguous().view(-1).view(torch.uint8).numpy(), offset)

    def _move(self, call: Any, array: np.ndarray[Any, Any], offset: int) -> None:
        """Transfer the whole array to or from the file: one call may stop early."""
        assert self._file is not None
        done = 0
        while done < array.nbytes:
            try:
                count = call(self._file.fileno(), [array.data[done:]], offset + done)
            except OSError as error:
                raise CodecError(f"cannot access the file of examples: {error.strerror}") from error
            if count == 0:
                raise CodecError(f"the file of examples ends before byte {offset + done}")
            done += count
