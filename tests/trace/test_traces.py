"""The file of a trace, and what is refused."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.trace.check import check_trace, load_trace
from testbed.trace.format import MAGIC, RECEIVE, SEND, SIGNAL, WAIT, WORK, Trace, parse_trace, read_trace
from testbed.trace.simulate import simulate
from tests.trace.made_traces import pipeline, traces, two_nodes


def _bytes(trace: Trace, folder: Path) -> bytes:
    trace.write(folder / "a.trace")
    return (folder / "a.trace").read_bytes()


@given(trace=traces())
def test_what_is_written_is_read_back_and_makes_sense(trace: Trace, folder: Path) -> None:
    content = _bytes(trace, folder)
    assert read_trace(folder / "a.trace") == trace
    assert load_trace(folder / "a.trace") == trace
    read_trace(folder / "a.trace").write(folder / "b.trace")
    assert (folder / "b.trace").read_bytes() == content


@given(
    trace=traces(),
    where=st.floats(0, 1, exclude_max=True),
    flip=st.integers(1, 255),
    more=st.binary(min_size=1, max_size=9),
)
def test_what_was_changed_cut_off_or_appended_is_refused(
    trace: Trace, where: float, flip: int, more: bytes, folder: Path
) -> None:
    content = _bytes(trace, folder)
    changed, at = bytearray(content), int(where * len(content))
    changed[at] ^= flip
    for wrong in (changed, content[:at], content + more):
        with pytest.raises(SpecError, match=r"not a trace|corrupt or truncated"):
            parse_trace(memoryview(wrong), "it")


@given(header=st.binary(max_size=300), columns=st.binary(max_size=100))
def test_a_checksum_that_is_right_proves_nothing_else(header: bytes, columns: bytes) -> None:
    body = len(header).to_bytes(4, "little") + header + columns
    with pytest.raises(SpecError, match="is not a trace"):
        parse_trace(memoryview(MAGIC + hashlib.sha256(body).digest() + body), "it")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'"version":2', b'"version":3', "is a trace of version 3, but this testbed reads 1 and 2"),
        (b'"node":1', b'"node":7', "to node 7, but there are only 2 nodes"),
        (b'"steps":2', b'"steps":3', "its lanes need|multiple|do not partition"),
        (b'"steps":2', b'"steps":-2', "do not partition its operations"),
        (b'"operations":', b'"operations":-', "its lanes need|multiple|do not partition"),
        (b'"labels"', b'"Labels"', "'labels'"),
    ],
)
def test_a_header_that_is_wrong_is_refused(old: bytes, new: bytes, said: str, tmp_path: Path) -> None:
    body = _bytes(pipeline(2, 1, 2), tmp_path)[len(MAGIC) + 32 + 4 :]
    end = body.index(b'"about"') + body[body.index(b'"about"') :].index(b"}}") + 2
    header = body[:end].replace(old, new, 1)
    assert header != body[:end]
    body = len(header).to_bytes(4, "little") + header + body[end:]
    with pytest.raises(SpecError, match=said):
        parse_trace(memoryview(MAGIC + hashlib.sha256(body).digest() + body), "it")


def _columns(change: Callable[[Trace], None]) -> Trace:
    trace = pipeline(2, 2, 2)
    change(trace)
    return trace


@pytest.mark.parametrize(
    ("trace", "said"),
    [
        (two_nodes([(RECEIVE, 1, 5, 0)]), "message 5 from b to a is received but not sent"),
        (two_nodes([(SEND, 1, 5, 10)]), "message 5 from a to b is sent but not received"),
        (two_nodes([(SEND, 1, 5, 10), (SEND, 1, 5, 10)], ((RECEIVE, 0, 5, 0),)), "message 5 from a to b is sent twice"),
        (two_nodes([(SEND, 1, 5, 10)], ((RECEIVE, 0, 5, 0),) * 2), "message 5 from a to b is received twice"),
        (
            two_nodes([(SEND, 2, 5, 10)]),
            r"operation 0 of step 0 .* of a \(send: .*\) refers to a node that does not exist",
        ),
        (two_nodes([(SEND, 0, 5, 10)]), "is for its own node"),
        (two_nodes([(SEND, 1, 5, 0)], ((RECEIVE, 0, 5, 0),)), "1 byte for a message"),
        (two_nodes([(WORK, 0, 0, -1)]), "value below the minimum"),
        (two_nodes([(9, 0, 0, 0)]), r"\(kind 9: .*is of no known kind"),
        (
            two_nodes([(WAIT, 0, 3, 2), (SIGNAL, 0, 3, 0)]),
            "until the event 3 was signalled 2 times, but .* only 1 times",
        ),
        (_columns(lambda trace: trace.lanes[1].label.__setitem__(0, 9)), "a label that is not in the trace's list"),
        (_columns(lambda trace: trace.lanes[0].starts.append(0)), "does not have 3 steps"),
        (
            _columns(lambda trace: trace.lanes[0].starts.__setitem__(1, trace.lanes[0].kind.index(SEND))),
            "is received in step 0 but sent in a later one, 1",
        ),
        (
            _columns(lambda trace: trace.lanes[0].starts.__setitem__(1, trace.lanes[0].kind.index(SIGNAL))),
            "in step 0 a lane waits until the event 0 was signalled 2 times, but by the end of .* only 1 times",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(trace: Trace, said: str) -> None:
    with pytest.raises(SpecError, match=f"it: .*{said}"):
        check_trace(trace, "it")


def test_lanes_that_wait_for_each_other_are_named() -> None:
    trace = two_nodes([(WAIT, 0, 1, 1), (SIGNAL, 0, 2, 0)], ((WAIT, 0, 2, 1), (SIGNAL, 0, 1, 0)))
    check_trace(trace, "it")
    with pytest.raises(SpecError, match=re.escape("a compute at operation 0 (wait) for the event 1; b compute at")):
        simulate(trace)


@given(trace=traces())
def test_any_first_steps_can_be_done_alone(trace: Trace) -> None:
    check_trace(trace, "it")
    whole = simulate(trace)
    for steps in range(trace.steps + 1):
        for lane, played, all_played in zip(trace.lanes, simulate(trace, steps), whole, strict=True):
            assert len(played.end_ns) == lane.starts[steps]
            # Signals of later steps may meet a wait earlier, never later.
            assert all(a >= b for a, b in zip(played.end_ns, all_played.end_ns, strict=False))


def test_the_player_can_read_a_trace_without_numpy(tmp_path: Path) -> None:
    pipeline(2, 2, 2).write(tmp_path / "a.trace")
    program = (
        "import sys, pathlib; from testbed.trace.format import read_trace; read_trace(pathlib.Path(sys.argv[1]));"
        "import testbed.trace.played; print(*{'numpy', 'torch', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.trace")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""
