"""Read one direction of a profile file into the fields of a Pipe. Every error names the key and its value.

This module parses units; the record checks ranges (link_profile.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from testbed import units
from testbed.errors import SpecError, UnknownNameError
from testbed.profiles import keys, rate_trace
from testbed.profiles.keys import BY_JITTER, GILBERT_ELLIOTT, NONE, UNSHAPED, ProfileKey

T = TypeVar("T")

_RATE_AND_MEAN = 0.01
"""Maximum relative difference between a trace's mean and the stated rate."""


def read_pipe(side: str, value: object, folder: Path) -> dict[str, Any] | None:
    """Read the fields of a Pipe, or None where the direction is unshaped.

    Traces are searched in `folder`. SpecError for invalid values.
    """
    if value == UNSHAPED:
        return None
    if not isinstance(value, dict):
        raise SpecError(f"{side} must be a table or '{UNSHAPED}', found {value!r}")
    table = _checked(f"[{side}]", value, keys.PIPE, "; a profile must set every value")
    reorder = table.get("reorder", NONE)
    pipe: dict[str, Any] = {
        **_read_varying(side, {"jitter": NONE, **table}),
        "reorder": 0.0 if reorder == BY_JITTER else _or_none(f"{side}.reorder", reorder, units.parse_fraction, 0.0),
        "jitter_reorders": reorder == BY_JITTER,
        "duplicate": _or_none(f"{side}.duplicate", table.get("duplicate", NONE), units.parse_fraction, 0.0),
        "queue": None if (queue := table.get("queue", NONE)) == NONE else queue,
        "slot": _read_slot(f"{side}.slot", table.get("slot", NONE)),
        "seed": table["seed"],
    }
    pipe["buffer_bytes"] = _read(f"{side}.buffer", table["buffer"], lambda text: _buffer(text, pipe["rate_bps"]))
    pipe["schedule"] = _read_schedule(side, table)
    pipe["trace"] = _read_trace(side, table.get("trace", NONE), folder, pipe["rate_bps"])
    return pipe


def _checked(where: str, table: dict[str, Any], known: tuple[ProfileKey, ...], hint: str = "") -> dict[str, Any]:
    """Return the table after checking that it has all required keys and no unknown ones."""
    for name in table:
        if name not in keys.names(known):
            raise UnknownNameError(f"key of {where}", name, keys.names(known))
    if missing := [key.name for key in known if key.required and key.name not in table]:
        raise SpecError(f"{where} lacks {', '.join(missing)}{hint}")
    return table


def _table(key: str, value: object, known: tuple[ProfileKey, ...]) -> dict[str, Any]:
    if not isinstance(value, dict):
        required = ", ".join(k.name for k in known if k.required)
        raise SpecError(f"{key} must be a table with {required}, or '{NONE}', found {value!r}")
    return _checked(key, value, known)


def _read(key: str, value: object, parse: Callable[[object], T]) -> T:
    try:
        return parse(value)
    except SpecError as error:
        raise SpecError(f"{key}: {error}") from None


def _or_none(key: str, value: object, parse: Callable[[object], T], none: T) -> T:
    return none if value == NONE else _read(key, value, parse)


def _rate(text: object) -> int:
    """Parse a rate that both engines can represent: netem counts in bytes per second, so the relay does too."""
    if (rate := units.parse_rate(text)) % 8:
        below = rate // 8 * 8
        near = " or ".join(units.write_rate(rate) for rate in (below, below + 8) if rate)
        raise SpecError(f"rate {text!r} is not a whole number of bytes per second, the kernel's unit; write {near}")
    return rate


def _buffer(text: object, rate_bps: int) -> int:
    """Parse a buffer into bytes; a time is multiplied by the rate."""
    try:
        return units.parse_size(text)
    except SpecError:
        pass
    try:
        return rate_bps * units.parse_time(text) // 8_000_000_000
    except SpecError:
        raise SpecError(f"buffer {text!r} is neither a time nor a size; write for example '100ms' or '256kB'") from None


def _read_loss(key: str, value: object) -> dict[str, Any] | None:
    """Parse a loss model.

    A table must set all four numbers of Gilbert and Elliott, because tools differ in their defaults.
    """
    if value == NONE:
        return None
    if not isinstance(value, dict):
        share = _read(key, value, units.parse_fraction)
        return {"model": "bernoulli", "probability": share} if share else None
    table = _table(key, value, keys.LOSS)
    if table["model"] != GILBERT_ELLIOTT:
        raise UnknownNameError(f"model of {key}", str(table["model"]), (GILBERT_ELLIOTT,))
    shares = keys.names(keys.LOSS)[1:]
    return {"model": GILBERT_ELLIOTT} | {
        name: _read(f"{key}.{name}", table[name], units.parse_fraction) for name in shares
    }


def _read_slot(key: str, value: object) -> dict[str, Any] | None:
    if value == NONE:
        return None
    table = _table(key, value, keys.SLOT)
    return {
        "wait_ns": _read(f"{key}.wait", table["wait"], units.parse_time),
        "wait_max_ns": _read(f"{key}.wait_max", table["wait_max"], units.parse_time),
        "packets": table["packets"],
        "max_bytes": _or_none(f"{key}.bytes", table["bytes"], units.parse_size, 0),
    }


def _read_schedule(side: str, table: Mapping[str, Any]) -> dict[str, Any] | None:
    asked, repeat = table.get("schedule", NONE), table.get("repeat", NONE)
    if asked == NONE:
        if repeat != NONE:
            raise SpecError(f"{side}.repeat needs {side}.schedule; remove it, or add a schedule")
        return None
    if not isinstance(asked, list) or not asked:
        raise SpecError(
            f"{side}.schedule must be a list of changes such as {{ at = '10s', rate = '40Mbit' }}, found {asked!r}"
        )
    held = _read_varying(side, {"jitter": NONE, **table})
    changes = []
    for number, entry in enumerate(asked):
        key = f"{side}.schedule[{number}]"
        change = _table(key, entry, keys.CHANGE)
        if len(change) == 1:
            raise SpecError(f"{key} changes nothing; set at least one of {', '.join(keys.names(keys.CHANGE)[1:])}")
        held |= _read_varying(key, change)
        changes.append({"at_ns": _read(f"{key}.at", change["at"], units.parse_time), **held})
    repeat_ns = None if repeat == NONE else _read(f"{side}.repeat", repeat, units.parse_time)
    return {"changes": changes, "repeat_ns": repeat_ns}


def _read_varying(key: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the values of a table that a schedule may change."""
    numbers: dict[str, Any] = {}
    if "rate" in table:
        numbers["rate_bps"] = _read(f"{key}.rate", table["rate"], _rate)
    if "delay" in table:
        numbers["delay_ns"] = _read(f"{key}.delay", table["delay"], units.parse_time)
    if "jitter" in table:
        numbers["jitter_ns"] = _or_none(f"{key}.jitter", table["jitter"], units.parse_time, 0)
    if "loss" in table:
        numbers["loss"] = _read_loss(f"{key}.loss", table["loss"])
    return numbers


def _read_trace(side: str, value: object, folder: Path, rate_bps: int) -> dict[str, Any] | None:
    if value == NONE:
        return None
    key = f"{side}.trace"
    table = _table(key, value, keys.TRACE)
    if not isinstance(table["file"], str):
        raise SpecError(f"{key}.file must be the path of a trace, found {table['file']!r}")
    if not isinstance(table["loop"], bool):
        raise SpecError(f"{key}.loop must be true or false, found {table['loop']!r}")
    offset_ns = _read(f"{key}.offset", table["offset"], units.parse_time)
    if offset_ns % 1_000_000:
        raise SpecError(f"{key}.offset: {table['offset']!r} is not a whole number of milliseconds, a trace's unit")
    read = _read(f"{key}.file", table["file"], lambda file: rate_trace.read_trace(folder / str(file)))
    mean = rate_trace.mean_rate_bps(read.times)
    if abs(mean - rate_bps) > _RATE_AND_MEAN * rate_bps:
        raise SpecError(
            f"{side}.rate is {units.format_rate(rate_bps)}, but the trace {table['file']} carries "
            f"{units.format_rate(mean)} on average; set that rate, which applies while the link is certified"
        )
    return {
        "file": table["file"],
        "digest": read.digest,
        "length_ms": read.times[-1],
        "opportunities": len(read.times),
        "loop": table["loop"],
        "offset_ms": offset_ns // 1_000_000,
    }
