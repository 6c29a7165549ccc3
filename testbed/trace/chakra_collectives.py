"""Prepares Chakra's graphs for lanes: expands collectives into messages, and counts data that a trace cannot represent.

A collective becomes the messages that gloo sends for it (gloo.py), without its rendezvous. A reduce-scatter has half of
gloo's messages, because gloo implements it as an all-reduce. Traces state no root; it is the first member. The members
of a process group are stated by the file (PyTorch's process_group:init) or by the caller; the default is all NPUs.

Memory nodes without a duration are ignored and counted; a host's call of a collective is work. Chakra's converter of
PyTorch traces omits some nodes; a collective that only some ranks have is an error.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from testbed.errors import SpecError
from testbed.trace import gloo
from testbed.trace.chakra_file import ChakraFile, ChakraNode, NodeType, Value
from testbed.trace.gloo import AWAIT_RECEIVED, SEND

COLLECTIVES: Final = (
    *("all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all", "reduce_scatter"),
    *("reduce_scatter", "barrier"),
)
"""By Chakra's number; 8 is a reduce-scatter into one block per NPU."""
_ENDS: Final = {SEND: (NodeType.COMM_SEND_NODE, "comm_dst"), AWAIT_RECEIVED: (NodeType.COMM_RECV_NODE, "comm_src")}
SPREAD: Final = 1 << 32
"""Ids are multiplied by it; those of a collective's messages lie before its own."""
_MOST_NODES: Final = 20_000_000
_DROPPED: Final = (
    "Chakra's converter of PyTorch traces drops broadcasts (mlcommons/chakra issue 161) and the peers of messages; "
    "record the job (TESTBED_TORCH) or profile it instead, and use `trace join`"
)

Key = tuple[int, int]
"""NPU, and the node's id, spread."""
Groups = Mapping[str, Sequence[int]]
"""NPUs of each process group, by its name."""


_Group = tuple[str, tuple[int, ...]]
"""Name and members."""


def wrong(key: Key, node: ChakraNode, what: str) -> SpecError:
    """Return the error that names a node."""
    return SpecError(f"node {node.id} of NPU {key[0]} ({node.name!r}) {what}")


def whole(key: Key, node: ChakraNode, name: str, default: int | None = None) -> int:
    """Return an attribute that must be a whole number. SpecError if it is not, or missing without a default."""
    value = node.attributes.get(name, default)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int):
        missing = f"missing ({_DROPPED})" if name in ("comm_src", "comm_dst") else "missing"
        shown = missing if value is None else repr(value)
        raise wrong(key, node, f"cannot be used: its {name} is {shown}, but must be a whole number")
    return value


def expand(files: Sequence[ChakraFile], groups: Groups) -> tuple[dict[Key, ChakraNode], Counter[str]]:
    """Return the nodes of all NPUs, with messages for collectives, and counts of what was ignored.

    `groups` adds to the process groups that the files state. SpecError for nodes that a trace cannot represent, and for
    collectives that some of their NPUs lack.
    """
    nodes: dict[Key, ChakraNode] = {}
    ignored: Counter[str] = Counter()
    done: dict[_Group, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for npu, content in enumerate(files):
        members = {**_stated_groups(content, npu, len(files)), **groups}
        for node in sorted(content.nodes, key=lambda node: node.id):
            key = (npu, node.id * SPREAD + SPREAD - 1)
            node = replace(node, dependencies=[needed * SPREAD + SPREAD - 1 for needed in node.dependencies])
            if node.type > NodeType.COMM_COLL_NODE:
                named = NodeType(node.type).name if node.type in list(NodeType) else f"of type {node.type}"
                raise wrong(key, node, f"is {named}, which a trace cannot represent")
            if node.type in (NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE):
                ignored[NodeType(node.type).name] += not node.duration_us
                node = replace(node, type=NodeType.COMP_NODE if node.duration_us else NodeType.INVALID_NODE)
            elif node.type == NodeType.COMM_COLL_NODE and _is_call(node):
                node = replace(node, type=NodeType.COMP_NODE)
            elif node.type == NodeType.COMM_COLL_NODE:
                group = _group(key, node, members, len(files))
                if not 0 <= (kind := whole(key, node, "comm_type")) < len(COLLECTIVES):
                    raise wrong(key, node, f"is a collective of Chakra's type {kind}; types are 0 to 9")
                done[group][npu].append(COLLECTIVES[kind])
                ignored["collectives of a single NPU"] += len(group[1]) == 1
                after = _put(nodes, key, node, group, done[group][npu])
                node = replace(node, type=NodeType.INVALID_NODE, dependencies=after, attributes={})
            if nodes.setdefault(key, node) is not node:
                raise wrong(key, node, "has the id of another node")
            if len(nodes) > _MOST_NODES:
                raise SpecError(f"the graphs have more than {_MOST_NODES:,} nodes and messages of collectives")
    for (name, among), by_npu in done.items():
        for npu in among:
            if by_npu.get(npu) != by_npu[min(by_npu)]:
                first = min(by_npu)
                counts = f"NPU {first} has {len(by_npu[first])}, NPU {npu} {len(by_npu.get(npu, ()))} or others"
                raise SpecError(f"members of process group {name!r} differ in their collectives: {counts}; {_DROPPED}")
    return nodes, +ignored


def _is_call(node: ChakraNode) -> bool:
    """Return whether a node is the host's call of a collective, whose kernel is another node."""
    return bool(node.attributes.get("is_cpu_op")) and "comm_type" not in node.attributes


def _stated_groups(content: ChakraFile, npu: int, npus: int) -> dict[str, tuple[int, ...]]:
    """Return the process groups in the metadata nodes of PyTorch's execution trace; no ranks are all ranks."""
    groups: dict[str, tuple[int, ...]] = {}
    for node in content.nodes:
        if node.type == NodeType.METADATA_NODE and "process_group:init" in node.name:
            # A Python list that holds JSON, as the converter writes it.
            text = node.inputs[node.inputs.find("[{") : node.inputs.rfind("}]") + 2]
            try:
                for stated in json.loads(text or "[]"):
                    groups[str(stated["pg_name"])] = tuple(map(int, stated["ranks"])) or tuple(range(npus))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise wrong((npu, node.id), node, f"does not describe process groups: {error!r}") from None
    return groups


def _group(key: Key, node: ChakraNode, stated: Groups, npus: int) -> _Group:
    name = str(node.attributes.get("pg_name", ""))
    members = tuple(stated.get(name, range(npus) if name in ("", "0") else ()))
    if key[0] not in members or not 0 <= min(members) <= max(members) < npus or len(set(members)) < len(members):
        known = f"with the NPUs {members}" if members else "whose members no file states"
        how = f"there are {npus} files; NAME.groups.json can state others (docs/traces.md)"
        raise wrong(key, node, f"is of the process group {name!r}, {known}; {how}")
    return name, members


def _put(nodes: dict[Key, ChakraNode], key: Key, node: ChakraNode, group: _Group, done: Sequence[str]) -> list[int]:
    """Add a member's messages for the last collective; return the ids of the nodes that end it at that member."""
    size = whole(key, node, "comm_size", 0 if done[-1] == "barrier" else None)
    operation = {"what": done[-1], "call": "", "backend": "nccl", "bytes": size, "item": 1, "root": 0}
    counts: Counter[tuple[int, int]] = Counter()
    after = node.dependencies
    calls = gloo.calls(operation, group[1].index(key[0]), len(group[1]))
    for at, (kind, peer, size) in enumerate(calls, node.id * SPREAD):
        if kind in _ENDS:
            counts[kind, peer] += 1
            tag = f"{counts[kind, peer]} of {done[-1]} {len(done)} of {group}"
            about: dict[str, Value] = {"comm_size": max(1, size), "comm_tag": tag, _ENDS[kind][1]: group[1][peer]}
            nodes[key[0], at] = ChakraNode(node.id, node.name, _ENDS[kind][0], after, 0, about)
            after = [at] if kind == AWAIT_RECEIVED else after
    return after
