"""A state comes back from its two files to the bit, the type and the layout in memory."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from testbed.errors import ResultsError, SpecError
from testbed.tagged import read_tagged, write_tagged


class Pair(NamedTuple):
    one: Any
    other: Any


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.arange(math.prod(shape)).reshape(shape).to(draw(st.sampled_from(DTYPES)))
    values = values.permute(draw(st.permutations(range(len(shape)))))
    return values[::2] if shape and draw(st.booleans()) else values


keys = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.tuples(st.text(max_size=2), st.integers()))
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=9), st.binary(max_size=9), tensors()
)
states = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.just(memoryview(b"frame")),
    ),
    max_leaves=12,
)


def layout(of: Tensor) -> list[int]:
    """The axes, from the one whose neighbours are furthest apart; without those of one value."""
    axes = [axis for axis in range(of.ndim) if of.shape[axis] > 1 and of.numel()]
    return sorted(axes, key=lambda axis: -of.stride(axis))


def alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        same = torch.equal(one, other) and one.dtype == other.dtype and layout(one) == layout(other)
        return same and not (other.numel() and other.data_ptr() % 64)
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and alike(list(one.values()), list(other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other) if not isinstance(one, float) else repr(one) == repr(other)


@given(states)
def test_whatever_a_state_holds(state: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tagged(Path(folder) / "state", state, (Pair,))
        assert alike(state, read_tagged(Path(folder) / "state", (Pair,)))


def test_memory_that_is_shared_is_written_once_and_read_apart(tmp_path: Path) -> None:
    weights = torch.randn(1000)
    state = [weights, weights, weights[:10], weights.view(10, 100), weights.view(10, 100).T]
    write_tagged(tmp_path / "state", state)
    assert (tmp_path / "state.safetensors").stat().st_size < 4 * 3010 + 500
    again = read_tagged(tmp_path / "state")
    again[0].zero_()
    assert all(torch.equal(one, other) for one, other in zip(again[1:], state[1:], strict=True))


@pytest.mark.parametrize("value", [{1, 2}, object(), Pair(1, 2), 1j])
def test_what_is_not_plain_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot save a "):
        write_tagged(tmp_path / "state", {"of": [value]})


@pytest.mark.parametrize("ending", ["json", "safetensors"])
@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"{")])
def test_a_file_that_is_missing_or_none_is_named(ending: str, change: Any, tmp_path: Path) -> None:
    write_tagged(tmp_path / "state", [torch.ones(3)])
    change(tmp_path / f"state.{ending}")
    with pytest.raises(ResultsError, match="cannot read the state"):
        read_tagged(tmp_path / "state")
