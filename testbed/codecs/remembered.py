"""What a codec remembers by key: saved, checked when it is loaded, and forgotten, as `contract.Stateful` asks for."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import torch
from pydantic import AfterValidator, InstanceOf, TypeAdapter, ValidationError
from torch import Tensor

from testbed.codecs.wrap import check_keys
from testbed.errors import CodecError
from testbed.message_key import Phase

MicrobatchKey = tuple[Phase, int]
"""Phase and micro-batch: what comes again in the next step."""


def _fp32(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.float32:
        raise ValueError(f"a {tensor.dtype} tensor, not fp32")
    return tensor.clone()


Fp32: TypeAlias = Annotated[InstanceOf[Tensor], AfterValidator(_fp32)]
"""An fp32 tensor in a row, which is copied when it is loaded."""
Key = TypeVar("Key")
Row = TypeVar("Row", bound=tuple[Any, ...])


class Rows(Generic[Key, Row]):
    """A row, which is a NamedTuple, for each key. The two ends share nothing of them unless a subclass says so."""

    def __init__(self, kind: type[dict[Key, Row]]) -> None:
        """`kind` is what `load` holds the rows of a saved state to."""
        self._kind = kind
        self.rows: dict[Key, Row] = {}

    def shared(self) -> Mapping[str, Tensor]:
        """Return nothing."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return copies of the rows, as plain tuples."""
        return {"rows": {key: _copied(row) for key, row in self.rows.items()}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Hold what `state` returned. CodecError for anything else."""
        check_keys(state, {"rows"})
        self.rows = checked_rows(self._kind, state["rows"])

    def reset(self) -> None:
        """Forget everything."""
        self.rows = {}


def checked_rows(kind: type[dict[Key, Row]], rows: object) -> dict[Key, Row]:
    """Return the rows of a saved state as NamedTuples. CodecError where they are of another kind."""
    try:
        return _adapter(kind).validate_python(rows, strict=True)  # type: ignore[no-any-return]
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ", ".join(map(str, fault["loc"]))
        raise CodecError(f"cannot load a state: its rows are not this codec's ({where}): {fault['msg']}") from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _copied(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part.clone() if isinstance(part, Tensor) else part for part in row)
