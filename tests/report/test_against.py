from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from testbed import results
from testbed.cli import make_app
from testbed.errors import ResultsError
from testbed.report.against import write_against
from testbed.report.cell_page import again
from testbed.report.index import write_index
from tests.synthetic import Pipeline, cell, pipe, profile, record_sweep, write_run

HOME = profile("home", pipe(80_000_000, 10_000_000), pipe(80_000_000, 10_000_000))


def _sweep(folder: Path, codecs: dict[str, int], **changes: int) -> Path:
    results.make_folder(folder)
    cells = {codec: cell(codec, HOME, **changes) for codec in codecs}
    for codec, payload in codecs.items():
        write_run(folder, cells[codec], Pipeline(HOME, payload_bytes=payload))
    return record_sweep(folder, cells.values())


def test_a_folder_against_itself_is_the_same(tmp_path: Path) -> None:
    ours = _sweep(tmp_path / "ours", {"fp32": 65_536, "int8": 16_640})
    theirs = tmp_path / "theirs"
    shutil.copytree(ours, theirs)
    page = write_against(ours, theirs)
    text = page.read_text()
    assert page.name == "against-theirs.html"
    assert "2 pairs, 2 of them of the same cell: ours is faster in 0, slower in 0" in text
    assert text.count("the same</small>") == 2
    assert "Settings that differ" not in text


@pytest.mark.slow
def test_what_is_faster_and_what_differs_is_said(tmp_path: Path) -> None:
    ours = _sweep(tmp_path / "ours", {"fp32": 65_536, "int8": 16_640}, steps=8)
    theirs = _sweep(tmp_path / "theirs", {"fp32": 650_000, "bf16": 32_768}, steps=9)
    text = write_against(ours, theirs).read_text()
    assert "1 pairs, 0 of them of the same cell: ours is faster in 1" in text
    assert "Only in ours: int8 over home." in text
    assert "Only in theirs: bf16 over home." in text
    assert '<tr><th scope="row">training.steps</th><td class="value">8</td><td class="value">9</td></tr>' in text


def test_folders_without_a_pair_are_an_error(tmp_path: Path) -> None:
    ours, theirs = _sweep(tmp_path / "a", {"fp32": 1000}), _sweep(tmp_path / "b", {"int8": 1000})
    with pytest.raises(ResultsError, match="they share no network and codec"):
        write_against(ours, theirs)


def test_the_commands_write_the_pages(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _sweep(tmp_path / name, {"fp32": 1000})
    told = CliRunner().invoke(make_app(), ["report", str(tmp_path / "a"), "--against", str(tmp_path / "b")])
    assert told.exit_code == 0, told.output
    told = CliRunner().invoke(make_app(), ["report", str(tmp_path)])
    assert told.exit_code == 0, told.output
    text = (tmp_path / "index.html").read_text()
    assert '<a href="a/against-b.html">b</a>' in text
    assert "python -m testbed report" in text  # no report was written yet


def test_an_index_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no result folder"):
        write_index(tmp_path)


def test_a_cell_is_made_again_by_the_command_of_its_sweep(tmp_path: Path) -> None:
    typed = "python -m testbed sweep mine.toml --again --results 'my results' --set training.steps=3"
    words = again(typed, tmp_path / "mine", "int8-home-1")
    assert words == (
        "python -m testbed sweep mine.toml --results 'my results' --set training.steps=3 --cell int8-home-1 --again"
    )
    assert again("", tmp_path / "mine", "x") == "python -m testbed sweep mine --cell x --again"
    alone = "python -m testbed run --codec int8"
    assert again(alone, tmp_path / "run", "x") == alone
