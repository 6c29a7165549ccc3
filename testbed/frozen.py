"""Frozen records: their base, their canonical text, and the message about a file that does not fit one."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from testbed.errors import SpecError

Place = tuple[int | str, ...]
"""The way to a value inside nested records."""


class Frozen(BaseModel):
    """Base of every record: immutable, keyword-only, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def canonical_json(record: BaseModel) -> str:
    """Return the canonical text of a record: sorted keys, no spaces."""
    return json.dumps(record.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def records_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the kinds of records that a field of this type may hold, at any depth of unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [record for part in get_args(annotation) for record in records_in(part)]


def flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested tables, each with its dotted name."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _located(model: type[BaseModel], location: Place) -> tuple[Place, list[type[BaseModel]]]:
    """Return where pydantic found a fault, as a file calls it, and the kinds of records that hold it.

    Pydantic names the kind of a record too, where a field may hold one of several.
    """
    place: list[int | str] = []
    holders, inside = [model], [model]
    for part in location:
        if len(inside) > 1 and (chosen := [record for record in inside if record.__name__ == part]):
            inside = chosen
            continue
        place.append(part)
        if isinstance(part, str):
            holders = inside
            fields = [record.model_fields[part] for record in holders if part in record.model_fields]
            inside = [record for field in fields for record in records_in(field.annotation)]
    return tuple(place), holders


def dotted(place: Place) -> str:
    """Write a place inside a nested record: ("changes", 0, "at") -> 'changes[0].at'."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def explain(
    error: ValidationError, model: type[BaseModel], where: str, name: Callable[[Place], str] = dotted
) -> SpecError:
    """Turn a pydantic error into one message that names the file, the key, the value, and the nearest known key.

    `name` says how the file calls a place of the record.
    """
    return SpecError(f"{where}: " + "; ".join(_fault(item, model, name) for item in error.errors(include_url=False)))


def _fault(item: ErrorDetails, model: type[BaseModel], name: Callable[[Place], str]) -> str:
    place, holders = _located(model, item["loc"])
    key, says = name(place), item["msg"].removeprefix("Value error, ")
    match item["type"]:
        case "extra_forbidden":
            known = list(dict.fromkeys(field for record in holders for field in record.model_fields))
            near = difflib.get_close_matches(str(place[-1]), known, n=1, cutoff=0.5)
            hint = f" (did you mean {name((*place[:-1], near[0]))!r}?)" if near else ""
            return f"there is no key {key!r}{hint}; known here: {', '.join(known)}"
        case "missing" | "value_error" | "two_workloads":  # our own messages name the value
            return f"{key}: {says}" if key else says
        case _:
            return f"{key or 'file'}: {says}, found {item['input']!r}"


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file. SpecError when it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf8"))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from None


def toml_text(text: str) -> str:
    """Write a TOML basic string: JSON's escapes, and the one control character that JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
