"""Keyed state of a codec: saving, checking on load, and resetting, for `contract.Stateful`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, TypeAlias, TypeVar

import torch
from pydantic import AfterValidator, InstanceOf, TypeAdapter, ValidationError
from torch import Tensor

from testbed.codecs.wrap import check_keys
from testbed.errors import CodecError
from testbed.message_key import Phase

MicrobatchKey = tuple[Phase, int]
"""Phase and micro-batch, which recur in every step."""


def _fp32(tensor: Tensor) -> Tensor:
    if tensor.dtype != torch.float32:
        raise ValueError(f"a {tensor.dtype} tensor, not fp32")
    return tensor.clone()


Fp32: TypeAlias = Annotated[InstanceOf[Tensor], AfterValidator(_fp32)]
"""An fp32 tensor in a row; loading copies it."""
Key = TypeVar("Key", bound=tuple[Any, Any])
Row = TypeVar("Row", bound=tuple[Any, ...])


class Rows(Generic[Key, Row]):
    """A row (a NamedTuple) for each key (a pair). The ends share no rows unless a subclass overrides `shared`."""

    name: ClassVar[str] = ""
    """The rows' name in a saved state; if empty, the state consists of the rows alone."""

    def __init__(self, kind: type[dict[Key, Row]]) -> None:
        """`load` validates the rows of a saved state against `kind`."""
        self._kind = kind
        self.rows: dict[Key, Row] = {}

    def shared(self) -> Mapping[str, Tensor]:
        """Return nothing."""
        return {}

    def state(self) -> Any:
        """Return copies of the rows, as plain tuples that begin with the key."""
        rows = [(*key, *_copied(row)) for key, row in self.rows.items()]
        return {self.name: rows} if self.name else rows

    def load(self, state: Any) -> None:
        """Load what `state` returned. CodecError for anything else."""
        if self.name:
            check_keys(state, {self.name})
        self.rows = checked_rows(self._kind, state[self.name] if self.name else state)

    def reset(self) -> None:
        """Discard all rows."""
        self.rows = {}


def checked_rows(kind: type[dict[Key, Row]], rows: Any) -> dict[Key, Row]:
    """Return the rows of a saved state as NamedTuples, by key. CodecError if they are not of this `kind`."""
    try:
        by_key = {row[:2]: row[2:] for row in rows}
        return _adapter(kind).validate_python(by_key, strict=True)  # type: ignore[no-any-return]
    except TypeError:
        raise CodecError(f"cannot load a state: no rows in {type(rows).__name__}") from None
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ", ".join(map(str, fault["loc"]))
        raise CodecError(f"cannot load a state: its rows are not this codec's ({where}): {fault['msg']}") from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _copied(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(part.clone() if isinstance(part, Tensor) else part for part in row)
