"""Texts from Parquet files and from the hub: a line a row, fetched once, and where nothing can be had one message,
soon.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from pyarrow import parquet

from testbed.errors import SpecError
from testbed.workloads import sources, texts
from testbed.workloads.prepare import prepare_tokens
from tests.workloads import small_hub
from tests.workloads.small_hub import serve

ROWS = [" = A title = \n", "", "two\nlines", "ünïcode 日本", " \n"] * 40
TEXT = "".join(row if row.endswith("\n") else row + "\n" for row in ROWS)
NAME, CONFIGURATION = "someone/some-text", "raw-v1"


def write(path: Path, column: str = "text", rows: list[Any] = ROWS, kind: pa.DataType | None = None) -> Path:
    parquet.write_table(pa.table({"id": list(range(len(rows))), column: pa.array(rows, kind or pa.string())}), path)
    return path


def tokens_of_the_same_text(folder: Path) -> npt.NDArray[np.integer]:
    (folder / "same.txt").write_text(TEXT, encoding="utf8")
    return np.load(prepare_tokens(str(folder / "same.txt"), "gpt2-mini", folder).path)  # type: ignore[no-any-return]


def test_a_parquet_file_is_its_rows(tmp_path: Path) -> None:
    expected = tokens_of_the_same_text(tmp_path)
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        path = write(tmp_path / "rows.parquet", kind=kind)
        assert np.array_equal(np.load(prepare_tokens(str(path), "gpt2-mini", tmp_path).path), expected)
    unnamed = write(tmp_path / "unnamed.parquet", "content")
    assert np.array_equal(np.load(prepare_tokens(str(unnamed), "gpt2-mini", tmp_path).path), expected)
    with_nulls = write(tmp_path / "nulls.parquet", rows=[None, *ROWS, None])
    assert np.array_equal(np.load(prepare_tokens(str(with_nulls), "gpt2-mini", tmp_path).path), expected)


def test_what_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.parquet", rows=[1, 2, 3], kind=pa.int64())
    with pytest.raises(SpecError, match=r"its columns are id: int64, text: int64; one must be text: string"):
        prepare_tokens(str(path), "gpt2-mini", tmp_path)
    parquet.write_table(pa.table({"title": ["a"], "content": ["b"]}), path)
    with pytest.raises(SpecError, match=r"title: string, content: string; one must be text: string, or the only"):
        prepare_tokens(str(path), "gpt2-mini", tmp_path)
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(write(tmp_path / "rows.parquet").read_bytes()[:300])
    with pytest.raises(SpecError, match=r"not a complete \.parquet file"):
        prepare_tokens(str(torn), "gpt2-mini", tmp_path)
    with pytest.raises(SpecError, match="is empty"):
        prepare_tokens(str(write(torn, rows=[])), "gpt2-mini", tmp_path)


def test_bundled_texts_come_with_the_package_and_others_are_listed(tmp_path: Path) -> None:
    for name in texts.BUNDLED:
        assert [path.is_file() for path in sources.text_files(name, tmp_path)] == [True]
    with pytest.raises(SpecError, match="'bundled' or 'moby-dick'"):
        sources.text_files("moby", tmp_path)


def test_names_of_the_hub() -> None:
    assert texts.hub_set("hub:Salesforce/wikitext:wikitext-2-raw-v1", "text") == (
        "Salesforce/wikitext",
        "wikitext-2-raw-v1",
    )
    assert texts.hub_set("hub:ag_news", "text") == ("ag_news", None)
    assert texts.hub_set("bundled", "text") is None
    for wrong in ("hub:", "hub:a/b/c", "hub:../../etc:x", "hub:a b", "hub:a:b:c", "hub:a/b:"):
        with pytest.raises(SpecError, match="wikitext-2-raw-v1"):
            texts.check_text_name(wrong)
    with pytest.raises(SpecError, match="no file 'wikitext'"):
        texts.check_text_name("wikitext")


def cached(home: Path, column: str = "text") -> None:
    """The data set, where there is no hub to fetch it from."""
    small_hub.cached(home, NAME, CONFIGURATION, {"train": write(home / "train.parquet", column)})


def run(home: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return small_hub.prepare(home, "--text", text, "--model", "gpt2-mini", **environment)


@pytest.fixture
def closed() -> str:
    return small_hub.closed()


@pytest.mark.slow
def test_a_cached_data_set_needs_no_network_and_then_no_cache(tmp_path: Path, closed: str) -> None:
    cached(tmp_path)
    found = run(tmp_path, f"hub:{NAME}:{CONFIGURATION}", HF_ENDPOINT=closed)
    assert found.returncode == 0, found.stderr
    expected = tokens_of_the_same_text(tmp_path)
    assert np.array_equal(np.load(json.loads(found.stdout)["path"]), expected)
    again = run(tmp_path, f"hub:{NAME}:{CONFIGURATION}", HF_HOME=str(tmp_path / "empty"), HF_ENDPOINT=closed)
    assert (again.returncode, again.stdout) == (0, found.stdout), again.stderr


@pytest.mark.slow
def test_a_data_set_in_reach_is_fetched_once(tmp_path: Path) -> None:
    card = (
        f"---\nconfigs:\n- config_name: {CONFIGURATION}\n  data_files:\n  - split: train\n    path: data.parquet\n---\n"
    )
    files = {"README.md": card.encode(), "data.parquet": write(tmp_path / "data.parquet").read_bytes()}
    with serve(NAME, files) as endpoint:
        first = run(tmp_path, f"hub:{NAME}:{CONFIGURATION}", HF_ENDPOINT=endpoint)
        assert first.returncode == 0, first.stderr
        for text, message in (
            (f"hub:{NAME}:other", "Available: ['raw-v1']"),
            ("hub:someone/nothing", "the hub refuses data set someone/nothing"),
        ):
            found = run(tmp_path, text, HF_ENDPOINT=endpoint)
            assert (found.returncode, found.stderr.count("\n")) == (2, 1), found.stderr
            assert message in found.stderr
    again = run(tmp_path, f"hub:{NAME}:{CONFIGURATION}", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "empty"))
    assert (again.returncode, again.stdout) == (0, first.stdout), again.stderr
    expected = tokens_of_the_same_text(tmp_path)
    assert np.array_equal(np.load(json.loads(first.stdout)["path"]), expected)


@pytest.mark.slow
def test_a_data_set_without_text(tmp_path: Path, closed: str) -> None:
    cached(tmp_path, column="content")
    found = run(tmp_path, f"hub:{NAME}:{CONFIGURATION}", HF_ENDPOINT=closed)
    assert found.returncode == 2
    assert "no column 'text'; its columns are id, content" in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refused", "offline"])
def test_a_data_set_that_cannot_be_had_is_one_message(how: str, tmp_path: Path, closed: str) -> None:
    environment = {"HF_ENDPOINT": closed} if how == "refused" else {"HF_HUB_OFFLINE": "1"}
    found = run(tmp_path, "hub:Salesforce/wikitext:wikitext-2-raw-v1", **environment)
    assert found.returncode == 2
    assert found.stderr.count("\n") == 1
    assert found.stdout == ""
    why = closed if how == "refused" else "HF_HUB_OFFLINE is set"
    for part in (
        str(tmp_path / "hf" / "datasets"),
        why,
        "load_dataset('Salesforce/wikitext', 'wikitext-2-raw-v1')",
        ".parquet",
    ):
        assert part in found.stderr


@pytest.mark.slow
def test_a_hub_that_says_nothing_is_not_asked_again(tmp_path: Path) -> None:
    """Ten seconds are waited, once; libraries left to themselves connect again and again, for minutes."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        found = run(tmp_path, "hub:Salesforce/wikitext", HF_ENDPOINT=f"http://127.0.0.1:{server.getsockname()[1]}")
        server.setblocking(False)
        asked = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                server.accept()[0].close()
                asked += 1
    assert found.returncode == 2
    assert "is unreachable" in found.stderr
    assert 1 <= asked <= 2  # huggingface_hub itself asks what it is used by
