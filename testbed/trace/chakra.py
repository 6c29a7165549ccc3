"""Converts traces to Chakra's execution traces (MLCommons), which ASTRA-sim and others read, and back.

Chakra has a graph per NPU, of COMP_NODE, COMM_SEND_NODE, COMM_RECV_NODE and their dependencies; a trace has lanes.

To Chakra, operations map to nodes one to one. An operation depends on the previous one in its lane (except a send,
for which lanes do not wait), and on the operations before the signals that its waits need. Chakra has no events between
NPUs, so each such dependency becomes a message of one byte, marked `testbed_event`. The attributes `testbed_lane`,
`testbed_step` and `testbed_ns` hold data that Chakra cannot represent; other programs ignore them.

From Chakra, nodes are sorted into lanes in topological order (the smallest id first): a compute lane (cpu and
accelerator separate, as in ASTRA-sim), a lane to each peer, and a lane from each peer, whose messages arrive in the
order of their sends. Dependencies between lanes become a signal and a wait. A graph made from a trace gets its original
lanes back. Collectives become messages first (chakra_collectives.py).
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final, NamedTuple

from testbed.errors import SpecError
from testbed.trace.chakra_collectives import SPREAD, Groups, Key, expand, whole, wrong
from testbed.trace.chakra_file import ChakraFile, ChakraNode, NodeType, read_chakra, write_chakra
from testbed.trace.check import check_trace
from testbed.trace.format import KINDS, RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.trace.simulate import in_order

_TYPES: Final = {WORK: NodeType.COMP_NODE, SEND: NodeType.COMM_SEND_NODE, RECEIVE: NodeType.COMM_RECV_NODE}
_TAGS: Final = 1 << 32

_LANE: Final = "testbed_lane"
_MOST_STEPS: Final = 1_000_000
_MOST_LABELS: Final = 256
"""Names of nodes are omitted if there are more than this."""

Needs = dict[int, int]
"""Dependencies: by lane, the position of the last operation that must be done, which implies all earlier ones."""


def _merge(into: Needs, more: Mapping[int, int]) -> None:
    for lane, position in more.items():
        into[lane] = max(into.get(lane, -1), position)


# ------------------------------------------------------------------ to Chakra
@dataclass
class _Writing:
    """Progress of the conversion of a lane to nodes."""

    open: Needs = field(default_factory=dict)
    """Dependencies of its next operation."""
    known: Needs = field(default_factory=dict)
    """Dependencies of its operations so far, direct and indirect."""
    ids: list[int] = field(default_factory=list)
    """Ids of its nodes."""


def to_chakra(trace: Trace) -> list[ChakraFile]:
    """Convert a checked trace to graphs, one per node.

    SpecError if its lanes deadlock, or tags run out.
    """
    files = [ChakraFile([], {"testbed_node": name, "testbed_steps": trace.steps}) for name in trace.nodes]
    lanes = [_Writing() for _ in trace.lanes]
    events: dict[int, list[Needs]] = defaultdict(lambda: [{}])  # by event, then by count
    carried: dict[tuple[int, int, int], int] = {}  # (lane, position, receiving node): the node that receives its event
    steps = [0] * len(lanes)
    sizes: dict[tuple[int, int, int], int] = {}  # by sender, receiver and tag; a send precedes its receive
    tag = 1 + max((tag for lane in trace.lanes for tag in lane.tag), default=0)

    def put(number: int, name: str, kind: int, dependencies: Iterable[int], **attributes: int | str) -> int:
        nodes = files[number].nodes
        nodes.append(ChakraNode(len(nodes), name, _TYPES[kind], sorted(set(dependencies)), 0, {**attributes}))
        return nodes[-1].id

    def node_of(lane: int, position: int, npu: int) -> int:
        """Return the node of an operation; for one of another NPU, the node that receives its event."""
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
            if kind == WORK or (kind == RECEIVE and lane.value[at]):
                about["testbed_ns"] = lane.value[at]
            if kind != WORK:
                ends = (lane.node, lane.peer[at]) if kind == SEND else (lane.peer[at], lane.node)
                about |= {"comm_src": ends[0], "comm_dst": ends[1], "comm_tag": lane.tag[at]}
                about["comm_size"] = sizes.setdefault((*ends, lane.tag[at]), lane.value[at])
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
    """(lane, position) of the operations that it waits for."""


@dataclass
class _Reading:
    """A lane under construction."""

    node: int
    name: str
    operations: list[_Operation] = field(default_factory=list)
    known: Needs = field(default_factory=dict)

    def put(self, number: int, needs: Needs, operation: _Operation) -> int:
        """Append an operation, after waits for dependencies that are not implied; return its position."""
        waits = [(m, p) for m, p in needs.items() if m != number and p > self.known.get(m, -1)]
        _merge(self.known, needs)
        self.operations.append(operation._replace(waits=tuple(waits)))
        return len(self.operations) - 1


def from_chakra(files: Sequence[ChakraFile], flops_per_s: float | None = None, groups: Groups | None = None) -> Trace:
    """Convert the graphs of all NPUs to a trace. Data that it cannot represent is counted in `about`.

    Compute nodes without a duration take `num_ops` at `flops_per_s`. `groups` has the NPUs of process groups that the
    files do not state. SpecError names a node that a trace cannot represent, whose message or dependency does not
    exist, or that is part of a cycle, and a collective that some ranks lack.
    """
    trace = _LaneReader(files, flops_per_s, groups or {}).read()
    check_trace(trace, "the trace of these graphs")
    return trace


class _LaneReader:
    """Converts nodes to lanes."""

    def __init__(self, files: Sequence[ChakraFile], flops_per_s: float | None, groups: Groups) -> None:
        self._files, self._flops_per_s = files, flops_per_s
        self._nodes, self._ignored = expand(files, groups)
        self._pairs, self._tags = _paired(self._nodes, len(files))
        self._lanes: list[_Reading] = []
        self._numbers: dict[tuple[int, Hashable], int] = {}

    def read(self) -> Trace:
        """Return the trace."""
        done: dict[Key, Needs] = {}
        received: dict[Key, Needs] = {}
        for key in self._sorted():
            node, needs = self._nodes[key], Needs()
            for dependency in node.dependencies:
                _merge(needs, done[key[0], dependency])
            match node.type:
                case NodeType.COMP_NODE:
                    needs = self._put(key, "compute", needs, WORK, value=self._work_ns(key))
                case NodeType.COMM_SEND_NODE if not _is_event(node):
                    other = self._pairs[key]
                    size = whole(key, node, "comm_size")
                    self._put(key, f"to {other[0]}", needs, SEND, peer=other[0], tag=self._tags[key], value=size)
                    if _LANE not in self._nodes[other].attributes:  # messages arrive in the order of their sends
                        received[other] = self._receive(other, f"from {key[0]}", {}, key[0], self._tags[key])
                case NodeType.COMM_RECV_NODE if _is_event(node):
                    _merge(needs, done[self._pairs[key]])
                case NodeType.COMM_RECV_NODE if key in received:
                    _merge(needs, received[key])
                case NodeType.COMM_RECV_NODE:
                    needs = self._receive(key, "", needs, self._pairs[key][0], self._tags[key])
            done[key] = needs
        return self._built()

    def _put(self, key: Key, name: str, needs: Needs, kind: int, peer: int = 0, tag: int = 0, value: int = 0) -> Needs:
        """Append a node to its own lane, or to the lane `name`, after its dependencies; return it as a dependency."""
        npu, node = key[0], self._nodes[key]
        lane = node.attributes.get(_LANE, name if kind != WORK or not node.attributes.get("is_cpu_op") else "cpu")
        if (npu, lane) not in self._numbers:
            self._numbers[npu, lane] = len(self._lanes)
            self._lanes.append(_Reading(npu, str(node.attributes.get("testbed_lane_name", lane))))
        number = self._numbers[npu, lane]
        step = whole(key, node, "testbed_step", 0)
        before = self._lanes[number].operations[-1].step if self._lanes[number].operations else 0
        if not before <= step <= _MOST_STEPS or not 0 <= value < 1 << 63:
            raise wrong(key, node, f"cannot be in step {step}, after step {before}, with the value {value}")
        operation = _Operation(step, kind, node.name, peer, tag, value, ())
        return {number: self._lanes[number].put(number, needs, operation)}

    def _receive(self, key: Key, name: str, needs: Needs, sender: int, tag: int) -> Needs:
        waking_ns = whole(key, self._nodes[key], "testbed_ns", 0)
        return self._put(key, name, needs, RECEIVE, sender, tag, waking_ns)

    def _work_ns(self, key: Key) -> int:
        node = self._nodes[key]
        if (exact := whole(key, node, "testbed_ns", -1)) >= 0:
            return exact
        operations = whole(key, node, "num_ops", 0)
        if node.duration_us or not operations:
            return node.duration_us * 1000
        if self._flops_per_s is None:
            raise wrong(key, node, "has num_ops but no duration; state the NPUs' speed with --flops")
        return round(1e9 * operations / self._flops_per_s)

    def _sorted(self) -> Iterator[Key]:
        """Yield every node after its dependencies, the smallest id first. SpecError if they form a cycle."""
        parents = {key: {(key[0], needed) for needed in node.dependencies} for key, node in self._nodes.items()}
        for key, node in self._nodes.items():
            if absent := next((parent for parent in parents[key] if parent not in self._nodes), None):
                raise wrong(key, node, f"depends on node {absent[1] // SPREAD}, which does not exist")
            if node.type == NodeType.COMM_RECV_NODE:
                parents[key].add(self._pairs[key])
        sorter = TopologicalSorter(parents)
        try:
            sorter.prepare()
        except CycleError as error:
            key = min(error.args[1])
            cause = "Chakra's converter of PyTorch traces can make such cycles (mlcommons/chakra issue 189)"
            raise wrong(
                key, self._nodes[key], f"depends on itself, through dependencies or messages; {cause}"
            ) from None
        ready: list[Key] = []
        while sorter:
            for npu, number in sorter.get_ready():
                heapq.heappush(ready, (number, npu))
            number, npu = heapq.heappop(ready)
            yield npu, number
            sorter.done((npu, number))

    def _built(self) -> Trace:
        awaited = {wait for lane in self._lanes for operation in lane.operations for wait in operation.waits}
        events = {place: number for number, place in enumerate(sorted(awaited))}
        names = dict.fromkeys(operation.name for lane in self._lanes for operation in lane.operations)
        many = len(names) > _MOST_LABELS
        labels = {name: number for number, name in enumerate(KINDS if many else names)}
        last = max((lane.operations[-1].step for lane in self._lanes), default=0)
        steps = max([last + 1, *map(_stated_steps, self._files)])
        lanes = []
        for number, reading in enumerate(self._lanes):
            lane = Lane(reading.node, reading.name)
            for position, operation in enumerate(reading.operations):
                while len(lane.starts) <= operation.step:
                    lane.end_step()
                for wait in operation.waits:
                    lane.add(WAIT, tag=events[wait], value=1)
                name = KINDS[operation.kind] if many else operation.name
                lane.add(operation.kind, labels[name], operation.peer, operation.tag, operation.value)
                if (number, position) in events:
                    lane.add(SIGNAL, tag=events[number, position])
            while len(lane.starts) <= steps:
                lane.end_step()
            lanes.append(lane)
        nodes = [str(content.attributes.get("testbed_node", f"npu {npu}")) for npu, content in enumerate(self._files)]
        ignored = ", ".join(f"{count} {what}" for what, count in self._ignored.items()) or "nothing"
        return Trace(tuple(nodes), tuple(labels) or ("",), tuple(lanes), {"from": "Chakra", "ignored": ignored})


def _is_event(node: ChakraNode) -> bool:
    return "testbed_event" in node.attributes


def _stated_steps(content: ChakraFile) -> int:
    steps = content.attributes.get("testbed_steps", 0)
    return steps if isinstance(steps, int) and steps <= _MOST_STEPS else 0


def _paired(nodes: Mapping[Key, ChakraNode], npus: int) -> tuple[dict[Key, Key], dict[Key, int]]:
    """Match sends with receives, and assign each pair a unique tag.

    Messages with the same Chakra tag are received in the order of their nodes' ids.
    """
    sends: dict[tuple[int, int, Hashable], list[Key]] = defaultdict(list)
    receives: dict[tuple[int, int, Hashable], list[Key]] = defaultdict(list)
    for key, node in sorted(nodes.items()):
        if node.type in (NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE):
            sent = node.type == NodeType.COMM_SEND_NODE
            other = whole(key, node, "comm_dst" if sent else "comm_src")
            if not 0 <= other < npus:
                raise wrong(key, node, f"is for NPU {other}, but there are {npus}")
            ends = (key[0], other) if sent else (other, key[0])
            (sends if sent else receives)[*ends, node.attributes.get("comm_tag", 0)].append(key)
    for message in sends.keys() | receives.keys():
        if len(sends[message]) != len(receives[message]):
            one = (sends[message] or receives[message])[0]
            counts = f"sent {len(sends[message])} times and received {len(receives[message])} times"
            raise wrong(one, nodes[one], f"has message {message[2]} from NPU {message[0]} to {message[1]}, {counts}")
    pairs: dict[Key, Key] = {}
    tags: dict[Key, int] = {}
    kept = all(isinstance(tag, int) and tag % _TAGS >= 0 and len(sends[a, b, tag]) == 1 for a, b, tag in list(sends))
    fresh: dict[tuple[int, int], int] = defaultdict(int)
    for sender, receiver, tag in sorted(sends, key=lambda message: sends[message][:1]):
        for here, there in zip(sends[sender, receiver, tag], receives[sender, receiver, tag], strict=True):
            pairs[here], pairs[there] = there, here
            number = tag % _TAGS if kept and isinstance(tag, int) else fresh[sender, receiver]
            fresh[sender, receiver] += 1
            tags[here] = tags[there] = number
    return pairs, tags


# ------------------------------------------------------------------ files
def _file_of(path: Path, npu: int) -> Path:
    """Return the file of an NPU: NAME.et stands for NAME.0.et, NAME.1.et ..."""
    return path.with_name(f"{path.name.removesuffix('.et')}.{npu}.et")


def load_chakra(path: Path, *, flops_per_s: float | None = None) -> Trace:
    """Read NAME.0.et, NAME.1.et ..., which NAME.et stands for, as a trace. NAME.groups.json, if there is one, has the
    NPUs of process groups, as ASTRA-sim's communicator groups: {"1": [0, 1]}. SpecError if there are no traces, and as
    from `from_chakra`.
    """
    graphs: list[ChakraFile] = []
    while (file := _file_of(path, len(graphs))).exists():
        graphs.append(read_chakra(file))
    if not graphs:
        files = f"{_file_of(path, 0)}, {_file_of(path, 1)} ..."
        raise SpecError(f"there is no Chakra trace {path}: it stands for {files}, one per NPU")
    groups, stated = {}, path.with_name(f"{path.name.removesuffix('.et')}.groups.json")
    try:
        if stated.exists():
            groups = {name: tuple(map(int, npus)) for name, npus in json.loads(stated.read_text("utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError(f'{stated} does not state process groups, as {{"1": [0, 1]}}: {error}') from None
    return from_chakra(graphs, flops_per_s=flops_per_s, groups=groups)


def save_chakra(trace: Trace, path: Path) -> list[Path]:
    """Write a checked trace as NAME.0.et, NAME.1.et ...; return these. OSError if that fails."""
    written = []
    for npu, content in enumerate(to_chakra(trace)):
        written.append(_file_of(path, npu))
        write_chakra(written[-1], content)
    return written
