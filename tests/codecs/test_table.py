"""Names of codecs, and the laws of the oldest four by formulas of our own: all else the kit asks of the whole table."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from testbed.codecs.catalogue import table
from testbed.codecs.contract import Codec, Context, MessageKey
from testbed.codecs.make import make
from testbed.errors import CodecError, SpecError, UnknownNameError

DIRECTIONS = ("forward", "backward")
CASES = [(name, direction) for name in ("fp32", "bf16", "int8", "delta-int8") for direction in DIRECTIONS]
FIRST = MessageKey("train", 0, 0, (0, 1))


def _scale(x: Tensor) -> Tensor:
    """A row's int8 scale, from the formula."""
    return x.float().abs().amax(-1, keepdim=True).double() / 127 if x.numel() else torch.zeros(())


def _within(share: float) -> Callable[[Tensor, Tensor], bool]:
    def law(x: Tensor, decoded: Tensor) -> bool:
        bound = share * _scale(x) * (1 + 2**-14) + torch.finfo(torch.float32).tiny
        return bool(((x.double() - decoded.double()).abs() <= bound).all())

    return law


# What a first message keeps of its tensor, fp32 or bf16.
LAWS: dict[tuple[str, str], Callable[[Tensor, Tensor], bool]] = {
    **{("fp32", d): lambda x, y: torch.equal(x.float(), y) for d in DIRECTIONS},
    **{("bf16", d): lambda x, y: torch.equal(x.to(torch.bfloat16).float(), y) for d in DIRECTIONS},
    ("int8", "forward"): _within(0.5),
    ("int8", "backward"): _within(1),
    ("delta-int8", "forward"): _within(0.5),
    ("delta-int8", "backward"): _within(1),
}

PASS_NOT_FINITE = {"fp32", "bf16"}


def pair(name: str, direction: Any, seed: int = 0) -> tuple[Codec, Codec]:
    context = Context(seed, 0, direction)
    return make(name, context), make(name, context)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state(codec: Codec) -> Any:
    return copy.deepcopy(vars(codec))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return type(a) is type(b) and same(vars(a), vars(b))
    return bool(a == b)


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=5).map(tuple)


@pytest.mark.parametrize(("name", "direction"), CASES)
@given(
    shape=shapes,
    seed=st.integers(0, 2**31),
    power=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_law(name: str, direction: str, shape: tuple[int, ...], seed: int, power: int, dtype: torch.dtype) -> None:
    x = (normal(*shape, seed=seed) * 10.0**power).to(dtype)
    sender, receiver = pair(name, direction)
    decoded = receiver.decode(sender.encode(x, FIRST), FIRST)
    assert decoded.shape == x.shape
    assert decoded.dtype == torch.float32
    assert decoded.is_contiguous()
    assert LAWS[name, direction](x, decoded)


@pytest.mark.parametrize(("name", "direction"), CASES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_not_finite_passes_or_is_refused_by_name(name: str, direction: str, bad: float) -> None:
    sender, receiver = pair(name, direction)
    key = MessageKey("train", 17, 2, (5,))
    x = normal(3, 8)
    x[1, 4] = bad
    before = state(sender)
    if name in PASS_NOT_FINITE:
        decoded = receiver.decode(sender.encode(x, key), key)
        assert torch.equal(torch.isnan(decoded), torch.isnan(x))
        assert torch.equal(torch.isinf(decoded), torch.isinf(x))
    else:
        with pytest.raises(CodecError, match="step 17"):
            sender.encode(x, key)
        assert same(state(sender), before)


@pytest.mark.parametrize(("name", "direction"), CASES)
def test_more_than_eight_axes_are_refused(name: str, direction: str) -> None:
    with pytest.raises(CodecError):
        pair(name, direction)[0].encode(torch.ones((1,) * 9), FIRST)


# ------------------------------------------------------------------ names
def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'int8'"):
        table.find_codec("int-8")


@pytest.mark.parametrize(
    "name", ["no_such_package:Codec", "testbed.codecs.nothing:Codec", "json.decoder.deeper:X", ":", "a b:C", "mod:"]
)
def test_unknown_module(name: str) -> None:
    with pytest.raises(SpecError):
        table.find_codec(name)


def test_find_runs_nobodys_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "strangers_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "module.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    entry = table.find_codec("strangers_package.module:Codec")
    assert (entry.forward, entry.backward) == (entry.name, entry.name)
    with pytest.raises(SpecError, match="RuntimeError: imported"):
        make(entry.name, Context(0, 0, "forward"))


@pytest.mark.parametrize("name", ["testbed.codecs.dense.cast:Fp33", "testbed.codecs.contract:MessageKey", "math:pi"])
def test_a_class_that_is_no_codec(name: str) -> None:
    with pytest.raises(SpecError):
        make(name, Context(0, 0, "forward"))


def test_the_table_needs_no_torch() -> None:
    code = "import sys; from testbed.codecs.catalogue import table; table.find_codec('json.decoder:JSONDecoder'); "
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_example_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (Path(table.__file__).parents[1] / "README.md").read_text(encoding="utf8")
    _, _, rest = readme.partition("```python\n")
    example, end, _ = rest.partition("```")
    assert end
    (tmp_path / "halves.py").write_text(example, encoding="utf8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "halves", raising=False)
    sender, receiver = (make("halves:Fp16", Context(0, 0, "forward")) for _ in range(2))
    for x in (normal(2, 3, 4), normal(3, 4).t(), torch.empty(0, 3), torch.tensor(1.5)):
        payload = sender.encode(x, FIRST)
        assert torch.equal(receiver.decode(payload, FIRST), x.half().float())
        assert len(payload) == 4 + 4 * x.ndim + 2 * x.numel()
    with pytest.raises(CodecError):
        receiver.decode(b"nonsense", FIRST)
    with pytest.raises(CodecError):
        sender.encode(torch.tensor([1e9]), FIRST)
    narrow = make("halves:Fp16(largest=3)", Context(0, 0, "backward"))
    assert torch.equal(receiver.decode(narrow.encode(torch.tensor([-3.0]), FIRST), FIRST), torch.tensor([-3.0]))
    with pytest.raises(CodecError):
        narrow.encode(torch.tensor([3.5]), FIRST)
    sys.modules.pop("halves")
