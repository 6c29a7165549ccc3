"""Traces to Chakra's graphs and back."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, empty_pb2, message_factory
from google.protobuf.proto import parse_length_prefixed
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.trace.chakra import from_chakra, load_chakra, save_chakra, to_chakra
from testbed.trace.chakra_file import ChakraFile, ChakraNode, NodeType, parse_chakra, read_chakra, write_chakra
from testbed.trace.format import RECEIVE, SEND, WORK, Trace
from testbed.trace.simulate import simulate
from testbed.trace.totals import bytes_by_pair
from tests.trace.made_traces import pipeline, sent_bytes, traces

_SENT_NODE, _RECEIVED, _WORK = NodeType.COMM_SEND_NODE, NodeType.COMM_RECV_NODE, NodeType.COMP_NODE


def _told(trace: Trace) -> dict[tuple[int, str], list[tuple[object, ...]]]:
    """Work, sends and receives of each lane, with the step, and when each ends on no network."""
    told = {}
    for lane, played in zip(trace.lanes, simulate(trace), strict=True):
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
    return ChakraNode(number, "send", _SENT_NODE, list(after), 0, {"comm_dst": to, "comm_size": size, "comm_tag": tag})


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
        for lane, played in zip(trace.lanes, simulate(trace), strict=True)
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


def _coll(number: int, kind: int, size: int, *after: int, **about: Any) -> ChakraNode:
    attributes = {"comm_type": kind, "comm_size": size, **about}
    return ChakraNode(number, f"collective {number}", NodeType.COMM_COLL_NODE, list(after), 0, attributes)


_SIZE = 24_000
_SENT = {  # bytes that member 0, the root, and the last one send in a group of n
    0: lambda n: [2 * _SIZE * (n - 1) // n] * 2, 2: lambda n: [_SIZE * (n - 1)] * 2, 3: lambda n: [0, _SIZE],
    4: lambda n: [_SIZE * (n - 1), 0], 5: lambda n: [_SIZE * (n - 1).bit_length(), 0],
    6: lambda n: [_SIZE * (n - 1) // n] * 2, 7: lambda n: [_SIZE * (n - 1) // n] * 2,
    8: lambda n: [_SIZE * (n - 1) // n] * 2, 9: lambda n: [(n - 1).bit_length()] * 2,
}  # fmt: skip
"""By Chakra's type of collective; what its root gets in a reduce (1) follows from gloo's."""


@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize("kind", _SENT)
def test_each_collective_becomes_the_messages_that_it_takes(kind: int, members: int) -> None:
    graph = [_compute(0, 3), _coll(1, kind, _SIZE, 0), _compute(2, 4, 1)]
    trace = from_chakra([ChakraFile(list(graph)) for _ in range(members)])
    assert [sum(sent_bytes(trace, node)) for node in (0, members - 1)] == _SENT[kind](members)
    assert max(max(played.end_ns) for played in simulate(trace)) == 7000
    if kind == 5:  # everybody has it once, whoever sends it
        assert sum(sent_bytes(trace)) == _SIZE * (members - 1)


def test_nobody_goes_on_before_a_collective_whose_last_member_was_late() -> None:
    graphs = [ChakraFile([_compute(0, 10 * npu), _coll(1, 0, 400, 0), _compute(2, 4, 1)]) for npu in range(4)]
    trace = from_chakra(graphs)
    for lane, played in zip(trace.lanes, simulate(trace), strict=True):
        if lane.name == "compute":
            assert played.end_ns[-1] == 34_000


def _groups_node(text: str) -> ChakraNode:
    """The node that says which process groups there are, as Chakra's converter writes it."""
    return ChakraNode(1, "## process_group:init ##", NodeType.METADATA_NODE, [], 0, {"rf_id": 2}, str([text]))


def _pairs(trace: Trace) -> set[tuple[int, int]]:
    return {(pair.sender, pair.receiver) for pair in bytes_by_pair(trace)}


def test_a_process_group_is_what_the_files_state(tmp_path: Path) -> None:
    stated = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": [], "group_size": 4}]
    stated += [{"pg_name": name, "ranks": ranks} for name, ranks in (("3", [0, 2]), ("4", [1, 3]))]
    own = {npu: str(3 + npu % 2) for npu in range(4)}
    graphs = [[_coll(7, 0, 100, pg_name=own[npu])] for npu in range(4)]
    trace = from_chakra([ChakraFile([_groups_node(json.dumps(stated)), *graph]) for graph in graphs])
    assert _pairs(trace) == {(0, 2), (2, 0), (1, 3), (3, 1)}
    for npu, graph in enumerate(graphs):
        write_chakra(tmp_path / f"job.{npu}.et", ChakraFile(graph))
    with pytest.raises(SpecError, match=r"of the process group '3', whose members no file states.*groups\.json"):
        load_chakra(tmp_path / "job.et")
    (tmp_path / "job.groups.json").write_text('{"3": [0, 2], "4": [1, 3]}')
    assert _pairs(load_chakra(tmp_path / "job.et")) == _pairs(trace)
    (tmp_path / "job.groups.json").write_text("[]")
    with pytest.raises(SpecError, match=r"job\.groups\.json does not state process groups"):
        load_chakra(tmp_path / "job.et")


def _part(field: int, value: bytes | int) -> bytes:
    """A field of protobuf's wire format, shorter than 128 bytes."""
    return bytes([field << 3, value]) if isinstance(value, int) else bytes([field << 3 | 2, len(value)]) + value


def test_groups_and_what_a_node_waits_for_are_read_from_a_file(tmp_path: Path) -> None:
    write_chakra(tmp_path / "a.0.et", ChakraFile([]))
    text = '["[{\\"pg_name\\": \\"0\\", \\"ranks\\": [5]}]"]'.replace("\\", "")
    caller, waits, inputs = _part(4, b"\x09"), _part(5, b"\x03"), _part(8, _part(1, text.encode()))
    node = _part(1, 1) + _part(2, b"process_group:init") + _part(3, 1) + caller + waits + inputs
    with (tmp_path / "a.0.et").open("ab") as file:
        file.write(bytes([len(node)]) + node)
    (content,) = read_chakra(tmp_path / "a.0.et").nodes
    assert content == ChakraNode(1, "process_group:init", NodeType.METADATA_NODE, [3], inputs=text)
    with pytest.raises(SpecError, match=r"of the process group '0', with the NPUs \(5,\); there are 1 files"):
        from_chakra([ChakraFile([content, _compute(3, 1), _coll(4, 0, 5, pg_name="0")])])


@given(text=st.text(max_size=20), groups=st.lists(st.lists(st.integers(-1, 4), max_size=3), max_size=2))
def test_any_statement_of_groups_is_read_or_refused(text: str, groups: list[list[int]]) -> None:
    stated = json.dumps([{"pg_name": "0", "ranks": ranks} for ranks in groups])
    for said in (text, f"[{{{text}}}]", stated):
        with contextlib.suppress(SpecError):
            from_chakra([ChakraFile([_groups_node(said), _coll(2, 0, 5, pg_name="0")]) for _ in range(2)])


@st.composite
def _grouped(draw: st.DrawFn) -> tuple[list[ChakraFile], int]:
    """Graphs of up to four NPUs, whose collectives of any groups come in one order; how many collectives."""
    npus = draw(st.integers(1, 4))
    drawn = draw(st.lists(st.tuples(st.integers(0, 9), st.sets(st.integers(0, npus - 1), min_size=1)), max_size=6))
    stated = json.dumps([{"pg_name": str(at + 1), "ranks": sorted(members)} for at, (_, members) in enumerate(drawn)])
    sizes = [draw(st.integers(0, 50)) for _ in drawn]
    files = []
    for npu in range(npus):
        nodes = [_groups_node(stated), _compute(2, draw(st.integers(0, 9)))]
        for at, (kind, members) in enumerate(drawn):
            if npu in members:
                nodes.append(
                    _coll(10 + at, kind, sizes[at], nodes[-1].id if len(nodes) > 2 else 2, pg_name=str(at + 1))
                )
        files.append(ChakraFile(nodes))
    return files, len(drawn)


@given(made=_grouped())
def test_collectives_of_any_groups_end(made: tuple[list[ChakraFile], int]) -> None:
    trace = from_chakra(made[0])
    simulate(trace)
    assert len({lane.node for lane in trace.lanes}) == len(made[0])


def test_what_a_trace_cannot_hold_is_ignored_and_counted() -> None:
    """As in traces of GPUs that Chakra's converter made: calls on the host, and memory."""
    graph = [
        ChakraNode(0, "load", NodeType.MEM_LOAD_NODE), ChakraNode(1, "store", NodeType.MEM_STORE_NODE, [0], 5),
        ChakraNode(3, "c10d::allreduce_", NodeType.COMM_COLL_NODE, [1], 9, {"is_cpu_op": 1}),
        _coll(4, 0, 100, 3), _compute(5, 10, 4, is_cpu_op=0),
    ]  # fmt: skip
    trace = from_chakra([ChakraFile(list(graph)) for _ in range(2)])
    assert trace.about["ignored"] == "2 MEM_LOAD_NODE"
    assert max(max(played.end_ns) for played in simulate(trace)) == 24_000
    alone = from_chakra([ChakraFile(graph)])
    assert alone.about["ignored"] == "1 MEM_LOAD_NODE, 1 collectives of a single NPU"


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ([_compute(0, 1, 5)], r"node 0 of NPU 0 \('work 0'\) depends on node 5, which does not exist"),
        ([_compute(0, 1, 1), _compute(1, 1, 0)], "node 0 of NPU 0 .* depends on itself"),
        ([_compute(0, 5), _compute(0, 7), _compute(1, 1)], "node 0 of NPU 0 .* has the id of another node"),
        ([_send(0, 1, 5)], "message 0 from NPU 0 to 1, sent 1 times and received 0 times"),
        ([_send(0, 9, 5)], "is for NPU 9, but there are 2"),
        ([_compute(0, 1, testbed_step=10**9)], "cannot be in step 1000000000"),
        ([_compute(0, 2**62)], "with the value"),
        ([_compute(0, 0, num_ops=5)], "has num_ops but no duration"),
        ([ChakraNode(0, "batch", NodeType.BATCH_NODE)], "is BATCH_NODE, which a trace cannot represent"),
        ([ChakraNode(0, "x", 99)], "is of type 99"),
        ([ChakraNode(0, "s", _SENT_NODE)], r"comm_dst is missing \(Chakra's converter .* drops .* peers"),
        ([_compute(0, 1, 1), _compute(1, 1, 0)], "Chakra's converter .* can make such cycles .*issue 189"),
        ([_coll(0, 10, 5)], "collective of Chakra's type 10"),
        ([_coll(0, 0, 2**62)], "the all_reduce of 4611686018427387904 bytes cannot be played"),
        ([_coll(0, 6, -5)], "the all_to_all of -5 bytes cannot be played"),
        ([_coll(0, 5, 5)], r"NPU 0 has 1, NPU 1 0 or others; .* drops broadcasts \(mlcommons/chakra issue 161\)"),
        ([_groups_node("[{}]"), _coll(2, 0, 5)], "does not describe process groups: KeyError"),
        (
            [_groups_node('[{"pg_name": "0", "ranks": [0, 7]}]'), _coll(2, 0, 5, pg_name="0")],
            "with the NPUs .0, 7.; there are 2 files",
        ),
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
