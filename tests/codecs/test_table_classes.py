"""The table against its classes: what it says can be made, in both directions, from every text that it allows."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from testbed.codecs import low_rank
from testbed.codecs.catalogue import codec_spec, docstrings, row_files, table
from testbed.codecs.catalogue.row import REQUIRED, CodecRow, Kind, Law
from testbed.codecs.contract import Context, MessageKey, Paired
from testbed.codecs.dense import fp8, integer
from testbed.codecs.make import make
from testbed.codecs.wire.message import BodyCodec
from testbed.codecs.wrap import capability, walk
from testbed.message_key import Direction

ENTRIES = [pytest.param(entry, id=entry.name) for entry in table.CODECS.values()]


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def test_no_name_twice() -> None:
    assert len(table.ROWS) == len(table.CODECS)
    assert all(name == entry.name for name, entry in table.CODECS.items())


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_row_has_values_of_its_fields_types(entry: CodecRow) -> None:
    assert entry.law in get_args(Law)
    assert {each.kind for each in entry.parameters} <= {*get_args(Kind)}
    for field in dataclasses.fields(entry):
        if field.type in ("str", "bool", "str | None"):
            assert isinstance(getattr(entry, field.name), {"str": str, "bool": bool}.get(field.type, str | None))


_FAMILY = """
[parameters]
values = {name = "values", kind = "word", choices = ["bf16", "fp32"], doc = "format"}
[codecs.first]
forward = "some.module:First"
parameters = ["values", {name = "share", kind = "float", least = 0, doc = "share"}]
summary = "the first"
bits = "16*share"
source = "here"
law = "none"
work = {encode = ["4", "0", "1"], decode = ["1", "4", "2"], around = ["inner.encode", "inner.decode/2"]}
[codecs.second]
like = "first"
law = "bounded"
work = "unknown"
"""


def test_rows_of_a_file_share_parameters_and_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "_FOLDER", tmp_path)
    file = tmp_path / "some.toml"
    file.write_text(_FAMILY)
    first, second = row_files.read_rows("some")
    assert dataclasses.replace(second, name="first", law="none", work=first.work) == first
    assert [(each.name, each.default, each.choices) for each in first.parameters] == [
        ("values", "bf16", ("bf16", "fp32")),
        ("share", REQUIRED, ()),
    ]
    assert first.work == (
        ("4 + inner.encode", "inner.encode", "1 + inner.encode"),
        ("1 + inner.decode/2", "4 + inner.decode/2", "2 + inner.decode/2"),
    )
    assert (second.law, second.work) == ("bounded", "unknown")
    for wrong in (_FAMILY + 'colour = "red"\n', _FAMILY.replace('source = "here"\n', "")):
        file.write_text(wrong)
        with pytest.raises(TypeError):
            row_files.read_rows("some")


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_text_has_one_meaning(entry: CodecRow) -> None:
    names = [one.name for one in entry.parameters]
    words = Counter(word for one in entry.parameters for word in one.choices)
    assert len(set(names)) == len(names)
    assert all(count == 1 for count in words.values())
    for one in entry.parameters:
        assert one.doc
        if one.choices:
            assert one.kind == "word"
            assert one.default is REQUIRED or one.default in one.choices
        if one.kind in ("int", "float") and one.default is not REQUIRED:
            assert isinstance(one.default, int | float)
            assert one.least is None or one.default >= one.least
            assert one.most is None or one.default <= one.most


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_it_is_called_with_its_parameters(entry: CodecRow, direction: str) -> None:
    kind = _named(entry.forward if direction == "forward" else entry.backward)
    inspect.signature(kind).bind(None, **{one.name: None for one in entry.parameters})


def test_no_two_codecs_share_a_body_code() -> None:
    owners: dict[int, set[type]] = defaultdict(set)
    for entry in table.CODECS.values():
        for direction in get_args(Direction):
            for part in walk(make(entry.example_text, Context(1, 0, direction))):
                if isinstance(code := getattr(part, "code", None), int):
                    family = type(part).__mro__
                    above = family.index(BodyCodec) if isinstance(part, BodyCodec) else 1
                    stated = [kind for kind in family if "code" in vars(kind)]
                    owners[code].add(stated[0] if stated else family[above - 1])
    assert {fp8.Fp8, integer.Integer, low_rank.CodedLowRank} <= set().union(*owners.values())
    shared = {code: kinds for code, kinds in owners.items() if len(kinds) > 1 or not 1 <= code < 200}
    assert not shared, f"free are {[code for code in range(1, 200) if code not in owners]}"


@pytest.mark.parametrize("entry", [one for one in ENTRIES if table.CODECS[str(one.id)].hook is None])
def test_links_are_certified_with_messages_of_about_the_size_that_is_sent(entry: CodecRow) -> None:
    """A first visit may cost more. Codecs that change the model are left out: they are given narrower tensors."""
    text, x = entry.example_text, torch.randn(8, 128, 768, generator=torch.Generator().manual_seed(1))
    forward, backward = (make(text, Context(1, 0, direction)) for direction in ("forward", "backward"))
    if (paired := capability(backward, Paired)) is not None:
        paired.pair(forward)
    keys = [MessageKey("train", step, 0, tuple(range(8))) for step in range(2)]
    first, later = (max(memoryview(codec.encode(x, key)).nbytes for codec in (forward, backward)) for key in keys)
    nominal = codec_spec.parse_codec(text).nominal_bits * x.numel() / 8
    assert 0.85 * min(first, later) < nominal < 1.15 * max(first, later)


@pytest.mark.parametrize("entry", ENTRIES)
def test_its_documentation_is_read_as_python_would(entry: CodecRow) -> None:
    for path in (entry.forward, entry.backward):
        found, kind = docstrings.class_docs(path), _named(path)
        assert found.of_module == inspect.getdoc(inspect.getmodule(kind))
        assert found.of_class
        assert not kind.__doc__ or found.of_class == inspect.getdoc(kind)


def test_no_torch_for_texts_and_documentation() -> None:
    code = (
        "import sys; from testbed.codecs.catalogue import docstrings, placement, table\n"
        "for e in table.CODECS.values(): docstrings.class_docs(e.forward), docstrings.class_docs(e.backward)\n"
        "placement.parse_placement('fwd=int8, bwd=bf16').nominal_bits, table.find_codec('json.decoder:JSONDecoder')\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
