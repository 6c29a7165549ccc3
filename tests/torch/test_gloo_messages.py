"""gloo.py states what gloo sends: to the byte, to every rank, as the kernel counts it on every connection."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.trace import gloo
from testbed.trace.observations import ObservedRank, sent_bytes
from tests.torch.jobs import run_ranks

_SIZES = (1024, 4 << 20)
_NAMES = (
    "all_reduce", "all_reduce of odd size", "all_reduce_coalesced", "reduce", "all_gather", "all_gather of bytes",
    "all_gather_into_tensor", "all_gather coalesced", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter coalesced", "broadcast", "all_to_all", "all_to_all_single", "uneven all_to_all", "gather",
    "scatter", "send and recv", "recv from anyone", "barrier", "monitored_barrier", "all_gather_object",
    "broadcast_object_list",
)  # fmt: skip


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def count(ranks: int) -> list[dict[tuple[str, int], dict[str, Any]]]:
        said = run_ranks("sent_bytes.py", ranks, tmp_path_factory.mktemp("counted"))
        return [{(row["name"], row["size"]): row for row in json.loads(each)} for each in said]

    return count


@pytest.mark.slow
@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_operation_sends_what_is_stated(ranks: int, name: str, size: int, counted: Any) -> None:
    for rank, rows in enumerate(counted(ranks)):
        row = rows[name, size]
        groups = {line["name"]: tuple(line["ranks"]) for line in row["lines"] if line["kind"] == "group"}
        observed = ObservedRank(rank, ranks, groups or {"0": tuple(range(ranks))})
        stated: dict[int, int] = {}
        for line in row["lines"]:
            for peer, count in sent_bytes(observed, line).items() if line["kind"] == "op" else ():
                stated[peer] = stated.get(peer, 0) + count
        assert stated == {int(peer): count for peer, count in row["sent"].items() if count}, (name, rank)


def test_every_operation_is_counted(counted: Any) -> None:
    assert {name for name, _ in counted(2)[0]} == set(_NAMES)


@given(
    what=st.sampled_from(["all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast", "barrier", "gather",
                          "scatter", "all_to_all", "monitored_barrier"]),
    members=st.integers(1, 9),
    items=st.integers(0, 10**7),
    item=st.sampled_from([1, 2, 4, 8, 16]),
    root=st.integers(0, 8),
)  # fmt: skip
def test_what_one_sends_another_receives(what: str, members: int, items: int, item: int, root: int) -> None:
    """In the order in which it is sent, whatever the sizes; and each waits once for whatever it has begun."""
    operation = {"what": what, "call": what, "bytes": items * item * members, "item": item, "root": root % members}
    made = [gloo.calls(operation, position, members) for position in range(members)]

    def sizes(position: int, kind: int, peer: int) -> list[int]:
        return [call.size for call in made[position] if call.kind == kind and call.peer == peer]

    for one in range(members):
        for other in range(members):
            assert sizes(one, gloo.SEND, other) == sizes(other, gloo.POST, one)
            assert len(sizes(one, gloo.SEND, other)) == len(sizes(one, gloo.AWAIT_SENT, other))
            assert len(sizes(one, gloo.POST, other)) == len(sizes(one, gloo.AWAIT_RECEIVED, other))
            assert one != other or not sizes(one, gloo.SEND, other)


def test_what_does_not_follow_from_sizes_is_refused() -> None:
    sparse = {"what": "all_reduce", "call": "allreduce", "bytes": 8, "item": 4, "sparse": True}
    with pytest.raises(SpecError, match="cannot record a sparse all-reduce"):
        gloo.calls(sparse, 0, 2)
    with pytest.raises(SpecError, match="gloo has no 'permute'; known are all_reduce"):
        gloo.calls({"what": "permute"}, 0, 2)
