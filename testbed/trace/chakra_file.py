"""Reads and writes files of Chakra's execution traces (MLCommons): nodes of a graph, in protobuf's wire format.

A file is a sequence of length-prefixed messages: one GlobalMetadata, then the Nodes (mlcommons/chakra,
schema/protobuf/et_def.proto). It may be compressed with gzip. The message types are declared here, because code from
protobuf's compiler would tie this package to one version of the library.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.proto import parse_length_prefixed, serialize_length_prefixed

from testbed.errors import SpecError

SCHEMA: Final = "0.0.4"
"""Schema version written to files."""
Value = int | float | str
_LARGEST_BYTES: Final = 1 << 28
"""Maximum size of a file, decompressed: a gzip file may expand a thousandfold."""
_MOST_NODES: Final = 2_000_000
_MOST_DEPENDENCIES: Final = 10_000_000


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
    """Ids of the nodes it depends on (`data_deps`). `ctrl_deps` names its caller, which need not end before it."""
    duration_us: int = 0
    attributes: dict[str, Value] = field(default_factory=dict)
    """Attributes with a single number or a string; others are omitted."""
    inputs: str = ""
    """Values of its inputs. Not written."""


@dataclass
class ChakraFile:
    """One NPU's graph."""

    nodes: list[ChakraNode]
    attributes: dict[str, Value] = field(default_factory=dict)
    """Attributes of the file."""


_SCALARS: Final = (
    *("double", "float", "int32", "int64", "uint32", "uint64", "sint32", "sint64"),
    *("fixed32", "fixed64", "sfixed32", "sfixed64", "bool", "bytes"),
)
"""The types of an attribute's value, in fields 3, 5, 7 ...; the fields between are lists of the same type."""
# Types required by older readers; newer ones accept any type. All other attributes: 64 bits, or a string.
_WRITTEN_AS: Final = {"comm_src": "int32", "comm_dst": "int32", "comm_tag": "int32", "is_cpu_op": "bool"}


def _messages() -> tuple[type[Message], type[Message]]:
    """Return the types GlobalMetadata and Node, with the fields used here.

    Zeros are written, as in proto2. Strings are declared as bytes, so that invalid UTF-8 can be read too.
    """
    schema = FileDescriptorProto(name="et_def.proto", package="chakra", syntax="proto2")
    fields = {
        "Attribute": {1: "name bytes"} | {3 + 2 * at: f"{kind} {kind}" for at, kind in enumerate(_SCALARS)},
        "Inputs": {1: "values bytes"},
        "Metadata": {1: "version bytes", 2: "attributes Attribute"},
        "Node": {1: "id uint64", 2: "name bytes", 3: "type uint64", 5: "data uint64"}
        | {7: "duration_us uint64", 8: "inputs Inputs", 10: "attributes Attribute"},
    }
    for message, numbered in fields.items():
        made = schema.message_type.add(name=message)
        for number, about in numbered.items():
            name, kind = about.split()
            one = made.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
            if name in ("attributes", "data"):
                one.label = FieldDescriptorProto.LABEL_REPEATED
            if kind in fields:
                one.type, one.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".chakra.{kind}"
            else:
                one.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
                one.options.packed = one.label == FieldDescriptorProto.LABEL_REPEATED
    pool = DescriptorPool()
    pool.Add(schema)
    metadata, node = (pool.FindMessageTypeByName(f"chakra.{name}") for name in ("Metadata", "Node"))
    return GetMessageClass(metadata), GetMessageClass(node)


_Metadata, _Node = _messages()


def write_chakra(path: Path, content: ChakraFile) -> None:
    """Write the file of an NPU. OSError if that fails."""
    with path.open("wb") as file:
        metadata = _Metadata(version=SCHEMA.encode())
        _put_attributes(metadata, content.attributes)
        serialize_length_prefixed(metadata, file)
        for node in content.nodes:
            about = {"type": node.type, "data": node.dependencies, "duration_us": node.duration_us}
            written = _Node(id=node.id, name=node.name.encode(), **about)
            _put_attributes(written, node.attributes)
            serialize_length_prefixed(written, file)


def read_chakra(path: Path) -> ChakraFile:
    """Read the file of an NPU. SpecError if it is not a Chakra trace."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            with gzip.open(file) if packed else file as content:
                raw = content.read(_LARGEST_BYTES + 1)
        return parse_chakra(raw)
    except (EOFError, zlib.error, OSError) as error:
        raise SpecError(f"cannot read the Chakra trace {path}: {error}") from None
    except ValueError as error:
        raise SpecError(f"{path} is not a Chakra trace: {error}") from None


def parse_chakra(raw: bytes) -> ChakraFile:
    """Parse the messages of a file. ValueError, with the fault, if they are invalid."""
    if len(raw) > _LARGEST_BYTES:
        raise ValueError(f"it has more than {_LARGEST_BYTES >> 20} MiB, decompressed")
    stream, dependencies = io.BytesIO(raw), 0
    try:
        if (metadata := parse_length_prefixed(_Metadata, stream)) is None:
            raise ValueError("it is empty")
        content = ChakraFile([], _attributes(metadata))
        while (node := parse_length_prefixed(_Node, stream)) is not None:
            dependencies += len(node.data)
            if len(content.nodes) >= _MOST_NODES or dependencies > _MOST_DEPENDENCIES:
                raise ValueError(f"it has more than {_MOST_NODES:,} nodes or {_MOST_DEPENDENCIES:,} dependencies")
            content.nodes.append(_node(node))
    except (DecodeError, OverflowError) as error:  # OverflowError: a message of 2**63 bytes
        raise ValueError(str(error)) from None
    return content


def _put_attributes(into: Any, attributes: Mapping[str, Value]) -> None:
    for name, value in attributes.items():
        if isinstance(value, str):
            into.attributes.add(name=name.encode(), bytes=value.encode())
            continue
        kind = _WRITTEN_AS.get(name, "int64")
        if kind == "int32" and value >= 1 << 31:
            value -= 1 << 32
        into.attributes.add(name=name.encode(), **{kind: value})


def _node(node: Any) -> ChakraNode:
    name, inputs = _text(node.name), _text(node.inputs.values)
    return ChakraNode(node.id, name, node.type, list(node.data), node.duration_us, _attributes(node), inputs)


def _attributes(message: Any) -> dict[str, Value]:
    """Return the attributes of a message that have a single number or a string."""
    attributes: dict[str, Value] = {}
    for attribute in message.attributes:
        for about, value in attribute.ListFields():
            if about.name != "name":
                attributes[_text(attribute.name)] = _text(value) if isinstance(value, bytes) else value
    return attributes


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
