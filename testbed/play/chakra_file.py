"""The files of Chakra's execution traces (MLCommons): nodes of a graph, in protobuf's wire format.

A file is a row of messages, each after its length: one GlobalMetadata, then a Node each (mlcommons/chakra,
schema/protobuf/et_def.proto). It may be compressed with gzip. Three message types of six fields need no protobuf
library, whose generated code would tie this package to one version of it; a test compares with the library.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Final

from testbed.errors import SpecError

SCHEMA: Final = "0.0.4"
"""The version that files state."""
Value = int | float | str


class NodeType(IntEnum):
    """Chakra's types of nodes."""

    INVALID_NODE = 0
    METADATA_NODE = 1
    MEM_LOAD_NODE = 2
    MEM_STORE_NODE = 3
    COMP_NODE = 4
    COMM_SEND_NODE = 5
    COMM_RECV_NODE = 6
    COMM_COLL_NODE = 7
    STORAGE_NODE = 8
    BATCH_NODE = 9
    CHECKPOINT_NODE = 10


@dataclass
class ChakraNode:
    """One node of an NPU's graph."""

    id: int
    name: str
    type: int
    dependencies: list[int] = field(default_factory=list)
    """Ids of nodes that come before: of data and of control."""
    duration_us: int = 0
    attributes: dict[str, Value] = field(default_factory=dict)
    """Those with a single number or a string; others are left out."""


@dataclass
class ChakraFile:
    """One NPU's graph."""

    nodes: list[ChakraNode]
    attributes: dict[str, Value] = field(default_factory=dict)
    """Of the file."""


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_INT32, _INT64, _BOOL, _STRING = 7, 9, 27, 29
# What older readers take these attributes from; newer ones take any type. All others: 64 bits, or a string.
_WRITTEN_AS: Final = {"comm_src": _INT32, "comm_dst": _INT32, "comm_tag": _INT32, "is_cpu_op": _BOOL}
_STRUCTS: Final = {3: "<d", 5: "<f", 19: "<I", 21: "<Q", 23: "<i", 25: "<q"}


def write_chakra(path: Path, content: ChakraFile) -> None:
    """Write an NPU's file. OSError where that fails."""
    metadata = _field(1, SCHEMA.encode()) + b"".join(
        _field(2, _attribute(*item)) for item in content.attributes.items()
    )
    path.write_bytes(b"".join(_varint(len(message)) + message for message in (metadata, *map(_node, content.nodes))))


def read_chakra(path: Path) -> ChakraFile:
    """Read an NPU's file. SpecError for anything that is not one."""
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        return parse_chakra(raw)
    except (EOFError, zlib.error, OSError) as error:
        raise SpecError(f"cannot read the Chakra trace {path}: {error}") from None
    except ValueError as error:
        raise SpecError(f"{path} is not a Chakra trace: {error}") from None


def parse_chakra(raw: bytes) -> ChakraFile:
    """Read the messages of a file. ValueError says what is wrong with them."""
    content, at = ChakraFile([]), 0
    for number in range(len(raw)):
        if at == len(raw):
            break
        length, at = _read_varint(raw, at)
        if at + length > len(raw):
            raise ValueError(f"message {number} has {length} bytes and the file {len(raw) - at} more")
        message, at = raw[at : at + length], at + length
        if number == 0:
            content.attributes = _attributes(value for key, value in _fields(message) if key == 2)
        else:
            content.nodes.append(_read_node(message))
    if at == 0:
        raise ValueError("it is empty")
    return content


def _varint(value: int) -> bytes:
    value &= 0xFFFF_FFFF_FFFF_FFFF  # negative numbers as two's complement
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _attribute(name: str, value: Value) -> bytes:
    if isinstance(value, float):
        raise TypeError(f"{name}: numbers are whole here")
    kind = _STRING if isinstance(value, str) else _WRITTEN_AS.get(name, _INT64)
    if kind == _INT32 and not isinstance(value, str) and value >= 1 << 31:
        value -= 1 << 32
    return _field(1, name.encode()) + _field(kind, value.encode() if isinstance(value, str) else int(value))


def _node(node: ChakraNode) -> bytes:
    return b"".join(
        (
            _field(1, node.id),
            _field(2, node.name.encode()),
            _field(3, node.type),
            _field(5, b"".join(map(_varint, node.dependencies))) if node.dependencies else b"",
            _field(7, node.duration_us),
            *(_field(10, _attribute(*item)) for item in node.attributes.items()),
        )
    )


def _read_varint(raw: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            raise ValueError("it ends inside a number")
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise ValueError("a number has more than ten bytes")


def _fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and value of each field; fixed numbers stay bytes."""
    at = 0
    while at < len(raw):
        key, at = _read_varint(raw, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _read_varint(raw, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            length, at = _read_varint(raw, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"a field has the wire type {wire}")
        if at + length > len(raw):
            raise ValueError(f"a field has {length} bytes and its message {len(raw) - at} more")
        yield key >> 3, raw[at : at + length]
        at += length


def _read_node(raw: bytes) -> ChakraNode:
    node, attributes = ChakraNode(0, "", 0), []
    for key, value in _fields(raw):
        if key in (4, 5):
            node.dependencies += [value] if isinstance(value, int) else _packed(value)
        elif isinstance(value, bytes):
            if key == 2:
                node.name = value.decode("utf-8", "replace")
            elif key == 10:
                attributes.append(value)
        elif key == 1:
            node.id = value
        elif key == 3:
            node.type = value
        elif key == 7:
            node.duration_us = value
    node.attributes = _attributes(attributes)
    return node


def _packed(raw: bytes) -> list[int]:
    values, at = [], 0
    while at < len(raw):
        value, at = _read_varint(raw, at)
        values.append(value)
    return values


def _attributes(messages: Iterable[int | bytes]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for message in messages:
        if isinstance(message, int):
            raise ValueError("an attribute is a number")
        name, value = "", None
        for key, raw in _fields(message):
            if key == 1 and isinstance(raw, bytes):
                name = raw.decode("utf-8", "replace")
            elif key > 2:
                value = _value(key, raw)
        if value is not None:
            found[name] = value
    return found


def _value(kind: int, raw: int | bytes) -> Value | None:
    """Return an attribute's value by the number of its field; None for lists and bytes."""
    if isinstance(raw, bytes):
        if kind == _STRING:
            return raw.decode("utf-8", "replace")
        form = _STRUCTS.get(kind)
        if form is None or struct.calcsize(form) != len(raw):
            return None
        value: Value = struct.unpack(form, raw)[0]
        return value
    if kind in (_INT32, _INT64):
        return raw - (1 << 64) if raw >> 63 else raw
    if kind in (15, 17):  # zigzag
        return raw >> 1 ^ -(raw & 1)
    return raw if kind in (11, 13, _BOOL) else None


def whole(attributes: Mapping[str, Value], name: str, default: int | None = None) -> int:
    """Return an attribute that is a whole number. ValueError where it is none, or is missing without a default."""
    value = attributes.get(name, default)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int):
        raise ValueError(f"its {name} is {'missing' if value is None else repr(value)}, and should be a whole number")
    return value
