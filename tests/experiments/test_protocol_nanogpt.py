"""protocol_nanogpt: what was only computed is not said to have been played."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest

from testbed.report import publishing
from tests.commands import Command

FOLDER = Command.shipped / "protocol_nanogpt"


@pytest.mark.slow
def test_no_number_stands_for_a_step_that_was_not_played(tmp_path: Path) -> None:
    for path in FOLDER.glob("*.csv"):
        shutil.copy(path, tmp_path)
    cells = pd.read_csv(tmp_path / "cells.csv")
    cells.loc[cells.grid == "buffer", ["step_s", "retransmitted_bytes"]] = None
    cells.to_csv(tmp_path / "cells.csv", index=False)
    with publishing.figures_program(FOLDER) as figures:
        whole, short = (publishing.claims_of(vars(figures), folder) for folder in (FOLDER, tmp_path))
        text = "".join(publishing.blocks_of(vars(figures), tmp_path).values())
    assert len(short) == len(whole) - 1
    assert "nan" not in text.replace(FOLDER.name, "").lower().replace("nanogpt", "")
