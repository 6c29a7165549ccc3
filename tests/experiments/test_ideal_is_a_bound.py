"""No published cell was played in less than its ideal."""

from pathlib import Path

import pytest

from testbed import paths
from testbed.report import predicted


@pytest.mark.parametrize(
    "folder", [path.parent for at in paths.experiment_folders() for path in sorted(at.glob("*/cells.toml"))], ids=str
)
def test_no_step_is_shorter_than_its_ideal(folder: Path) -> None:
    frame = predicted.cells(folder)
    played = frame[frame.step_s.notna() & frame.ideal_s.notna()]
    over = played[played.ideal_s > played.step_s * (1 + predicted.ROUNDED)]
    assert over.empty, over[["cell", "step_s", "ideal_s"]].to_string()
