"""A figure program is run from a folder of CSVs: what it makes of them is what the experiment commits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from testbed.report.blocks import read_blocks
from tests.commands import Command, draw


@pytest.mark.parametrize("name", ["dice", "four_regions"])
def test_a_program_makes_the_claims_blocks_and_figures_that_are_committed(name: str, tmp_path: Path) -> None:
    folder = Command.shipped / name
    for path in folder.glob("*.csv"):
        if path.name not in ("claims.csv", "published.csv"):
            shutil.copy(path, tmp_path)
    said = draw(folder, tmp_path, tmp_path)
    assert (tmp_path / "claims.csv").read_bytes() == (folder / "claims.csv").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} >= {path.name for path in folder.glob("*.[pcs][nsv][gv]")}
    for text in read_blocks(folder / "README.md").values():
        assert text.strip() in said
