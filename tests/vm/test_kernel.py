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
    assert kernel.find_kernel(tmp_path) is not None
    return tmp_path


@pytest.mark.parametrize("name", ["linux", kernel.MANIFEST])
def test_a_folder_with_a_file_altered_cut_short_or_missing_is_not_found(folder: Path, name: str) -> None:
    content = (folder / name).read_bytes()
    for altered in (content[:-4], b"?" + content[1:]):
        (folder / name).write_bytes(altered)
        assert kernel.find_kernel(folder) is None
    (folder / name).unlink()
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
