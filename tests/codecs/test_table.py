"""Names of codecs, and the example of the README: all else the kit asks of the whole table."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.codecs.catalogue import table
from testbed.codecs.contract import Context
from testbed.codecs.make import make
from testbed.errors import SpecError, UnknownNameError


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
