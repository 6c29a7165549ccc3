"""A short pass of the fuzzer over each parser, and all that it ever found."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from testbed.errors import SpecError
from tests.fuzz import engine
from tests.fuzz.engine import CORPUS, Count, check, fuzz, limited
from tests.fuzz.parsers import PARSERS, Parser

FOUND = sorted(CORPUS.glob("*/*.bin"))


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_refuses_or_reads(name: str) -> None:
    first = 0 if os.environ.get("CI") else random.SystemRandom().randrange(1_000_000)
    fuzz(name, Count(rounds=first), rounds=1, keep=False)


@pytest.mark.parametrize("path", FOUND, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_was_found_stays_mended(path: Path) -> None:
    with limited():
        check(PARSERS[path.parent.name], path.read_bytes())


# ---------------------------------------------------------------------- the fuzzer itself
def _planted(raw: bytes) -> object:
    if b"7" in raw:
        raise KeyError("planted")
    raise SpecError(f"refused {raw!r} \x1b")


@pytest.mark.slow
def test_the_fuzzer_finds_what_was_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARSERS, "planted", Parser("", lambda: [b"1 2 3"], _planted))
    monkeypatch.setattr(engine, "CORPUS", tmp_path)
    count = Count()
    fuzz("planted", count, rounds=10)
    assert count.finds.keys() == {"KeyError in the parser"}
    (kept,) = tmp_path.glob("planted/*.bin")
    assert kept.read_bytes() == b"7", "it is shrunk"
    assert count.rounds == 10
    assert count.executions >= 10 * engine.ROUND / 2
    fuzz("planted", count, rounds=2)
    assert count.rounds == 12, "another run goes on"


def _greedy(raw: bytes) -> object:
    while raw == b"slow":
        pass
    return bytearray(4 * engine.MEMORY_BYTES)


@pytest.mark.parametrize(("raw", "error"), [(b"slow", engine.TooSlowError), (b"large", MemoryError)])
def test_an_input_is_given_only_so_much(raw: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "SLOWEST_S", 0.1)
    with limited(), pytest.raises(error):
        check(Parser("", list, _greedy), raw)
