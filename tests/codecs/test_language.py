"""Codecs as text: what is read is what was written, one meaning has one text, and a slip is answered with its place."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.codecs.catalogue import codec_spec, notation, placement, table
from testbed.codecs.catalogue.codec_spec import CodecSpec
from testbed.codecs.catalogue.placement import CodecPair, Placement
from testbed.codecs.catalogue.row import REQUIRED, CodecRow, Parameter
from testbed.errors import SpecError, UnknownNameError, UserError

_WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
_FLOATS = st.floats(allow_nan=False, allow_infinity=False)


def _fake() -> CodecRow:
    """A codec with a parameter of every kind, required ones behind optional ones of their sort too."""
    parameters = (
        Parameter("share", "float", REQUIRED, "of the values", least=0.0, most=1.0),
        Parameter("group", "int", 64, "values", least=1),
        Parameter("rank", "int", REQUIRED, "of the matrix", least=1, most=9),
        Parameter("rounding", "word", "nearest", "how", choices=("nearest", "stochastic")),
        Parameter("inner", "codec", "int8", "for the values"),
        Parameter("label", "word", REQUIRED, "a free word"),
        Parameter("outer", "codec", REQUIRED, "for the rest"),
        Parameter("shape", "word", REQUIRED, "how", choices=("row", "tensor")),
    )
    return CodecRow(
        name="fake",
        forward="no.module:Class",
        parameters=parameters,
        summary="",
        bits="share*inner + outer",
        state="",
        source="",
        law="none",
    )


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _fake()
    control = dataclasses.replace(fake, name="control", parameters=(), bits="3.5", control=True)
    for entry in (fake, control):
        monkeypatch.setitem(table.CODECS, entry.name, entry)


def _values(parameter: Parameter, inner: st.SearchStrategy[CodecSpec]) -> st.SearchStrategy[Any]:
    low, high = parameter.least, parameter.most
    if parameter.kind == "int":
        return st.integers(None if low is None else int(low), None if high is None else int(high))
    if parameter.kind == "float":
        return st.floats(low, high, allow_nan=False, allow_infinity=False)
    if parameter.kind == "word":
        return st.sampled_from(parameter.choices) if parameter.choices else _WORDS
    return inner


def _of(entry: CodecRow, inner: st.SearchStrategy[CodecSpec]) -> st.SearchStrategy[CodecSpec]:
    drawn = [st.tuples(st.just(one.name), _values(one, inner)) for one in entry.parameters]
    return st.tuples(*drawn).map(lambda arguments: CodecSpec(entry.name, arguments))


def _strangers(inner: st.SearchStrategy[CodecSpec]) -> st.SearchStrategy[CodecSpec]:
    value = st.one_of(st.integers(), _FLOATS, _WORDS, inner)
    named = st.dictionaries(_WORDS, value, max_size=3).map(lambda given: tuple(given.items()))
    bare = st.lists(value.map(lambda one: (None, one)), max_size=3).map(tuple)
    return st.tuples(bare, named).map(lambda both: CodecSpec("json.decoder:JSONDecoder", both[0] + both[1]))


def _specs() -> st.SearchStrategy[CodecSpec]:
    plain = st.sampled_from(["fp32", "int8", "bf16", "control"]).map(codec_spec.parse_codec)
    # Made when they are drawn, so that the fixture's codecs are among them.
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            st.deferred(lambda: st.sampled_from(list(table.CODECS.values())).flatmap(lambda entry: _of(entry, inner))),
            _strangers(inner),
        ),
        max_leaves=5,
    )


@pytest.mark.slow
@given(_specs())
@settings(max_examples=300, deadline=None)
def test_what_is_written_is_read_back(one: CodecSpec) -> None:
    assert codec_spec.parse_codec(one.text) == one
    assert codec_spec.parse_codec(one.text).text == one.text
    spaced = re.sub(r"([(),=])", r"  \1 ", one.text)
    assert codec_spec.parse_codec(f" {spaced} ") == one


_PAIRS = st.one_of(
    _specs().map(lambda one: CodecPair(one, one)),
    st.tuples(_specs(), _specs()).map(lambda two: CodecPair(*two)).filter(lambda pair: pair.fault is None),
)


@pytest.mark.slow
@given(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.lists(_PAIRS, min_size=3, max_size=3))
@settings(max_examples=100, deadline=None)
def test_a_choice_has_one_text_whatever_way_it_was_said(which: list[int], pairs: list[CodecPair]) -> None:
    chosen = [pairs[index] for index in which]
    each = Placement(tuple(enumerate(chosen)), None)
    some = Placement(tuple((i, pair) for i, pair in enumerate(chosen) if pair != chosen[-1]), chosen[-1])
    assert each.over(len(which)) == some.over(len(which)) == placement.parse_placement(each.text).over(len(which))
    text = each.over(len(which)).text
    again = placement.parse_placement(text)
    assert again.over(len(which)).text == text
    for boundary, pair in enumerate(chosen):
        assert (again.at(boundary, "forward"), again.at(boundary, "backward")) == pair
    assert again.nominal_bits == max(one.nominal_bits for pair in chosen for one in pair)


@given(st.text(alphabet="intbf1680.,;:=()-+e _rsw\n", max_size=30))
@settings(max_examples=500, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(UserError):
        found = placement.parse_placement(text)
        assert placement.parse_placement(found.text) == found


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("int8()", "int8"),
        ("rest: int8", "int8"),
        ("bwd = bf16 , fwd=int8", "fwd=int8, bwd=bf16"),
        ("fwd=int8, bwd=int8", "int8"),
        ("fake(0.5, 4, 2, w, tensor, bf16, outer=fp32)", "SpecError"),
        ("fake(0.5, rank=2, word, outer=fp32, row)", "SpecError"),
        ("fake(0.5, rank=2, label=word, outer=fp32, row)", "fake(0.5, rank=2, label=word, outer=fp32, row)"),
        ("fake(share=1, 64, 2, int8, w, fp32, row, nearest)", "fake(1.0, rank=2, label=w, outer=fp32, row)"),
        (
            "fake(1, 32, 2, label=int8, outer=fp32, row, stochastic)",
            "fake(1.0, group=32, rank=2, stochastic, label=int8, outer=fp32, row)",
        ),
        ("json:JSONDecoder(int8, int8(), 1, 1.0, x=bf16())", "json:JSONDecoder(int8, int8(), 1, 1.0, x=bf16())"),
        ("0:int8;1:fwd=bf16,bwd=int8;rest:fp32", "0: int8; 1: fwd=bf16, bwd=int8; rest: fp32"),
        ("1: int8; 0: int8; 2: int8; 5 - 6: bf16", "0-2: int8; 5-6: bf16"),
    ],
)
def test_canonical(text: str, canonical: str) -> None:
    if canonical == "SpecError":
        with pytest.raises(SpecError):
            placement.parse_placement(text)
    else:
        assert placement.parse_placement(text).text == placement.canonical_text(text) == canonical


def test_the_number_of_boundaries_decides_the_text() -> None:
    assert placement.parse_placement("0: int8; 1: int8").over(2).text == "int8"
    assert placement.parse_placement("0: int8; rest: bf16").over(1).text == "int8"
    assert placement.parse_placement("0-1: int8; rest: bf16").over(3).text == "2: bf16; rest: int8"
    assert placement.parse_placement("bf16").over(0).text == "bf16"
    with pytest.raises(SpecError, match="has no rule for boundary 1"):
        placement.parse_placement("0: int8").over(2)
    with pytest.raises(SpecError, match="has a rule for boundary 4, but the pipeline has boundaries 0 to 2"):
        placement.parse_placement("4: int8; rest: bf16").over(3)


@pytest.mark.parametrize(
    ("text", "place", "says"),
    [
        ("fake(0.5, 3, 2", "at its end", "expected ',' or ')' in the brackets of fake"),
        ("json:JSONDecoder(int9())", "character 18", "did you mean 'int8'?"),
        ("0: int8; 1: fwd=int9, bwd=int8", "character 17", "did you mean 'int8'?"),
        ("bf16(4)", "character 6", "bf16 takes no arguments"),
        ("fake(groop=4)", "character 6", "did you mean 'group'?"),
        ("fake(share=1.5)", "character 12", "must be a number from 0 to 1, found 1.5"),
        ("fake(group=1.5)", "character 12", "must be a whole number of at least 1, found 1.5"),
        ("fake(group=0)", "character 12", "must be a whole number of at least 1, found 0"),
        ("fake(group=int8)", "character 12", "must be a whole number"),
        ("fake(rounding=up)", "character 15", "must be one of nearest, stochastic, found 'up'"),
        ("fake(nearest, stochastic)", "character 15", "rounding of fake is set twice"),
        ("fake(1, 2, 3, 4)", "character 15", "takes only"),
        ("fake(inner=3)", "character 12", "must be a codec"),
        ("fake(1, 2, 3)", "character 1", "fake needs label: a free word; for example fake("),
        ("fake(1e999)", "character 6", "too large"),
        ("json:J(x=1, x=2)", "character 13", "set twice"),
        ("fwd=int8", "character 1", "bwd=CODEC is missing"),
        ("fwd=int8, fwd=int8", "character 11", "is given twice"),
        ("up=int8", "character 1", "'up' is not a direction"),
        ("3-1: int8", "character 1", "not a range"),
        ("0: int8; 0: bf16", "character 10", "has a codec already"),
        ("int8; bf16", "character 7", "two rules for the rest"),
        ("fwd=topk-shared(0.1), bwd=topk-shared(0.3)", "character 27", "give both the same share"),
        ("adaptive(5, strong=topk-shared(0.1))", "character 1", "may have sent those through another"),
        ("int8 bf16", "character 6", "expected the end"),
        ("(" * 3, "character 1", "expected the name of a codec"),
        ("a:b(" * 40, "character 33", "more than 8 deep"),
    ],
)
def test_a_slip_is_answered_with_its_place(text: str, place: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        placement.parse_placement(text)
    message = str(caught.value)
    assert repr(text) in message
    assert f", {place}: " in message
    assert says in message


def test_a_name_alone_is_answered_without_a_place() -> None:
    with pytest.raises(UnknownNameError, match=r"^there is no codec 'int9'; did you mean 'int8'\?"):
        placement.parse_placement("int9")


def test_nominal_bits_and_control_come_from_what_is_inside() -> None:
    mixed = codec_spec.parse_codec("fake(0.25, rank=2, label=w, inner=control, outer=bf16, row)")
    assert mixed.nominal_bits == 0.25 * 3.5 + 16
    assert mixed.control
    assert not codec_spec.parse_codec("fake(0.25, rank=2, label=w, outer=bf16, row)").control
    assert [part.name for part in mixed.parts()] == ["fake", "control", "bf16"]


def test_trees_keep_what_was_written() -> None:
    call = notation.codec_tree("a.b:C(3, x=3.0, y)")
    assert [one.key for one in call.arguments] == [None, "x", None]
    whole, point = (one.value for one in call.arguments[:2])
    assert isinstance(whole, notation.Number)
    assert isinstance(point, notation.Number)
    assert (type(whole.value), type(point.value)) == (int, float)
