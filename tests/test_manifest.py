"""A manifest finds every alteration of its files and of itself, and names the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from testbed import manifest
from testbed.manifest import NAME, find_fault, set_aside, write_manifest
from tests.altered import ALTERATIONS

FILES = {"one.jsonl": "first\nsecond\n", "two.json": "{}\n", "three.bin": "x" * 3000 + "\n"}


def written(folder: Path, mark: str = "") -> Path:
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(mark + text, encoding="utf8")
    write_manifest(folder / NAME, "it", folder.iterdir())
    return folder / NAME


def fault(path: Path, subject: str = "it") -> str:
    return find_fault(path, lambda: subject)


def test_what_was_written_is_right_and_about_one_thing(tmp_path: Path) -> None:
    path = written(tmp_path / "own")
    assert fault(path) == ""
    assert fault(path, "something") == "manifest.json belongs to another subject"
    assert fault(tmp_path / NAME) == "cannot read manifest.json: No such file or directory"
    before = path.read_bytes()
    write_manifest(path, "it", path.parent.iterdir())
    assert path.read_bytes() == before, "it does not list itself"


@pytest.mark.parametrize("alteration", ALTERATIONS)
@pytest.mark.parametrize("name", [*FILES, NAME])
def test_every_alteration_names_the_file(tmp_path: Path, name: str, alteration: str) -> None:
    path = written(tmp_path / "own")
    ALTERATIONS[alteration](path.with_name(name), written(tmp_path / "other", "another ").with_name(name))
    named = "one.jsonl" if (name, alteration) == (NAME, "replaced by another's") else name
    assert named in fault(path)


def test_every_bit_of_a_manifest_counts(tmp_path: Path) -> None:
    path = written(tmp_path / "own")
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert fault(path), content[max(0, place - 20) : place + 20]


def test_a_change_is_seen_although_an_unchanged_file_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "own")
    monkeypatch.setattr(manifest, "_SETTLED_NS", -(10**12))  # as if all had been written long ago
    reads: list[Path] = []
    digest = manifest.paths.digest
    monkeypatch.setattr(manifest.paths, "digest", lambda path: reads.append(path) or digest(path))
    assert fault(path) == fault(path) == ""
    assert len(reads) == len(FILES)
    changed = path.with_name("two.json")
    times = changed.stat()
    while changed.stat().st_ctime_ns == times.st_ctime_ns:  # the kernel's time moves every few milliseconds
        changed.write_text("[]\n", encoding="utf8")  # as long as before
        os.utime(changed, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fault(path) == "two.json is altered"


def test_setting_aside_loses_nothing(tmp_path: Path) -> None:
    for text in ("first", "second", "third"):
        (tmp_path / "run-1").mkdir()
        (tmp_path / "run-1" / "file").write_text(text, encoding="utf8")
        set_aside(tmp_path / "run-1")
    names = ["run-1.aside", "run-1.aside-2", "run-1.aside-3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert [(tmp_path / name / "file").read_text() for name in names] == ["first", "second", "third"]
