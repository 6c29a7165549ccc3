"""`wrap.capability`: what a codec may have besides encode and decode is found through wrappers, ours and strangers'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from strangers import Good, Narrow
from torch import Tensor

from testbed.codecs.adaptive import Adaptive
from testbed.codecs.check.verdicts import same
from testbed.codecs.contract import (
    Codec,
    Context,
    MessageKey,
    ModelCodec,
    ObservesLink,
    Paired,
    ReportsChoice,
    Stateful,
)
from testbed.codecs.in_model.mapl import Mapl
from testbed.codecs.make import make
from testbed.codecs.wrap import Wrapper, capability, twin, walk
from testbed.errors import CodecError, SpecError

FORWARD, BACKWARD = Context(0, 0, "forward"), Context(0, 0, "backward")
KEY = MessageKey("train", 0, 0, (0, 1, 2, 3))


class Around(Good):
    """A stranger's wrapper: it shows what it wraps, and has nothing but the two methods."""

    def __init__(self, context: Context, inner: Codec) -> None:
        super().__init__(context)
        self.inner = inner


class Several(Good):
    """A stranger's wrapper of several codecs."""

    def __init__(self, context: Context, **parts: Codec) -> None:
        super().__init__(context)
        self.parts = parts


class Counts(Good):
    """Remembers one number, and refuses to load a negative one."""

    def __init__(self, count: int = 0) -> None:
        super().__init__(FORWARD)
        self.count, self.heard, self.forward = count, 0, None

    def shared(self) -> Mapping[str, Tensor]:
        return {"count": torch.tensor(self.count)}

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def load(self, state: Mapping[str, Any]) -> None:
        if state["count"] < 0:
            raise CodecError("cannot load a negative count")
        self.count = state["count"]

    def reset(self) -> None:
        self.count = 0

    def observe(self, sent_bytes: int, seconds: float) -> None:
        self.heard += sent_bytes

    def pair(self, forward: Codec) -> None:
        self.forward = forward  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("int8", set()),
        ("zstd(int8)", set()),
        ("hadamard(int4(group=64))", set()),
        ("zstd(delta-int8)", {Stateful}),
        ("ef(int8)", {Stateful}),
        ("aqsgd", {Stateful}),
        ("adaptive(5)", {Stateful, ObservesLink, ReportsChoice}),
        ("zstd(adaptive(5))", {Stateful, ObservesLink, ReportsChoice}),
        ("bottleneck", {ModelCodec, Paired}),
        ("zstd(bottleneck)", {ModelCodec, Paired}),
        ("bottleneck(inner=delta-int8)", {ModelCodec, Paired, Stateful}),
        ("subspace", {ModelCodec, Paired, Stateful}),
        ("topk-shared(0.1)", {Stateful}),
    ],
)
def test_a_wrapper_has_what_it_wraps_has_and_nothing_else(text: str, kinds: set[type]) -> None:
    codec = make(text, FORWARD)
    every = {Stateful, Paired, ObservesLink, ReportsChoice, ModelCodec}
    assert {kind for kind in every if capability(codec, kind) is not None} == kinds


def test_gradients_by_a_mask_are_paired_through_any_wrapper() -> None:
    for text in ("topk-shared(0.1)", "ef(topk-shared(0.1))", "zstd(ef(topk-shared(0.1)))"):
        assert capability(make(text, BACKWARD), Paired) is not None
    assert capability(make("ef(topk(0.1))", BACKWARD), Paired) is None


def test_strangers_wrappers_need_only_show_what_they_wrap() -> None:
    inner = Counts(7)
    outer = Around(FORWARD, Around(FORWARD, inner))
    memory, observer = capability(outer, Stateful), capability(outer, ObservesLink)
    assert memory.state() == {"inner": {"inner": {"count": 7}}}
    assert set(memory.shared()) == {"inner.inner.count"}
    memory.reset()
    observer.observe(100, 1.0)
    assert (inner.count, inner.heard) == (0, 100)
    assert capability(Around(FORWARD, Good(FORWARD)), Stateful) is None
    assert capability(Around(FORWARD, Narrow(FORWARD)), ModelCodec) is not None


def test_several_parts_answer_together_and_load_all_or_nothing() -> None:
    one, other = Counts(1), Counts(2)
    codec = Several(FORWARD, one=one, none=Good(FORWARD), other=other)
    memory, paired = capability(codec, Stateful), capability(codec, Paired)
    assert paired is not None
    assert memory.state() == {"one": {"count": 1}, "other": {"count": 2}}
    with pytest.raises(CodecError, match="negative"):
        memory.load({"one": {"count": 5}, "other": {"count": -1}})
    assert (one.count, other.count) == (1, 2)
    with pytest.raises(CodecError, match="cannot load a state"):
        memory.load({"one": {"count": 5}})
    memory.load({"one": {"count": 5}, "other": {"count": 6}})
    assert (one.count, other.count) == (5, 6)
    paired.pair(codec)
    assert one.forward is other.forward is codec


@pytest.mark.parametrize(
    ("text", "wrong", "why"),
    [
        ("delta-int8", {"memory": {"memory": [("train", 0, 300, torch.zeros(1))]}}, "255"),
        ("delta-int8", {"memory": {"memory": [("train", 0, 1, torch.zeros(1).int())]}}, "not fp32"),
        ("delta-int8", {"memory": {"memory": [("x", 0, 1, torch.zeros(1))]}}, "'train'"),
        ("delta-int8", {"memory": {"memory": [7]}}, "no rows"),
        ("ef(topk(0.2))", {"owed": [("train", 0, 0, torch.zeros(1).int())]}, "not fp32"),
        ("topk-shared(0.1)", {"masks": [("train", 0, 0, (4, 40), torch.zeros(3, dtype=torch.uint8))]}, "not this"),
        ("adaptive(50, delta(int8))", {"bytes": [None, None]}, "three codecs"),
        ("adaptive(50, delta(int8))", {"bytes": ["1", None, None]}, "three codecs"),
        ("adaptive(50, delta(int8))", {"link": [1.0]}, "three codecs"),
    ],
)
def test_a_state_in_which_a_part_is_wrong_is_refused_and_changes_nothing(
    text: str, wrong: dict[str, object], why: str
) -> None:
    codecs = make(text, FORWARD), make(text, FORWARD)
    codecs[0].encode(torch.ones(4, 40), KEY)
    used, fresh = (capability(codec, Stateful) for codec in codecs)
    before = fresh.state()
    with pytest.raises(CodecError, match=f"cannot load a state.*{why}"):
        fresh.load({**used.state(), **wrong})
    assert same(fresh.state(), before)


def test_a_codec_with_the_methods_answers_for_what_it_wraps() -> None:
    inner = Counts()
    codec = make("adaptive(5)", FORWARD)
    assert isinstance(codec, Adaptive)
    nested = Adaptive(FORWARD, 5, mild=Around(FORWARD, inner), middle=codec, strong=codec)
    assert capability(nested, ObservesLink) is nested
    nested.observe(10_000, 1.0)
    assert inner.heard == 10_000
    assert nested.state()["parts"]["mild"] == {"inner": {"count": 0}}
    assert set(nested.state()["parts"]) == {"mild", "middle"}, "one instance counts once"


def test_only_what_remembers_needs_a_twin() -> None:
    for text, one in (("int8", True), ("zstd(int8)", True), ("zstd(delta-int8)", False), ("powersgd(4)", False)):
        codec = make(text, FORWARD)
        assert (twin(codec) is codec) == one


def test_walk_meets_every_codec_inside() -> None:
    names = [type(part).__name__ for part in walk(make("zstd(adaptive(5, strong=ef(topk(0.1))))", FORWARD))]
    assert names[:2] == ["Zstd", "Adaptive"]
    assert {"ErrorFeedback", "TopK"} <= set(names)
    assert isinstance(make("ef(topk(0.1))", FORWARD), Wrapper)


def test_a_model_codec_inside_another_is_found_wherever_it_is() -> None:
    hidden = Several(FORWARD, mild=make("int8", FORWARD), strong=Around(FORWARD, Narrow(FORWARD)))
    with pytest.raises(SpecError, match="Narrow changes the model"):
        Mapl(FORWARD, ratio=4, inner=hidden)
