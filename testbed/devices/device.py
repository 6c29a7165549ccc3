"""A device: its data sheet, the utilisation that training reaches, measurements on it; and its file.

`./devices/*.toml` take precedence over the shipped files, which are next to this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from testbed import units
from testbed.errors import SpecError, UnknownNameError
from testbed.frozen import Frozen, Place, dotted, read_toml, toml_text, validated
from testbed.spec import DurationNs

Precision = Literal["fp32", "bf16"]


class MatrixSpeed(Frozen):
    """The speed of dense matrix products in one precision, accumulated in fp32."""

    peak_flops: int = Field(ge=1)
    """Floating point operations per second."""
    format: Literal["fp32", "bf16", "fp16"]
    """The format of the factors: fp16 replaces bf16 on devices without it."""
    derived: str | None = None
    """Derivation of the peak from the source's figures; None: the source states the peak."""
    utilisation: float = Field(gt=0, le=1)
    """Share of the peak that training reaches, in FLOPs that the model needs (`devices.flops`): model FLOPs utilisation
    as in Chowdhery et al., PaLM, 2022, appendix B."""
    utilisation_source: str = Field(min_length=1)

    @property
    def effective_flops(self) -> float:
        """The speed that training reaches, in model FLOPs per second."""
        return self.peak_flops * self.utilisation


class PartTimes(Frozen):
    """Durations of one part of a model."""

    forward_ns: DurationNs
    """Forward pass of one micro-batch."""
    backward_ns: DurationNs
    """Backward pass without recomputation."""
    update_ns: DurationNs
    """The optimiser's update, once per step."""


class RecordedTimes(Frozen):
    """Medians measured by `testbed record`, for one model, precision and shape of a micro-batch."""

    model: str
    sequence_length: int = Field(ge=2, strict=True)
    sequences: int = Field(ge=1, strict=True)
    """Sequences per micro-batch."""
    precision: Precision
    software: str = Field(min_length=1)
    """Software and date of the measurement."""
    embedding: PartTimes
    layer: PartTimes
    """One layer."""
    head: PartTimes
    """The final norm, the output layer and the loss."""

    @property
    def key(self) -> tuple[str, int, int, Precision]:
        """Configuration of the measurement: model, sequence length, sequences and precision."""
        return self.model, self.sequence_length, self.sequences, self.precision


class ComputeDevice(Frozen):
    """A GPU or a processor."""

    name: str
    summary: str = Field(min_length=1)
    """One-line description."""
    source: str = Field(min_length=1)
    """Source of the numbers."""
    memory_bytes: int | None = Field(default=None, ge=1)
    bandwidth_bytes_per_s: int = Field(ge=1)
    """Memory bandwidth, which determines the duration of an update, since updates are memory-bound."""
    fp32: MatrixSpeed | None = None
    """None: unknown."""
    half: MatrixSpeed | None = None
    """The speed in a 16-bit format; None: unsupported or unknown."""
    recorded: tuple[RecordedTimes, ...] = ()

    def speed(self, precision: Precision) -> MatrixSpeed | None:
        """Return the speed in a workload's precision."""
        return self.fp32 if precision == "fp32" else self.half

    def recording(self, model: str, sequence_length: int, sequences: int, precision: Precision) -> RecordedTimes | None:
        """Return the measurement for exactly this configuration, or None."""
        asked = (model, sequence_length, sequences, precision)
        return next((recorded for recorded in self.recorded if recorded.key == asked), None)


SHIPPED = Path(__file__).parent


class _UnitKey(NamedTuple):
    """A key whose value has a unit, and its field of the record."""

    field: str
    parse: Callable[[object], int | float]
    write: Callable[[Any], str]


_UNITS = {
    "memory": _UnitKey("memory_bytes", units.parse_size, units.write_size),
    "bandwidth": _UnitKey("bandwidth_bytes_per_s", units.parse_bandwidth, units.write_bandwidth),
    "peak": _UnitKey("peak_flops", units.parse_flops, units.write_flops),
    "utilisation": _UnitKey("utilisation", units.parse_fraction, units.write_fraction),
    "forward": _UnitKey("forward_ns", units.parse_time, units.write_time),
    "backward": _UnitKey("backward_ns", units.parse_time, units.write_time),
    "update": _UnitKey("update_ns", units.parse_time, units.write_time),
}
_KEY_OF = {unit.field: key for key, unit in _UNITS.items()}
_INNER: dict[str, type[BaseModel]] = {"fp32": MatrixSpeed, "half": MatrixSpeed}
_INNER |= dict.fromkeys(("embedding", "layer", "head"), PartTimes)
"""Name of a table -> the record that it holds."""


def device_files() -> dict[str, Path]:
    """Return the files of all devices by name."""
    folders = (SHIPPED, Path.cwd() / "devices")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def load_device(name: str) -> ComputeDevice:
    """Load a device by name, or by the path of its file.

    UnknownNameError suggests the nearest name; other errors as for `read_device`.
    """
    if name.endswith(".toml"):
        return read_device(Path(name))
    files = device_files()
    if name not in files:
        raise UnknownNameError("device", name, files)
    return read_device(files[name])


def read_device(path: Path) -> ComputeDevice:
    """Read one device file. SpecError names the file, the key and the fault."""
    where = f"device {path}"
    try:
        content = _fields(read_toml(path), ComputeDevice, ())
    except (SpecError, UnknownNameError) as error:
        raise SpecError(f"{where}: {error}") from None
    return validated(ComputeDevice, content | {"name": path.stem}, where, _file_key)


def write_device(device: ComputeDevice) -> str:
    """Return text that `read_device` reads back, except for the name, which is the file's."""
    return _written(device.model_dump(exclude={"name"}), "").lstrip("\n")


def _fields(table: Mapping[str, Any], record: type[BaseModel], place: Place) -> dict[str, Any]:
    """Return a file's table with the record's field names and parsed numbers."""
    known = [_KEY_OF.get(field, field) for field in record.model_fields if (field, place) != ("name", ())]
    fields: dict[str, Any] = {}
    for key, value in table.items():
        here = (*place, key)
        if key not in known:
            raise UnknownNameError(f"key of {dotted(place)}" if place else "key", key, known)
        if unit := _UNITS.get(key):
            try:
                fields[unit.field] = unit.parse(value)
            except SpecError as error:
                raise SpecError(f"{dotted(here)}: {error}") from None
        elif key == "recorded":
            if not isinstance(value, list):
                raise SpecError(f"{key} must be an array of tables; write [[recorded]]")
            fields[key] = [_table(entry, RecordedTimes, (key, number)) for number, entry in enumerate(value)]
        elif inner := _INNER.get(key):
            fields[key] = _table(value, inner, here)
        else:
            fields[key] = value
    return fields


def _table(value: object, record: type[BaseModel], place: Place) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{dotted(place)} must be a table, found {value!r}")
    return _fields(value, record, place)


def _file_key(place: Place) -> str:
    return dotted(tuple(_KEY_OF.get(part, part) if isinstance(part, str) else part for part in place))


def _written(content: Mapping[str, Any], head: str) -> str:
    """Write values first, then tables, as TOML requires."""
    lines, tables = [head] if head else [], []
    for field, value in content.items():
        key = _KEY_OF.get(field, field)
        if value is None:
            continue
        if isinstance(value, dict) and key in ("fp32", "half"):
            tables.append(_written(value, f"\n[{key}]\n"))
        elif isinstance(value, list | tuple):
            tables.extend(_written(entry, f"\n[[{key}]]\n") for entry in value)
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
