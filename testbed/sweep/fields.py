"""Nested tables and their dotted names: `training.steps` is `steps` in the table `training`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from testbed.errors import SpecError
from testbed.frozen import parse_value, records_in
from testbed.spec import Cell, Varied

Tables = dict[str, Any]
_MOST_DOTS = 8
"""Maximum number of dots in the name of a typed field; no record is nested so deep."""
_VARIED = [
    f"{name}.{key}"
    for name, field in Varied.model_fields.items()
    for of in records_in(field.annotation)
    for key in of.model_fields
]
_COMPUTE = ("mode", "forward", "backward", "update", "device", "dilation", *_VARIED, "seed")
"""Compute keys of an experiment file; a cell holds the durations resolved from them (`testbed.devices`)."""


def merge(base: Mapping[str, Any], change: Mapping[str, Any], where: str) -> Tables:
    """Return nested tables, updated with the leaves of `change`; both keep theirs, and share them with the result."""
    merged = dict(base)
    for key, value in change.items():
        if isinstance(value, Mapping):
            if not isinstance(inner := merged.get(key, {}), dict):
                raise SpecError(f"{where}: {key} is a value, not a table")
            merged[key] = merge(inner, value, f"{where}.{key}")
        else:
            merged[key] = value
    return merged


def nest(dotted: str, value: Any) -> Tables:
    """Make nested tables from a dotted name: `training.steps`, 20 -> {"training": {"steps": 20}}."""
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return dict(value)


def parse_assignment(text: str, flag: str) -> tuple[str, Any]:
    """Parse `training.steps=20`, typed after `flag`; the value as in `parse_value`."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise SpecError(f"{flag} {text!r} is not of the form field=value, for example {flag} training.steps=20")
    if name.count(".") > _MOST_DOTS:
        raise SpecError(f"{flag} {name[:40]}...: no field has {name.count('.')} dots in its name")
    try:
        return name.strip(), parse_value(value)
    except SpecError as error:
        raise SpecError(f"{flag} {name.strip()}: {error}") from None


def _walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        if field.is_required() and (records := records_in(field.annotation)):
            for record in records:
                yield from _walk(record, f"{prefix}{name}.")
        else:
            yield prefix + name, None if field.is_required() else field.get_default()


@functools.cache
def known_fields() -> dict[str, Any]:
    """Return every field that an experiment may state, by dotted name, with its default."""
    otherwise = "schema_version", "engine", "profiles", "outside", "compute"  # not stated, or in another form
    fields = {name: default for name, default in _walk(Cell) if name.partition(".")[0] not in otherwise}
    return {"profile": None, **fields, **{f"compute.{key}": None for key in _COMPUTE}, "compute.dilation": 1}
