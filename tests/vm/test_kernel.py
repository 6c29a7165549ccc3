"""A folder counts as a guest kernel only when it is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.vm import kernel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "linux").write_bytes(b"linux" * 10)
    kernel.seal(tmp_path, "9.9.9", {"linux-source-9.9": "9.9.9-1"}, "a recipe")
    return tmp_path


def test_a_sealed_folder_is_found_with_its_versions(folder: Path) -> None:
    found = kernel.find_kernel(folder)
    assert found is not None
    assert (found.version, found.packages) == ("9.9.9", {"linux-source-9.9": "9.9.9-1"})
    assert found.recipe == "a recipe"
    assert found.linux.is_file()


@pytest.mark.parametrize("name", ["linux", kernel.MANIFEST])
def test_a_folder_with_a_file_missing_or_cut_short_is_not_found(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-4])
    assert kernel.find_kernel(folder) is None
    (folder / name).unlink()
    assert kernel.find_kernel(folder) is None


def test_a_changed_program_is_not_found(folder: Path) -> None:
    program = bytearray((folder / "linux").read_bytes())
    program[3] ^= 1
    (folder / "linux").write_bytes(program)
    assert kernel.find_kernel(folder) is None


@pytest.mark.parametrize(
    "change",
    [{"format": kernel.FORMAT + 1}, {"files": {}}, {"files": None}, {"files": {"linux": {}}}],
    ids=lambda change: str(change),
)
def test_a_manifest_that_says_something_else_is_not_accepted(folder: Path, change: dict[str, object]) -> None:
    manifest = json.loads((folder / kernel.MANIFEST).read_text()) | change
    (folder / kernel.MANIFEST).write_text(json.dumps(manifest))
    assert kernel.find_kernel(folder) is None


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '"x"', "\x00\x01"])
def test_a_manifest_that_is_none_is_not_accepted(folder: Path, text: str) -> None:
    (folder / kernel.MANIFEST).write_text(text)
    assert kernel.find_kernel(folder) is None


def test_nothing_there(tmp_path: Path) -> None:
    assert kernel.find_kernel(tmp_path / "nothing") is None
