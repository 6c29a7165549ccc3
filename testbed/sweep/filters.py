"""Selects the combinations of the axes to run: conditions on fields, from an experiment file or the command line.

A condition is a table: dotted field = value, or a list of allowed values. It holds if it holds for all its fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from testbed.codecs.catalogue import placement
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import flatten
from testbed.sweep.fields import Tables, known_fields, nest, parse_assignment

Condition = dict[str, list[Any]]


def read_condition(table: Mapping[str, Any], where: str) -> Condition:
    """Parse a condition of a file. UnknownNameError for a field that no cell has; SpecError for an empty table."""
    condition = {name: value if isinstance(value, list) else [value] for name, value in flatten(table)}
    for name, values in condition.items():
        if name not in known_fields():
            raise UnknownNameError(f"field of a cell in {where}:", name, known_fields())
        if not values:
            raise SpecError(f"{where}: {name} has no value")
    if not condition:
        raise SpecError(f"{where} names no field; for example codec = 'int8'")
    return condition


def read_flags(texts: Iterable[str], flag: str) -> list[Condition]:
    """Parse one condition per flag."""
    return [read_condition(nest(*parse_assignment(text, flag)), flag) for text in texts]


def any_of(conditions: Iterable[Condition]) -> Condition:
    """Merge conditions into one that holds if, for every field, one of the conditions on it holds."""
    gathered: Condition = {}
    for condition in conditions:
        for name, values in condition.items():
            gathered[name] = gathered.get(name, []) + values
    return gathered


def holds(condition: Condition, fields: Tables) -> bool:
    """Return whether a combination meets a condition."""
    stated = dict(flatten(fields))
    return all(_value(stated, name) in _plain(name, values) for name, values in condition.items())


def _value(stated: Mapping[str, Any], name: str) -> Any:
    default = stated.get("compute") if name == "compute.mode" else known_fields()[name]
    return _plain(name, [stated.get(name, default)])[0]


def _plain(name: str, values: Iterable[Any]) -> list[Any]:
    """Normalise values of a field so that equivalent ones compare equal: two texts may name the same codec."""
    return [
        placement.canonical_text(value) if name == "codec" and isinstance(value, str) else value for value in values
    ]


def check_used(condition: Condition, combinations: Sequence[Tables], flag: str) -> None:
    """Check that each value of a typed condition occurs in some combination: otherwise it is a typo."""
    for name, values in condition.items():
        found = [_value(dict(flatten(fields)), name) for fields in combinations]
        known = list({repr(value): value for value in found}.values())
        for value in _plain(name, values):
            if value not in known:
                shown = UnknownNameError(f"cell with {name} =", str(value), map(str, known))
                raise SpecError(f"{flag} {name}={value}: {shown}")
