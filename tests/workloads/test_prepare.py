"""Token files: true to the text, made once, found again without the libraries, errors in one message."""

from __future__ import annotations

import io
import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest.mock
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from tokenizers import Tokenizer

from testbed.errors import SpecError
from testbed.sweep import controller
from testbed.workloads import models, prepare, sources, texts
from testbed.workloads.prepare import prepare_tokens
from testbed.workloads.sources import ASSETS
from tests.altered import ALTERATIONS
from tests.specs import text_spec

TEXT = "One nation, «indivisible»,\nwith liberty\n\n\tand justice — for all. 日本語 🙂\n" * 300


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf8")
    return path


def run(*arguments: str, home: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """In a fresh process with a home of its own."""
    start = ["-c", code] if code else ["-m", "testbed.workloads.prepare"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("XDG", "HF_"))} | {"HOME": str(home)}
    return subprocess.run(
        [sys.executable, *start, *arguments], capture_output=True, text=True, env=environment, check=False
    )


SHIPPED = dict(models.SIZES)
"""As they are before any test: others add sizes of their own for a while."""


def bundled_tokenizer() -> Any:
    return Tokenizer.from_file(str(ASSETS / "bpe4096.json"))


def test_the_tokens_are_the_text(text: Path, tmp_path: Path) -> None:
    made = prepare_tokens(str(text), "gpt2-mini", tmp_path / "cache")
    ids = np.load(made.path)
    assert ids.dtype == np.uint16
    assert len(ids) == made.tokens
    assert bundled_tokenizer().decode(ids.tolist()) == TEXT
    assert ids.max() < made.vocabulary == 4096


LINES = st.text(st.sampled_from("ab é🙂\u2028\x85\x0b\r\n\n"), max_size=40)
"""Only \\r and \\n end a line."""


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.sampled_from([".txt", ".xz", ".parquet"]), st.lists(LINES)), min_size=1, max_size=4))
def test_a_folder_is_its_files_one_after_another(files: list[tuple[str, list[str]]]) -> None:
    with tempfile.TemporaryDirectory() as name, unittest.mock.patch.multiple(sources, _BLOCK=7, _ROWS=2):
        folder, whole = Path(name) / "folder", ""
        folder.mkdir()
        for number, (ending, rows) in enumerate(files):
            path, text = folder / f"{number}{ending}", "".join(rows)
            if ending == ".parquet":
                parquet.write_table(pa.table({"body": pa.array(rows, pa.string())}), path)
                text = "".join(row if row.endswith("\n") else row + "\n" for row in rows)
            else:
                (lzma.open if ending == ".xz" else open)(path, "wb").write(text.encode())
            text = text.replace("\r\n", "\n").replace("\r", "\n")
            whole += "\n" * bool(text and whole and not whole.endswith("\n")) + text
        (folder / "notes.md").write_text("ignored")
        (folder / ".hidden.txt").write_text("ignored")
        (one := Path(name) / "one.txt").write_bytes(whole.encode())
        seen: list[float] = []
        with unittest.mock.patch.object(prepare, "_CHUNK_CHARACTERS", 8):
            if not whole:
                with pytest.raises(SpecError, match="is empty"):
                    prepare_tokens(str(folder), "gpt2-mini", Path(name))
                return
            made, expected = (prepare_tokens(str(each), "gpt2-mini", Path(name)) for each in (folder, one))
        assert made.path.read_bytes() == expected.path.read_bytes()
        read = "".join(sources.read_text(texts.local_files(str(folder)), seen.append))
        assert read == whole
        assert seen == sorted(seen)
        assert seen[-1] == 1


@settings(deadline=None, max_examples=10)
@given(st.lists(st.lists(st.integers(0, 4095), min_size=1), min_size=1, max_size=4))
def test_files_of_tokens_are_these_tokens(files: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as name, unittest.mock.patch.object(sources, "_BLOCK", 3):
        for number, ids in enumerate(files):
            (Path(name) / f"{number}.bin").write_bytes(struct.pack(f"<{len(ids)}H", *ids))
        made, expected = prepare_tokens(name, "gpt2-mini", Path(name) / "cache"), [id_ for ids in files for id_ in ids]
        assert np.load(made.path, mmap_mode="r").tolist() == expected
        assert made.tokens == len(expected)
        saved = io.BytesIO()
        np.save(saved, np.array(expected, np.uint16))
        assert made.path.read_bytes() == saved.getvalue()


def test_the_progress_of_a_text_is_told(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(sources, "_BLOCK", 4096)
    prepare_tokens(str(text), "gpt2-mini", tmp_path, show=shares.append)
    assert shares == sorted(shares)
    assert len(shares) > 5
    assert shares[-1] == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = (
        "import sys; from testbed.workloads import prepare; prepare._SHOW_S = -1; "
        "sys.exit(prepare.main(sys.argv[1:] + ['--progress']))"
    )
    lines = run("--text", str(text), "--model", "gpt2-mini", home=tmp_path, code=program).stdout.splitlines()
    assert lines[0].startswith(texts.PROGRESS)
    assert json.loads(lines[-1])["vocabulary"] == 4096


def test_nothing_but_the_token_file_is_kept(text: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    found = run("--text", str(text), "--model", "gpt2", home=home)
    assert found.returncode == 0, found.stderr
    path = Path(json.loads(found.stdout)["path"])
    kept = [p for p in home.rglob("*") if p.is_file()]
    assert sorted(kept) == [path.with_suffix(".json"), path.with_suffix(".manifest.json"), path]
    assert path.parent == home / ".cache" / "testbed" / "tokens"
    assert found.stderr == ""


def test_the_name_follows_the_content(text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = prepare_tokens(str(text), "gpt2-mini", cache)
    assert prepare_tokens(str(text), "gpt2-nano", cache) == first  # the same tokenizer
    shutil.copy(text, elsewhere := tmp_path / "copy.txt")
    assert prepare_tokens(str(elsewhere), "gpt2-mini", cache) == first
    elsewhere.write_text(TEXT + "more", encoding="utf8")
    assert prepare_tokens(str(elsewhere), "gpt2-mini", cache).path != first.path
    with lzma.open(packed := tmp_path / "text.xz", "wt", encoding="utf8") as file:
        file.write(TEXT)
    assert np.array_equal(np.load(prepare_tokens(str(packed), "gpt2-mini", cache).path), np.load(first.path))


def test_a_second_call_needs_no_library(text: Path, tmp_path: Path) -> None:
    first = prepare_tokens(str(text), "gpt2-mini", tmp_path)
    heavy = ("torch", "transformers", "datasets", "tokenizers", "pyarrow")
    code = (
        f"import sys; from testbed.workloads.prepare import main; status = main(sys.argv[1:]); "
        f"sys.exit(status or [m for m in {heavy} if m in sys.modules] or 0)"
    )
    found = run("--text", str(text), "--model", "gpt2-mini", "--cache", str(tmp_path), home=tmp_path, code=code)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == {"path": str(first.path), "tokens": first.tokens, "vocabulary": 4096}


@pytest.mark.parametrize("alteration", ALTERATIONS)
@pytest.mark.parametrize("ending", [".npy", ".json", ".manifest.json"])
def test_an_altered_token_file_is_named_set_aside_and_made_again(
    text: Path, tmp_path: Path, ending: str, alteration: str
) -> None:
    first = prepare_tokens(str(text), "gpt2-mini", tmp_path)
    (tmp_path / "other.txt").write_text("another text\n" * 9, encoding="utf8")
    other = prepare_tokens(str(tmp_path / "other.txt"), "gpt2-mini", tmp_path)
    kept = {end: first.path.with_suffix(end).read_bytes() for end in (".npy", ".json", ".manifest.json")}
    ALTERATIONS[alteration](first.path.with_suffix(ending), other.path.with_suffix(ending))
    notes: list[str] = []
    assert prepare_tokens(str(text), "gpt2-mini", tmp_path, notes.append) == first
    assert {end: first.path.with_suffix(end).read_bytes() for end in kept} == kept
    if (ending, alteration) == (".manifest.json", "removed"):
        assert notes == [], "as an older testbed left it: made again"
    else:
        (note,) = notes
        assert ending in note.partition(";")[0]
        assert list(first.path.parent.glob("*.aside"))
    assert prepare_tokens(str(text), "gpt2-mini", tmp_path, never) == first


def never(message: str) -> None:
    raise AssertionError(message)


@pytest.mark.slow
def test_a_sweep_says_that_tokens_are_made_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """0.0 was believed here: the same cell, a certificate that passes, and another loss."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text.write_text(TEXT * 9, encoding="utf8")
    workload = text_spec(text=str(text), sequence_length=16)
    path = controller.prepare(workload).path
    good = path.read_bytes()
    path.write_bytes(good[:2000] + bytes(1000) + good[3000:])
    assert capsys.readouterr().err == ""
    assert controller.prepare(workload).path == path
    assert path.read_bytes() == good
    assert f"testbed: prepared data in {path.parent} is made again: {path.name} is altered" in capsys.readouterr().err


@pytest.mark.slow
def test_the_bundled_text_in_chunks_is_the_text_in_one_piece(tmp_path: Path) -> None:
    ids = np.load(prepare_tokens("bundled", "gpt2-mini", tmp_path).path)
    whole = lzma.decompress((ASSETS / "sotu_half.txt.xz").read_bytes()).decode("utf8")
    assert np.array_equal(ids, bundled_tokenizer().encode(whole).ids)


def test_a_checkpoint_brings_its_tokenizer(text: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    with pytest.raises(SpecError, match=r"save_pretrained"):
        prepare_tokens(str(text), str(checkpoint), tmp_path)
    tokenizer = json.loads((ASSETS / "bpe4096.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 70_000, "content": "<|far|>"})
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    made = prepare_tokens(str(text), str(checkpoint), tmp_path)
    assert np.load(made.path).dtype == (np.uint32 if made.vocabulary > 65536 else np.uint16)
    assert made.path != prepare_tokens(str(text), "gpt2", tmp_path).path


@pytest.mark.slow
def test_errors_are_one_message_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "latin1.txt").write_bytes("où\n".encode("latin1") * 10)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "torn.xz").write_bytes((ASSETS / "sotu_half.txt.xz").read_bytes()[:5000])
    expected = {"missing.txt": "no file", "latin1.txt": "not UTF-8", "empty.txt": "empty", "torn.xz": "xz"}
    for name, message in expected.items():
        asked = ("--text", str(tmp_path / name), "--model", "gpt2-mini", "--cache", str(tmp_path / "c"))
        found = run(*asked, home=tmp_path)
        assert found.returncode == 2, (name, found)
        assert found.stderr.count("\n") == 1, found.stderr
        assert message in found.stderr
        assert found.stdout == ""
    assert [p.name for p in (tmp_path / "c" / "tokens").iterdir() if p.name.startswith(".")] == []


def test_folders_and_tokens_that_are_no_text(tmp_path: Path) -> None:
    for folder, files in {"none": ["a.md"], "both": ["a.txt", "b.bin"], "latin": ["a.txt", "b.txt"]}.items():
        (tmp_path / folder).mkdir()
        for each in files:
            (tmp_path / folder / each).write_text("ok")
    (tmp_path / "latin" / "b.txt").write_bytes("où\n".encode("latin1"))
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "large.bin").write_bytes(struct.pack("<2H", 1, 4096))
    expected = {
        "none": "no file that ends with .txt, .xz, .parquet, .bin",
        "both": "text and tokens",
        "latin": "b.txt is not UTF-8",
        "odd.bin": "3 bytes, which are not ids of 2 bytes",
        "large.bin": "has the id 4096, but the model knows 4096 tokens",
    }
    for name, message in expected.items():
        with pytest.raises(SpecError, match=message):
            prepare_tokens(str(tmp_path / name), "gpt2-mini", tmp_path / "c")
    assert SpecError.exit_status == 2


def test_a_text_is_as_long_as_a_workload_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "short.txt").write_text("Too short.")
    with pytest.raises(SpecError, match="use a longer text"):
        controller.prepare(text_spec(text=str(tmp_path / "short.txt")))


def test_every_named_size_knows_the_bundled_tokens() -> None:
    tokens = bundled_tokenizer().get_vocab_size()
    small = {name for name, size in SHIPPED.items() if size.vocabulary < tokens}
    assert small == {name for name in SHIPPED if "characters" in name}, "those have no tokenizer"


@pytest.mark.slow
def test_a_sweep_is_told_how_far_a_text_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text(TEXT * 30, encoding="utf8")
    shown: list[tuple[str, float]] = []
    spec = text_spec(text=str(tmp_path / "texts"), sequence_length=16)
    made = controller.prepare(spec, lambda *each: shown.append(each))
    assert np.load(made.path, mmap_mode="r").ndim == 1
    assert {name for name, _ in shown} == {spec.text}
    assert shown[-1][1] == 1.0
