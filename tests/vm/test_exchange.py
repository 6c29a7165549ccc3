"""A kernel comes out of its file as it went in, and a file that was altered anywhere is refused."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import vm
from testbed.errors import SpecError
from testbed.vm import build, kernel


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    built = folder / "built"
    built.mkdir()
    (built / "linux").write_bytes(bytes(range(256)) * 8)
    kernel.seal(built, "7.2.12", {"gcc": "12"}, build.recipe())
    found = vm.find_clock_kernel(built)
    assert found is not None
    vm.export_kernel(found, folder / "kernel.tar.xz")
    return folder / "kernel.tar.xz"


def test_it_comes_out_as_it_went_in(exported: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kernel"
    taken = vm.import_kernel(exported, folder)
    assert taken == vm.find_clock_kernel(folder)
    assert taken.linux.read_bytes() == (exported.parent / "built" / "linux").read_bytes()
    assert taken.linux.stat().st_mode & 0o111
    vm.export_kernel(taken, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == exported.read_bytes()
    assert vm.import_kernel(exported, folder) == taken  # in place of one that is there
    assert sorted(path.name for path in folder.parent.iterdir()) == ["kernel", "kernel.lock"]


@given(data=st.data())
def test_a_file_that_was_altered_or_cut_anywhere_is_refused(
    exported: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(exported.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        del content[at:]
    folder = tmp_path_factory.mktemp("altered")
    (folder / "file").write_bytes(content)
    with pytest.raises(SpecError, match=r"altered|cannot read"):
        vm.import_kernel(folder / "file", folder / "kernel")
    assert not (folder / "kernel").exists()


def _repacked(exported: Path, file: Path, old: bytes, new: bytes) -> Path:
    data = lzma.decompress(exported.read_bytes())
    assert data.count(old) == 1
    assert len(old) == len(new)
    file.write_bytes(lzma.compress(data.replace(old, new)))
    return file


def test_another_kernel_under_the_same_manifest_is_refused(exported: Path, tmp_path: Path) -> None:
    linux = bytes(range(256)) * 8
    altered = _repacked(exported, tmp_path / "file", linux, linux[:-1] + b"!")
    with pytest.raises(SpecError, match=r"altered.*checksums.*vm --build"):
        vm.import_kernel(altered, tmp_path / "kernel")


def test_a_kernel_from_another_configuration_is_refused(exported: Path, tmp_path: Path) -> None:
    other = _repacked(exported, tmp_path / "file", json.dumps(build.recipe()).encode(), json.dumps("0" * 16).encode())
    with pytest.raises(SpecError, match=r"another version of testbed.*vm --build"):
        vm.import_kernel(other, tmp_path / "kernel")


def test_a_folder_that_cannot_be_written(exported: Path, tmp_path: Path) -> None:
    taken = vm.import_kernel(exported, tmp_path / "kernel")
    with pytest.raises(SpecError, match="cannot write the guest kernel"):
        vm.export_kernel(taken, tmp_path / "nowhere" / "file")
