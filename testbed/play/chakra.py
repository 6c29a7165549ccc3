"""Traces to Chakra's execution traces (MLCommons), which ASTRA-sim and others read, and back.

Chakra has a graph for each NPU: COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE and what each depends on; a trace has lanes.

To Chakra, one to one: an operation depends on the one before it in its lane (not on a send, which a lane does not wait
for), and on what came before the signals that its waits need. Chakra knows no events between NPUs, so each such
dependency becomes a message of one byte, marked `testbed_event`. `testbed_lane`, `testbed_step` and `testbed_ns` keep
what Chakra has no place for; others pass over them.

From Chakra: nodes go into lanes in an order that keeps all dependencies (the smallest id first): one lane for compute
(cpu and accelerator apart, as ASTRA-sim has it), one to each peer and one from each peer, whose messages arrive in the
order in which they were sent. Dependencies between lanes become a signal and a wait. A graph that came from a trace
gets its lanes back. Collectives of all NPUs become rings (rings.py).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from testbed.errors import SpecError
from testbed.play.chakra_file import ChakraFile, ChakraNode, NodeType, Value, read_chakra, write_chakra
from testbed.play.check import check_trace
from testbed.play.rings import ring_rounds
from testbed.play.trace import KINDS, RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.play.unlinked import in_order

_TYPES: Final = {WORK: NodeType.COMP_NODE, SEND: NodeType.COMM_SEND_NODE, RECEIVE: NodeType.COMM_RECV_NODE}
_COLLECTIVES: Final = {0: "all_reduce", 2: "all_gather", 7: "reduce_scatter"}
"""Chakra's numbers of those that rings.py knows; it does not say who broadcasts."""
_TAGS: Final = 1 << 32

_USED: Final = {NodeType.INVALID_NODE, NodeType.METADATA_NODE, *_TYPES.values(), NodeType.COMM_COLL_NODE}
_MEMORY: Final = {NodeType.MEM_LOAD_NODE, NodeType.MEM_STORE_NODE}
"""Work, where they state how long they take."""
_LANE: Final = "testbed_lane"
_MOST_STEPS: Final = 1_000_000
_MOST_LABELS: Final = 256
"""More names of nodes than that, and they are left out."""

Needs = dict[int, int]
"""What must be done before: by lane, the position of its last operation. A lane's earlier ones are done too then."""


def _merge(into: Needs, more: Mapping[int, int]) -> None:
    for lane, position in more.items():
        into[lane] = max(into.get(lane, -1), position)


# ------------------------------------------------------------------ to Chakra
@dataclass
class _Writing:
    """How far a lane has become nodes."""

    open: Needs = field(default_factory=dict)
    """What its next operation depends on."""
    known: Needs = field(default_factory=dict)
    """What its operations so far depend on, directly or not."""
    ids: list[int] = field(default_factory=list)
    """Of its nodes."""


def to_chakra(trace: Trace) -> list[ChakraFile]:
    """Make the graphs of a trace that was checked, one per node.

    SpecError where its lanes wait for each other for ever, or tags run out.
    """
    files = [ChakraFile([], {"testbed_node": name, "testbed_steps": trace.steps}) for name in trace.nodes]
    lanes = [_Writing() for _ in trace.lanes]
    events: dict[int, list[Needs]] = defaultdict(lambda: [{}])  # by how often each was counted up
    carried: dict[tuple[int, int, int], int] = {}  # (lane, position, receiving node): the node that receives its event
    steps = [0] * len(lanes)
    sizes: dict[tuple[int, int, int], int] = {}  # by sender, receiver and tag: a message is received after it was sent
    tag = 1 + max((tag for lane in trace.lanes for tag in lane.tag), default=0)

    def put(number: int, name: str, kind: int, dependencies: Iterable[int], **attributes: int | str) -> int:
        nodes = files[number].nodes
        nodes.append(ChakraNode(len(nodes), name, _TYPES[kind], sorted(set(dependencies)), 0, {**attributes}))
        return nodes[-1].id

    def node_of(lane: int, position: int, npu: int) -> int:
        """Return the node of an operation; where another NPU did it, the one that receives word of it."""
        nonlocal tag
        sender = trace.lanes[lane].node
        if sender == npu:
            return lanes[lane].ids[position]
        if (lane, position, npu) not in carried:
            if tag >= _TAGS:
                raise SpecError("the trace has no tags left for the events between its nodes")
            about = {"comm_size": 1, "comm_src": sender, "comm_dst": npu, "comm_tag": tag, "testbed_event": 1}
            put(sender, "event", SEND, [lanes[lane].ids[position]], is_cpu_op=0, **about)
            carried[lane, position, npu] = put(npu, "event", RECEIVE, [], is_cpu_op=0, **about)
            tag += 1
        return carried[lane, position, npu]

    for number, at in in_order(trace):
        lane, writing = trace.lanes[number], lanes[number]
        kind = lane.kind[at]
        while lane.starts[steps[number] + 1] <= at:
            steps[number] += 1
        if kind == SIGNAL:
            counted = dict(events[lane.tag[at]][-1])
            _merge(counted, writing.open)
            events[lane.tag[at]].append(counted)
        elif kind == WAIT:
            needed = events[lane.tag[at]][lane.value[at]]
            _merge(writing.open, {m: p for m, p in needed.items() if p > writing.known.get(m, -1)})
        else:
            about: dict[str, int | str] = {"is_cpu_op": 0, "testbed_lane": number, "testbed_step": steps[number]}
            about["testbed_lane_name"] = lane.name
            if kind == WORK:
                about["testbed_ns"] = lane.value[at]
            else:
                ends = (lane.node, lane.peer[at]) if kind == SEND else (lane.peer[at], lane.node)
                about |= {"comm_src": ends[0], "comm_dst": ends[1], "comm_tag": lane.tag[at]}
                if kind == SEND:
                    sizes[*ends, lane.tag[at]] = lane.value[at]
                elif lane.value[at]:
                    about["testbed_ns"] = lane.value[at]
                about["comm_size"] = sizes[*ends, lane.tag[at]]
            needs = [node_of(m, p, lane.node) for m, p in writing.open.items()]
            name = trace.labels[lane.label[at]]
            writing.ids.append(put(lane.node, name, kind, needs, **about))
            if kind == WORK:
                files[lane.node].nodes[-1].duration_us = round(lane.value[at] / 1000)
            if kind != SEND:
                _merge(writing.known, writing.open)
                writing.open = {number: len(writing.ids) - 1}
                writing.known[number] = len(writing.ids) - 1
    return files


# ------------------------------------------------------------------ from Chakra
class _Operation(NamedTuple):
    step: int
    kind: int
    name: str
    peer: int
    tag: int
    value: int
    waits: tuple[tuple[int, int], ...]
    """(lane, position) of what it waits for."""


@dataclass
class _Reading:
    """A lane that nodes go into."""

    node: int
    name: str
    operations: list[_Operation] = field(default_factory=list)
    known: Needs = field(default_factory=dict)

    def put(self, number: int, needs: Needs, operation: _Operation) -> int:
        """Put an operation at the end, after waits for what is not known to be done; return its position."""
        waits = [(m, p) for m, p in needs.items() if m != number and p > self.known.get(m, -1)]
        _merge(self.known, needs)
        self.operations.append(operation._replace(waits=tuple(waits)))
        return len(self.operations) - 1


def from_chakra(files: Sequence[ChakraFile], *, flops_per_s: float | None = None) -> Trace:
    """Make a trace of the graphs of all NPUs.

    Compute nodes without a duration take `num_ops` at `flops_per_s`. SpecError names the node that has no place in a
    trace, whose message or dependency does not exist, or that is part of a circle.
    """
    trace = _LaneReader(files, flops_per_s).read()
    check_trace(trace, "the trace of these graphs")
    return trace


_Key = tuple[int, int]
"""NPU and node."""


class _LaneReader:
    """Nodes that become lanes."""

    def __init__(self, files: Sequence[ChakraFile], flops_per_s: float | None) -> None:
        self._files, self._flops_per_s = files, flops_per_s
        self._nodes = {
            (npu, node.id): node
            for npu, content in enumerate(files)
            for node in _with_rings(content.nodes, npu, len(files))
        }
        self._pairs, self._tags = _paired(self._nodes, len(files))
        self._lanes: list[_Reading] = []
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def read(self) -> Trace:
        """Return the trace."""
        done: dict[_Key, Needs] = {}
        received: dict[_Key, Needs] = {}
        for key in self._sorted():
            node, needs = self._nodes[key], Needs()
            for dependency in node.dependencies:
                _merge(needs, done[key[0], dependency])
            match node.type:
                case NodeType.COMP_NODE:
                    needs = self._put(key, "compute", needs, WORK, value=self._work_ns(key))
                case NodeType.COMM_SEND_NODE if not _is_event(node):
                    other = self._pairs[key]
                    size = _whole(key, node, "comm_size")
                    self._put(key, f"to {other[0]}", needs, SEND, peer=other[0], tag=self._tags[key], value=size)
                    if _LANE not in self._nodes[other].attributes:  # messages arrive in the order of the sends
                        received[other] = self._receive(other, f"from {key[0]}", {}, key[0], self._tags[key])
                case NodeType.COMM_RECV_NODE if _is_event(node):
                    _merge(needs, done[self._pairs[key]])
                case NodeType.COMM_RECV_NODE if key in received:
                    _merge(needs, received[key])
                case NodeType.COMM_RECV_NODE:
                    needs = self._receive(key, "", needs, self._pairs[key][0], self._tags[key])
            done[key] = needs
        return self._built()

    def _put(self, key: _Key, name: str, needs: Needs, kind: int, peer: int = 0, tag: int = 0, value: int = 0) -> Needs:
        """Put a node into its lane, or else the one of this name, after what it needs; return that it is done."""
        npu, node = key[0], self._nodes[key]
        lane = node.attributes.get(_LANE, name if kind != WORK or not node.attributes.get("is_cpu_op") else "cpu")
        if (npu, lane) not in self._numbers:
            self._numbers[npu, lane] = len(self._lanes)
            self._lanes.append(_Reading(npu, str(node.attributes.get("testbed_lane_name", lane))))
        number = self._numbers[npu, lane]
        step = _whole(key, node, "testbed_step", 0)
        before = self._lanes[number].operations[-1].step if self._lanes[number].operations else 0
        if not before <= step <= _MOST_STEPS or not 0 <= value < 1 << 63:
            raise _wrong(key, node, f"cannot be in step {step}, after step {before}, with the value {value}")
        operation = _Operation(step, kind, node.name, peer, tag, value, ())
        return {number: self._lanes[number].put(number, needs, operation)}

    def _receive(self, key: _Key, name: str, needs: Needs, sender: int, tag: int) -> Needs:
        waking_ns = _whole(key, self._nodes[key], "testbed_ns", 0)
        return self._put(key, name, needs, RECEIVE, sender, tag, waking_ns)

    def _work_ns(self, key: _Key) -> int:
        node = self._nodes[key]
        if (exact := _whole(key, node, "testbed_ns", -1)) >= 0:
            return exact
        operations = _whole(key, node, "num_ops", 0)
        if node.duration_us or not operations:
            return node.duration_us * 1000
        if self._flops_per_s is None:
            raise _wrong(key, node, "has num_ops and no duration; say how many operations per second the NPUs do")
        return round(1e9 * operations / self._flops_per_s)

    def _sorted(self) -> Iterator[_Key]:
        """Yield every node after those that it needs, the smallest id first. SpecError where they form a circle."""
        missing: dict[_Key, int] = {}
        children: dict[_Key, list[_Key]] = defaultdict(list)
        for key, node in self._nodes.items():
            parents = {(key[0], dependency) for dependency in node.dependencies}
            if node.type == NodeType.COMM_RECV_NODE:
                parents.add(self._pairs[key])
            missing[key] = len(parents)
            for parent in parents:
                if parent not in self._nodes:
                    raise _wrong(key, node, f"depends on node {parent[1]}, which does not exist")
                children[parent].append(key)
        ready = [(key[1], key[0]) for key, count in missing.items() if count == 0]
        heapq.heapify(ready)
        while ready:
            number, npu = heapq.heappop(ready)
            del missing[npu, number]
            yield npu, number
            for child in children[npu, number]:
                missing[child] -= 1
                if missing[child] == 0:
                    heapq.heappush(ready, (child[1], child[0]))
        if missing:
            key = min(missing)
            raise _wrong(key, self._nodes[key], "waits for itself, through dependencies or messages")

    def _built(self) -> Trace:
        awaited = {wait for lane in self._lanes for operation in lane.operations for wait in operation.waits}
        events = {place: number for number, place in enumerate(sorted(awaited))}
        names = {operation.name: 0 for lane in self._lanes for operation in lane.operations}
        if many := len(names) > _MOST_LABELS:
            names = dict.fromkeys((KINDS[kind] for kind in _TYPES), 0)
        labels = {name: number for number, name in enumerate(names)}
        steps = max([1, *(operation.step + 1 for lane in self._lanes for operation in lane.operations)])
        steps = max([steps, *(_stated_steps(content) for content in self._files)])
        lanes = []
        for number, reading in enumerate(self._lanes):
            lane = Lane(reading.node, reading.name)
            for position, operation in enumerate(reading.operations):
                while len(lane.starts) <= operation.step:
                    lane.end_step()
                for wait in operation.waits:
                    lane.add(WAIT, tag=events[wait], value=1)
                name = KINDS[operation.kind] if many else operation.name
                numbers = {"peer": operation.peer, "tag": operation.tag, "value": operation.value}
                lane.add(operation.kind, label=labels[name], **numbers)
                if (number, position) in events:
                    lane.add(SIGNAL, tag=events[number, position])
            while len(lane.starts) <= steps:
                lane.end_step()
            lanes.append(lane)
        nodes = [str(content.attributes.get("testbed_node", f"npu {npu}")) for npu, content in enumerate(self._files)]
        return Trace(tuple(nodes), tuple(labels) or ("",), tuple(lanes), {"from": "Chakra"})


def _is_event(node: ChakraNode) -> bool:
    return "testbed_event" in node.attributes


def _stated_steps(content: ChakraFile) -> int:
    steps = content.attributes.get("testbed_steps", 0)
    return steps if isinstance(steps, int) and steps <= _MOST_STEPS else 0


def _wrong(key: _Key, node: ChakraNode, what: str) -> SpecError:
    return SpecError(f"node {node.id} of NPU {key[0]} ({node.name!r}) {what}")


def _whole(key: _Key, node: ChakraNode, name: str, default: int | None = None) -> int:
    value = node.attributes.get(name, default)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int):
        found = "missing" if value is None else repr(value)
        raise _wrong(key, node, f"cannot be used: its {name} is {found}, and should be a whole number")
    return value


def _paired(nodes: Mapping[_Key, ChakraNode], npus: int) -> tuple[dict[_Key, _Key], dict[_Key, int]]:
    """Find the receive of each send and the send of each receive; and a tag for each that no other message has.

    Messages of one tag are received in the order of their nodes' ids.
    """
    queues: dict[NodeType, dict[tuple[int, int, Hashable], list[_Key]]] = {
        NodeType.COMM_SEND_NODE: defaultdict(list),
        NodeType.COMM_RECV_NODE: defaultdict(list),
    }
    for key, node in sorted(nodes.items()):
        if node.type in queues:
            kind = NodeType(node.type)
            ends = (key[0], _whole(key, node, "comm_dst")) if kind == NodeType.COMM_SEND_NODE else None
            ends = ends or (_whole(key, node, "comm_src"), key[0])
            if not (min(ends) >= 0 and max(ends) < npus):
                raise _wrong(key, node, f"is for NPU {ends[0] if ends[1] == key[0] else ends[1]}; there are {npus}")
            queues[kind][*ends, node.attributes.get("comm_tag", 0)].append(key)
    sends, receives = queues.values()
    for message in sends.keys() | receives.keys():
        if len(sends[message]) != len(receives[message]):
            one = (sends[message] or receives[message])[0]
            counts = f"{len(sends[message])} times and received {len(receives[message])} times"
            raise _wrong(
                one, nodes[one], f"is about message {message[2]} of {message[0]} for {message[1]}, sent {counts}"
            )
    pairs: dict[_Key, _Key] = {}
    tags: dict[_Key, int] = {}
    kept = all(isinstance(tag, int) and tag % _TAGS >= 0 and len(sends[a, b, tag]) == 1 for a, b, tag in list(sends))
    fresh: dict[tuple[int, int], int] = defaultdict(int)
    for sender, receiver, tag in sorted(sends, key=lambda message: sends[message][:1]):
        for here, there in zip(sends[sender, receiver, tag], receives[sender, receiver, tag], strict=True):
            pairs[here], pairs[there] = there, here
            number = tag % _TAGS if kept and isinstance(tag, int) else fresh[sender, receiver]
            fresh[sender, receiver] += 1
            tags[here] = tags[there] = number
    return pairs, tags


def _with_rings(nodes: Sequence[ChakraNode], npu: int, npus: int) -> list[ChakraNode]:
    """Replace each collective by the sends and receives of a ring of all NPUs; refuse what has no place in a trace."""
    spread = 4 * npus + 1  # ids that a collective's messages may take
    rings = 0
    out: list[ChakraNode] = []
    any_ring = any(node.type == NodeType.COMM_COLL_NODE for node in nodes)
    for node in sorted(nodes, key=lambda node: node.id):
        if node.type not in _USED and not (node.type in _MEMORY and node.duration_us):
            kind = NodeType(node.type).name if node.type in list(NodeType) else f"of type {node.type}"
            raise _wrong((npu, node.id), node, f"is {kind}, which has no place in a trace")
        if node.type in _MEMORY:
            node = replace(node, type=NodeType.COMP_NODE)
        if not any_ring:
            out.append(node)
            continue
        first = [dependency * spread + spread - 1 for dependency in node.dependencies]
        if node.type == NodeType.COMM_COLL_NODE:
            name = _collective(node, npu)
            rings += 1
            size, tag = _whole((npu, node.id), node, "comm_size"), f"collective {rings}"
            at, after = node.id * spread, first
            for number, ring in enumerate(ring_rounds(name, npu, npus, size)):
                about: dict[str, Value] = {"comm_size": ring.message_bytes, "comm_tag": f"{tag} round {number}"}
                to: dict[str, Value] = {**about, "comm_dst": ring.sends_to or 0}
                of: dict[str, Value] = {**about, "comm_src": ring.receives_from or 0}
                out.append(ChakraNode(at, node.name, NodeType.COMM_SEND_NODE, after, 0, to))
                out.append(ChakraNode(at + 1, node.name, NodeType.COMM_RECV_NODE, after, 0, of))
                at, after = at + 2, [at + 1]
            node, first = replace(node, type=NodeType.INVALID_NODE, attributes={}), after
        out.append(replace(node, id=node.id * spread + spread - 1, dependencies=first))
    return out


def _collective(node: ChakraNode, npu: int) -> str:
    kind = _whole((npu, node.id), node, "comm_type")
    if kind not in _COLLECTIVES:
        raise _wrong((npu, node.id), node, f"is a collective of Chakra's type {kind}; known are {_COLLECTIVES}")
    if node.attributes.get("pg_name", "") not in ("", "0"):
        raise _wrong((npu, node.id), node, "is a collective of some NPUs; only those of all become rings")
    return _COLLECTIVES[kind]


# ------------------------------------------------------------------ files
def _file_of(path: Path, npu: int) -> Path:
    """Return the file of an NPU: NAME.0.et, NAME.1.et ..., which NAME.et stands for."""
    return path.with_name(f"{path.name.removesuffix('.et')}.{npu}.et")


def load_chakra(path: Path, *, flops_per_s: float | None = None) -> Trace:
    """Read NAME.0.et, NAME.1.et ..., which NAME.et stands for, as a trace. SpecError where there is none, and as from
    `from_chakra`.
    """
    found: list[ChakraFile] = []
    while (file := _file_of(path, len(found))).exists():
        found.append(read_chakra(file))
    if not found:
        files = f"{_file_of(path, 0)}, {_file_of(path, 1)} ..."
        raise SpecError(f"there is no Chakra trace {path}: it stands for {files}, one per NPU")
    return from_chakra(found, flops_per_s=flops_per_s)


def save_chakra(trace: Trace, path: Path) -> list[Path]:
    """Write a trace that was checked as NAME.0.et, NAME.1.et ...; return them. OSError where that fails."""
    written = []
    for npu, content in enumerate(to_chakra(trace)):
        written.append(_file_of(path, npu))
        write_chakra(written[-1], content)
    return written
