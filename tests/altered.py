"""The ways in which a file is altered by accident, for tests of what is believed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def _flip(path: Path, other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _cut(path: Path, other: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))


def _append(path: Path, other: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content + (content.splitlines(keepends=True) or [b"\n"])[-1])


ALTERATIONS: dict[str, Callable[[Path, Path], object]] = {
    "a bit flipped": _flip,
    "cut at a line": _cut,
    "emptied": lambda path, other: path.write_bytes(b""),
    "removed": lambda path, other: path.unlink(),
    "replaced by another's": lambda path, other: path.write_bytes(other.read_bytes()),
    "appended to": _append,
}
"""Each gets the file, and the file of the same name of something else."""
