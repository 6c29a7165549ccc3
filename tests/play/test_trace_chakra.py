"""Traces to Chakra's graphs and back."""

from __future__ import annotations

import contextlib
import gzip
import io
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, empty_pb2, message_factory
from google.protobuf.proto import parse_length_prefixed
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.play.chakra import from_chakra, load_chakra, save_chakra, to_chakra
from testbed.play.chakra_file import ChakraFile, ChakraNode, NodeType, parse_chakra, read_chakra, write_chakra
from testbed.play.totals import bytes_by_pair
from testbed.play.trace import RECEIVE, SEND, WORK, Trace
from testbed.play.unlinked import play_unlinked
from tests.play.made_traces import pipeline, sent_bytes, traces

_SENT, _RECEIVED, _WORK = NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE, NodeType.COMP_NODE


def _told(trace: Trace) -> dict[tuple[int, str], list[tuple[object, ...]]]:
    """Work, sends and receives of each lane, with the step, and when each ends on no network."""
    told = {}
    for lane, played in zip(trace.lanes, play_unlinked(trace), strict=True):
        operations = [
            (step, op.kind, trace.labels[op.label], op.peer, op.tag, op.value, played.end_ns[lane.starts[step] + place])
            for step in range(trace.steps)
            for place, op in enumerate(lane.operations(step))
            if op.kind in (WORK, SEND, RECEIVE)
        ]
        if operations:
            told[lane.node, lane.name] = operations
    return told


@given(trace=traces())
def test_there_and_back_work_and_messages_keep_their_lanes_and_moments(trace: Trace) -> None:
    back = from_chakra(to_chakra(trace))
    assert _told(back) == _told(trace)
    assert back.steps == (max(1, trace.steps) if _told(trace) else 0)
    assert len(back.nodes) == len(trace.nodes)


def test_files_are_read_back(tmp_path: Path) -> None:
    trace = pipeline(3, 4, 2)
    written = save_chakra(trace, tmp_path / "job.et")
    assert [path.name for path in written] == ["job.0.et", "job.1.et", "job.2.et"]
    assert _told(load_chakra(tmp_path / "job.et")) == _told(trace)
    written[1].write_bytes(gzip.compress(written[1].read_bytes()))
    assert _told(load_chakra(tmp_path / "job.et")) == _told(trace)
    with pytest.raises(SpecError, match=r"there is no Chakra trace .*none\.et: it stands for .*none\.0\.et"):
        load_chakra(tmp_path / "none.et")


_values = st.one_of(st.integers(0, 2**31 - 1), st.text(max_size=5))
_nodes = st.builds(
    ChakraNode,
    id=st.integers(0, 2**64 - 1),
    name=st.text(max_size=5),
    type=st.integers(0, 10),
    dependencies=st.lists(st.integers(0, 2**64 - 1), max_size=3),
    duration_us=st.integers(0, 2**64 - 1),
    attributes=st.dictionaries(st.sampled_from(["comm_size", "comm_src", "comm_tag", "is_cpu_op", "x"]), _values),
)


def _tidy(node: ChakraNode) -> ChakraNode:
    if isinstance(flag := node.attributes.get("is_cpu_op"), int):
        node.attributes["is_cpu_op"] = int(bool(flag))
    return node


@given(nodes=st.lists(_nodes.map(_tidy), max_size=4))
def test_nodes_are_read_back_and_as_the_library_of_protobuf_reads_them(nodes: list[ChakraNode], folder: Path) -> None:
    content = ChakraFile(nodes, {"testbed_node": "a", "testbed_steps": 3})
    write_chakra(folder / "a.0.et", content)
    assert read_chakra(folder / "a.0.et") == content
    _compare_with_protobuf((folder / "a.0.et").read_bytes(), content)


@given(raw=st.binary(max_size=80))
def test_bytes_that_are_no_graph_are_refused(raw: bytes, folder: Path) -> None:
    for content in (raw, b"\x02\x0a\x00" + raw, b"\x1f\x8b" + raw):
        (folder / "b.0.et").write_bytes(content)
        with contextlib.suppress(SpecError):
            from_chakra([read_chakra(folder / "b.0.et")])


@given(trace=traces(), where=st.floats(0, 1, exclude_max=True))
def test_a_graph_that_was_cut_off_is_refused_or_whole(trace: Trace, where: float, folder: Path) -> None:
    path = save_chakra(trace, folder / "c.et")[0]
    content = path.read_bytes()
    path.write_bytes(content[: int(where * len(content))])
    try:
        left = read_chakra(path).nodes
    except SpecError:
        return
    assert left == parse_chakra(content).nodes[: len(left)]


def _compute(number: int, micros: int, *after: int, **attributes: Any) -> ChakraNode:
    return ChakraNode(number, f"work {number}", _WORK, list(after), micros, attributes)


def _send(number: int, to: int, size: int, *after: int, tag: int = 0) -> ChakraNode:
    return ChakraNode(number, "send", _SENT, list(after), 0, {"comm_dst": to, "comm_size": size, "comm_tag": tag})


def _receive(number: int, of: int, *after: int, tag: int = 0) -> ChakraNode:
    return ChakraNode(number, "receive", _RECEIVED, list(after), 0, {"comm_src": of, "comm_size": 1, "comm_tag": tag})


def test_a_graph_becomes_lanes_that_wait_for_what_it_depends_on() -> None:
    left = ChakraFile(
        [_compute(0, 10), _send(1, 1, 100, 0), _compute(2, 5, 0), _receive(3, 1, 1), _compute(4, 1, 2, 3)]
    )
    right = ChakraFile([_receive(7, 0), _compute(8, 20, 7), _send(9, 0, 50, 8)])
    trace = from_chakra([left, right])
    assert [(lane.node, lane.name) for lane in trace.lanes] == [
        (0, "compute"), (0, "to 1"), (1, "from 0"), (1, "compute"), (1, "to 0"), (0, "from 1"),
    ]  # fmt: skip
    ends = {
        trace.labels[lane.label[at]]: played.end_ns[at]
        for lane, played in zip(trace.lanes, play_unlinked(trace), strict=True)
        for at in range(len(lane))
        if lane.kind[at] == WORK
    }
    assert ends == {"work 0": 10_000, "work 2": 15_000, "work 8": 30_000, "work 4": 31_000}


def test_messages_of_one_tag_are_matched_in_order() -> None:
    left = ChakraFile([_send(0, 1, 100), _send(1, 1, 200)])
    right = ChakraFile([_receive(5, 0), _compute(6, 1, 5), _receive(7, 0, 6)])
    trace = from_chakra([left, right])
    sends, receives = trace.lanes[0], trace.lanes[1]
    assert list(sends.value) == [100, 200]
    assert [tag for tag, kind in zip(receives.tag, receives.kind, strict=True) if kind == RECEIVE] == list(sends.tag)


@pytest.mark.parametrize(("number", "messages", "size"), [(0, 6, 25), (2, 3, 100), (7, 3, 25)])
def test_a_collective_becomes_a_ring(number: int, messages: int, size: int) -> None:
    about = {"comm_type": number, "comm_size": 100}
    graph = [_compute(0, 3), ChakraNode(1, "gather", NodeType.COMM_COLL_NODE, [0], 0, {**about}), _compute(2, 4, 1)]
    trace = from_chakra([ChakraFile(list(graph)) for _ in range(4)])
    assert {pair[:2] for pair in bytes_by_pair(trace)} == {(node, (node + 1) % 4) for node in range(4)}
    for node in range(4):
        assert sent_bytes(trace, node) == [size] * messages
    assert max(max(played.end_ns) for played in play_unlinked(trace)) == 7000


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([_compute(0, 1, 5)], r"node 0 of NPU 0 \('work 0'\) depends on node 5, which does not exist"),
        ([_compute(0, 1, 1), _compute(1, 1, 0)], "node 0 of NPU 0 .* waits for itself"),
        ([_send(0, 1, 5)], "message 0 of 0 for 1, sent 1 times and received 0 times"),
        ([_send(0, 9, 5)], "is for NPU 9; there are 2"),
        ([_compute(0, 1, testbed_step=10**9)], "cannot be in step 1000000000"),
        ([_compute(0, 2**62)], "with the value"),
        ([_compute(0, 0, num_ops=5)], "has num_ops and no duration"),
        ([ChakraNode(0, "load", NodeType.MEM_LOAD_NODE)], "is MEM_LOAD_NODE, which has no place in a trace"),
        ([ChakraNode(0, "x", 99)], "is of type 99"),
        ([ChakraNode(0, "s", _SENT)], "its comm_dst is missing"),
        ([ChakraNode(0, "c", NodeType.COMM_COLL_NODE, [], 0, {"comm_type": 6})], "collective of Chakra's type 6"),
    ],
)
def test_a_graph_that_makes_no_sense_is_refused(nodes: list[ChakraNode], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        from_chakra([ChakraFile(nodes), ChakraFile([])])


def test_operations_take_what_the_rate_says() -> None:
    trace = from_chakra([ChakraFile([_compute(0, 0, num_ops=3000)])], flops_per_s=1e9)
    assert list(trace.lanes[0].value) == [3000]


_SCHEMA = {
    "AttributeProto": "1 name string, 7 int32_val int32, 9 int64_val int64, 27 bool_val bool, 29 string_val string",
    "Node": "1 id uint64, 2 name string, 3 type int32, 5 data_deps uint64 repeated, 7 duration_micros uint64, "
    "10 attr message repeated",
}
"""As Chakra has it, as far as we use it."""


def _compare_with_protobuf(raw: bytes, content: ChakraFile) -> None:
    """Read a file with Chakra's own schema."""
    kinds = descriptor_pb2.FieldDescriptorProto
    schema = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="c", syntax="proto3")
    for message, stated in _SCHEMA.items():
        made = schema.message_type.add(name=message)
        for number, name, kind, *repeated in map(str.split, stated.split(", ")):
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            field = made.field.add(name=name, number=int(number), type=f"TYPE_{kind.upper()}", label=label)
            if kind == "message":
                field.type_name = ".c.AttributeProto"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(schema)
    node, stream = message_factory.GetMessageClass(pool.FindMessageTypeByName("c.Node")), io.BytesIO(raw)
    parse_length_prefixed(empty_pb2.Empty, stream)  # what is said of the file
    for ours in content.nodes:
        theirs = parse_length_prefixed(node, stream)
        assert (theirs.id, theirs.name, theirs.type, list(theirs.data_deps), theirs.duration_micros) == (
            ours.id, ours.name, ours.type, ours.dependencies, ours.duration_us,
        )  # fmt: skip
        values = {a.name: a.string_val or a.int32_val or a.int64_val or int(a.bool_val) for a in theirs.attr}
        assert {k: v or 0 for k, v in values.items()} == {k: v or 0 for k, v in ours.attributes.items()}
    assert parse_length_prefixed(node, stream) is None
