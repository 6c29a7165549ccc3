"""Device files: NAME.toml to a Device and back. `./devices/*.toml` come before the shipped ones, which lie beside this module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from testbed import units
from testbed.devices.model import Device, Part, Recorded, Speed
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import Place, dotted, explain, read_toml, toml_text

SHIPPED = Path(__file__).parent


class _Unit(NamedTuple):
    """A key whose number carries a unit, and the record's field for it."""

    field: str
    parse: Callable[[object], int | float]
    write: Callable[[Any], str]


_UNITS = {
    "memory": _Unit("memory_bytes", units.parse_size, units.write_size),
    "bandwidth": _Unit("bandwidth_bytes_per_s", units.parse_bandwidth, units.write_bandwidth),
    "peak": _Unit("peak_flops", units.parse_flops, units.write_flops),
    "utilisation": _Unit("utilisation", units.parse_fraction, units.write_fraction),
    "forward": _Unit("forward_ns", units.parse_time, units.write_time),
    "backward": _Unit("backward_ns", units.parse_time, units.write_time),
    "update": _Unit("update_ns", units.parse_time, units.write_time),
}
_KEY_OF = {unit.field: key for key, unit in _UNITS.items()}
_INNER: dict[str, type[BaseModel]] = {
    **dict.fromkeys(("fp32", "half"), Speed),
    "recorded": Recorded,
    **dict.fromkeys(("embedding", "layer", "head"), Part),
}
"""What lies in a table of that name."""


def device_files() -> dict[str, Path]:
    """Every device by name."""
    folders = (SHIPPED, Path.cwd() / "devices")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def load_device(name: str) -> Device:
    """A device by name, or by the path of its file. UnknownNameError suggests the nearest name; else as `read_device`."""
    if name.endswith(".toml"):
        return read_device(Path(name))
    files = device_files()
    if name not in files:
        raise UnknownNameError("device", name, files)
    return read_device(files[name])


def read_device(path: Path) -> Device:
    """Read one device file. SpecError names the file, the key and what is wrong."""
    where = f"device {path}"
    try:
        content = _fields(read_toml(path), Device, ())
        return Device.model_validate(content | {"name": path.stem})
    except ValidationError as error:
        raise explain(error, Device, where, _file_key) from None
    except (SpecError, UnknownNameError) as error:
        raise SpecError(f"{where}: {error}") from None


def write_device(device: Device) -> str:
    """The inverse of `read_device`, but for the name, which is the file's."""
    return _written(device.model_dump(exclude={"name"}), "").lstrip("\n")


def _fields(table: Mapping[str, Any], record: type[BaseModel], place: Place) -> dict[str, Any]:
    """A file's table under the names of the record's fields, numbers parsed."""
    known = [_KEY_OF.get(field, field) for field in record.model_fields if (field, place) != ("name", ())]
    found: dict[str, Any] = {}
    for key, value in table.items():
        here = (*place, key)
        if key not in known:
            raise UnknownNameError(f"key of {dotted(place)}" if place else "key", key, known)
        if unit := _UNITS.get(key):
            try:
                found[unit.field] = unit.parse(value)
            except SpecError as error:
                raise SpecError(f"{dotted(here)}: {error}") from None
        elif inner := _INNER.get(key):
            found[key] = _inner(value, inner, here)
        else:
            found[key] = value
    return found


def _inner(value: object, record: type[BaseModel], place: Place) -> Any:
    if record is Recorded:
        if not isinstance(value, list):
            raise SpecError(f"{dotted(place)} must be an array of tables; write [[recorded]]")
        return [_table(one, record, (*place, number)) for number, one in enumerate(value)]
    return _table(value, record, place)


def _table(value: object, record: type[BaseModel], place: Place) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{dotted(place)} must be a table, found {value!r}")
    return _fields(value, record, place)


def _file_key(place: Place) -> str:
    return dotted(tuple(_KEY_OF.get(part, part) if isinstance(part, str) else part for part in place))


def _written(content: Mapping[str, Any], head: str) -> str:
    """Values first, then tables: the order that TOML needs."""
    lines, tables = [head] if head else [], []
    for field, value in content.items():
        key = _KEY_OF.get(field, field)
        if value is None:
            continue
        if isinstance(value, dict) and key in ("fp32", "half"):
            tables.append(_written(value, f"\n[{key}]\n"))
        elif isinstance(value, list | tuple):
            tables.extend(_written(one, f"\n[[{key}]]\n") for one in value)
        else:
            lines.append(f"{key} = {_value(key, value)}\n")
    return "".join(lines + tables)


def _value(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_KEY_OF[field]} = {_value(_KEY_OF[field], one)}" for field, one in value.items()) + " }"
        )
    if unit := _UNITS.get(key):
        return toml_text(unit.write(value))
    return toml_text(value) if isinstance(value, str) else str(value)
