"""Frozen records: their base class, their canonical text, and error messages for files that do not match them."""

from __future__ import annotations

import datetime
import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from testbed.errors import SpecError

Record = TypeVar("Record", bound=BaseModel)
Place = tuple[int | str, ...]
"""Path to a value inside nested records."""
_LARGEST_BYTES: Final = 1 << 20
"""Maximum size of a TOML file."""
_DEEPEST: Final = 16
"""Maximum depth of tables and lists in a TOML file."""
_UNESCAPED: Final = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters that JSON does not escape."""


class Frozen(BaseModel):
    """Base of every record: immutable, keyword-only, rejects unknown keys."""

    # Validators are built when they are first used: programs that start by the dozen use few of them.
    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


def is_none(value: object) -> bool:
    """Return whether to omit a field from a record's text, so that a new field does not change existing ids."""
    return value is None


def canonical_json(record: BaseModel) -> str:
    """Return the canonical text of a record: sorted keys, no spaces."""
    return json.dumps(record.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def records_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the record classes that a field of this type may hold, at any depth of unions and lists."""
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
    """Return the location of a pydantic error in terms of the file, and the record classes that contain it.

    For a field with several record classes, pydantic's location also contains the class.
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
    """Format a path inside a nested record: ("changes", 0, "at") -> 'changes[0].at'."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")


def explain(
    error: ValidationError, model: type[BaseModel], where: str, name: Callable[[Place], str] = dotted
) -> SpecError:
    """Convert a pydantic error to one message that names the file, the key, the value, and the nearest known key.

    `name` formats a path of the record as in the file.
    """
    return SpecError(f"{where}: " + "; ".join(_fault(item, model, name) for item in error.errors(include_url=False)))


def validated(model: type[Record], content: object, where: str, name: Callable[[Place], str] = dotted) -> Record:
    """Return content as a record. SpecError as from `explain`."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise explain(error, model, where, name) from None


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
    """Read the tables of a TOML file. SpecError if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_BYTES + 1)
        if len(content) > _LARGEST_BYTES:
            raise SpecError(f"{path} is larger than {_LARGEST_BYTES >> 10} KiB, too large for a file of settings")
        return parse_toml(content.decode("utf8"))
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from None
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. TOMLDecodeError if it is none; SpecError for a value that no setting can have: a date, an infinite
    number or NaN, an integer of more than 64 bits, a text with a NUL character, tables or lists nested more than 16
    deep.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except (ValueError, RecursionError):  # Python's limits: 4,300 digits, and some hundred levels
        raise SpecError("it has an integer of thousands of digits, or is nested hundreds of levels deep") from None
    left: list[tuple[str, object, int]] = [("", tables, 0)]
    while left:
        name, value, depth = left.pop()
        if depth > _DEEPEST:
            raise SpecError(f"{name} is nested more than {_DEEPEST} levels deep")
        match value:
            case dict():
                left += [(key, inner, depth + 1) for key, inner in value.items()]
                left += [(name, key, depth) for key in value]
            case list():
                left += [(name, inner, depth + 1) for inner in value]
            case str() if "\0" in value:
                raise SpecError(f"{name} contains a NUL character: {value[:40]!r}")
            case int() if not -(1 << 63) <= value < 1 << 63:
                raise SpecError(f"{name} is an integer of more than 64 bits")
            case float() if not math.isfinite(value):
                raise SpecError(f"{name} is {value}; state a finite number")
            case datetime.date() | datetime.time():
                raise SpecError(f"{name} is a date or a time: {value}; put it in quotes if it is meant as text")
    return tables


def parse_value(text: str) -> Any:
    """Parse a value typed on the command line: TOML, or else a plain word. SpecError as from `parse_toml`."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def toml_text(text: str) -> str:
    """Write a TOML basic string, with all control characters as escapes."""
    return _UNESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))
