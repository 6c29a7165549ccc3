"""A folder counts as a guest kernel only when it is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed import vm
from testbed.errors import SpecError
from testbed.vm import kernel
from tests.known import known


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "linux").write_bytes(b"linux" * 10)
    kernel.seal(tmp_path, "9.9.9", {"linux-source-9.9": "9.9.9-1"})
    assert kernel.find_kernel(tmp_path) is not None
    return tmp_path


@pytest.mark.parametrize("content", [b"linux" * 9, b"?" + (b"linux" * 10)[1:], b"", None], ids=str)
def test_a_kernel_that_was_altered_cut_short_or_is_missing_is_not_started(folder: Path, content: bytes | None) -> None:
    found = known(kernel.find_kernel(folder))
    found.check()
    found.linux.unlink()
    if content is not None:
        found.linux.write_bytes(content)
    for refused in (found.check, lambda: vm.start_guest(found, ["true"])):
        with pytest.raises(SpecError, match=rf"linux was altered or truncated.*rm -r {folder}"):
            refused()


def test_without_a_manifest_a_folder_holds_no_kernel(folder: Path) -> None:
    (folder / kernel.MANIFEST).unlink()
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
