"""A kernel comes out of its file as it went in, and a file that was altered anywhere is refused.

One is bundled; the user's own has precedence.
"""

from __future__ import annotations

import json
import lzma
import platform
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from testbed import vm
from testbed.cli import make_app
from testbed.errors import CapabilityError, SpecError
from testbed.vm import debian, kernel, kernel_file
from tests.known import known


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    built = folder / "built"
    built.mkdir()
    (built / "linux").write_bytes(bytes(range(256)) * 8)
    kernel.seal(built, "7.2.12", {"gcc": "12"})
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
    with pytest.raises(SpecError, match=r"altered: its kernel has the SHA-256 \w+ instead of"):
        vm.import_kernel(altered, tmp_path / "kernel")


def test_a_kernel_from_another_configuration_is_refused(exported: Path, tmp_path: Path) -> None:
    other = _repacked(exported, tmp_path / "file", json.dumps(kernel.recipe()).encode(), json.dumps("0" * 16).encode())
    with pytest.raises(SpecError, match=r"another version of testbed.*testbed uses the bundled one"):
        vm.import_kernel(other, tmp_path / "kernel")


def test_a_folder_that_cannot_be_written(exported: Path, tmp_path: Path) -> None:
    taken = vm.import_kernel(exported, tmp_path / "kernel")
    with pytest.raises(SpecError, match="cannot write the guest kernel"):
        vm.export_kernel(taken, tmp_path / "nowhere" / "file")


@pytest.fixture
def shipped(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like that of the bundled kernel, and an empty cache."""
    folder = tmp_path / "shipped"
    folder.mkdir()
    shutil.copy(exported, folder / kernel_file.SHIPPED_FILE.name)
    shutil.copy(exported.parent / "built" / kernel.MANIFEST, folder)
    monkeypatch.setattr(kernel_file, "SHIPPED", folder)
    monkeypatch.setattr(kernel_file, "SHIPPED_FILE", folder / kernel_file.SHIPPED_FILE.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return folder


def test_the_bundled_kernel_is_unpacked_once(shipped: Path, exported: Path) -> None:
    taken = known(vm.find_clock_kernel())
    assert taken.linux.read_bytes() == (exported.parent / "built" / "linux").read_bytes()
    assert (taken.folder / kernel.MANIFEST).read_bytes() == (shipped / kernel.MANIFEST).read_bytes()
    assert taken.origin == "bundled with testbed"
    before = taken.linux.stat()
    assert vm.find_clock_kernel() == taken
    assert taken.linux.stat() == before


def test_a_kernel_that_is_not_the_bundled_one_is_installed_only_where_somebody_agrees(
    shipped: Path, exported: Path, tmp_path: Path
) -> None:
    """Any program can be sealed by its maker: its manifest is right then."""
    (foreign := tmp_path / "foreign").mkdir()
    (foreign / "linux").write_bytes(b"any program")
    kernel.seal(foreign, "7.2.12", {"gcc": "12"})
    vm.export_kernel(known(vm.find_clock_kernel(foreign)), tmp_path / "foreign.tar.xz")
    digest = known(vm.find_clock_kernel(foreign)).sha256

    def install(file: Path, *flags: str, answer: str | None = None) -> tuple[str, str]:
        done = CliRunner().invoke(make_app("vm"), ["vm", "--kernel", str(file), *flags], input=answer)
        return done.output, str(done.exception or "")

    said, refused = install(tmp_path / "foreign.tar.xz", answer="y\n")  # no terminal: nobody has read the question
    assert f"SHA-256 of its kernel: {digest}" in said
    assert "is not the bundled one's" in refused
    assert "--yes" in refused
    assert not kernel.own_folder().exists()
    assert install(exported)[1] == ""
    assert known(vm.find_clock_kernel()).sha256 != digest
    assert install(tmp_path / "foreign.tar.xz", "--yes")[1] == ""
    assert known(vm.find_clock_kernel()).sha256 == digest


def test_the_users_own_kernel_comes_before_it(shipped: Path, exported: Path) -> None:
    own = vm.import_kernel(exported)
    assert vm.find_clock_kernel() == own
    assert own.origin == f"your own, in {own.folder}"
    (own.folder / kernel.MANIFEST).unlink()
    with pytest.raises(SpecError, match=rf"holds no complete guest kernel.*rm -r {own.folder}"):
        vm.find_clock_kernel()
    shutil.rmtree(own.folder)
    assert known(vm.find_clock_kernel()).origin == "bundled with testbed"


@pytest.mark.parametrize("name", [kernel.MANIFEST, kernel_file.SHIPPED_FILE.name])
def test_an_altered_file_in_the_package_is_refused(shipped: Path, name: str) -> None:
    (shipped / name).write_bytes((shipped / name).read_bytes()[:-9])
    with pytest.raises(SpecError, match=rf"was altered.*git checkout -- {shipped}, or install testbed again"):
        vm.find_clock_kernel()


def test_another_kernel_in_the_package_is_refused(shipped: Path) -> None:
    manifest = (shipped / kernel.MANIFEST).read_text()
    sha256 = json.loads(manifest)["files"]["linux"]["sha256"]
    (shipped / kernel.MANIFEST).write_text(manifest.replace(sha256, "0" * 64))
    with pytest.raises(SpecError, match=r"its kernel has the SHA-256 .* instead of 0000"):
        vm.find_clock_kernel()


def test_a_cache_whose_kernel_and_manifest_were_exchanged_is_refused(shipped: Path) -> None:
    folder = known(vm.find_clock_kernel()).folder
    (folder / "linux").write_bytes(b"another")
    kernel.seal(folder, "7.2.12", {"gcc": "12"})
    with pytest.raises(SpecError, match=rf"was altered or truncated.*rm -r {folder}"):
        known(vm.find_clock_kernel()).check()


def test_a_cache_that_cannot_be_written(shipped: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CapabilityError, match=r"cannot install the guest kernel in .* set XDG_CACHE_HOME"):
        vm.find_clock_kernel()


def test_other_machines_have_none(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert vm.find_clock_kernel() is None


def test_the_note_beside_the_kernel_names_the_source_that_it_was_built_from() -> None:
    found = known(kernel.find_kernel(kernel.SHIPPED))
    package, version = debian.SOURCE
    assert found.packages[package] == version
    assert found.recipe == kernel.recipe()  # neither configuration nor patch has changed since
    note = " ".join((kernel.SHIPPED / "README.md").read_text("utf-8").split())
    assert f"`{package}`, version {version}, SHA-256" in note
    assert "GNU General Public License, version 2" in note
