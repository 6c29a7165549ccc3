"""A folder counts as a guest kernel only when it is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.vm import kernel

OLD = b"/lib64/ld-linux-x86-64.so.2\0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("linux", "ld.so", "libc.so.6", "modules/9.9.9/modules.dep"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 10)
    kernel.seal(tmp_path, "9.9.9", {"user-mode-linux": "9.9um1"})
    return tmp_path


def test_a_sealed_folder_is_found_with_its_versions(folder: Path) -> None:
    found = kernel.find_kernel(folder)
    assert found is not None
    assert (found.version, found.packages) == ("9.9.9", {"user-mode-linux": "9.9um1"})
    assert found.linux.is_file()
    assert found.loader.is_file()
    assert (found.modules / "modules.dep").is_file()


@pytest.mark.parametrize("name", ["linux", "ld.so", "libc.so.6", "modules/9.9.9/modules.dep", kernel.MANIFEST])
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


@given(before=st.binary(max_size=200), after=st.binary(max_size=200))
def test_the_loader_is_replaced_in_place(before: bytes, after: bytes) -> None:
    changed = kernel.with_own_loader(before + OLD + after)
    assert len(changed) == len(before + OLD + after)
    assert changed.startswith(before + f"/proc/self/fd/{kernel.LOADER_FD}\0".encode())
    assert changed.endswith(after)


@pytest.mark.parametrize("program", [b"", b"no loader", OLD * 2])
def test_a_program_whose_loader_is_not_clear_is_refused(program: bytes) -> None:
    with pytest.raises(ValueError, match="instead of once"):
        kernel.with_own_loader(program)
