"""Memory is bounded by a limit, not by what a file says of its own size."""

from __future__ import annotations

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.errors import SpecError
from testbed.profiles import rate_trace
from testbed.trace import chakra_file
from testbed.trace.chakra_file import ChakraFile, ChakraNode, read_chakra, write_chakra

MIB = 1 << 20


def _peak_of(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_gzip_bomb_takes_no_more_memory_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6.5 MB became 12.9 GB."""
    bomb = tmp_path / "bomb.0.et"
    bomb.write_bytes(gzip.compress(bytes(64 * MIB)))
    monkeypatch.setattr(chakra_file, "_LARGEST_BYTES", 2 * MIB)

    def read() -> None:
        with pytest.raises(SpecError, match="more than 2 MiB, decompressed"):
            read_chakra(bomb)

    assert _peak_of(read) < 8 * MIB


def test_a_gzip_of_gzips_is_no_trace(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.0.et"
    bomb.write_bytes(gzip.compress(gzip.compress(bytes(MIB))))
    with pytest.raises(SpecError, match="is not a Chakra trace"):
        read_chakra(bomb)


def test_nodes_of_no_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may be one byte of a file, and is hundreds of bytes of memory."""
    monkeypatch.setattr(chakra_file, "_MOST_NODES", 1_000)
    assert len(chakra_file.parse_chakra(bytes(1_001)).nodes) == 1_000  # the first message is about the file
    with pytest.raises(ValueError, match="more than 1,000 nodes"):
        chakra_file.parse_chakra(bytes(MIB))


def test_dependencies_are_counted_before_they_become_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chakra_file, "_MOST_DEPENDENCIES", 1_000)
    for count in (1_000, 1_001):
        path = tmp_path / "a.0.et"
        write_chakra(path, ChakraFile([ChakraNode(0, "a", 4, list(range(count)))]))
        if count <= 1_000:
            assert len(read_chakra(path).nodes[0].dependencies) == count
        else:
            with pytest.raises(SpecError, match="1,000 dependencies"):
                read_chakra(path)


def test_a_rate_trace_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_trace, "_MOST", 100)
    assert len(rate_trace.parse_trace("1\n" * 100, "a")) == 100
    with pytest.raises(SpecError, match="more than 100 delivery opportunities"):
        rate_trace.parse_trace("1\n" * 101, "a")
