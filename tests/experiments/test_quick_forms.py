"""The short form of an experiment goes through all its steps and judges something; those of cells.toml alone are in
tests/predict/test_predict.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.report.claims import read_claims
from tests.commands import Command

NAMES = (
    "aqsgd_finetuning", "compactfusion", "cost_of_failures", "dagc", "deco_sgd", "deco_varying", "dice", "diloco_scale",
    "fedht", "fedluck", "jitter_and_stragglers", "local_steps_or_codec", "mesongs", "mixed_precision", "newer_methods",
    "one_shot", "sites", "state_transfer", "subspace_growth", "subspace_ratio", "topk_knee",
)  # fmt: skip
"""Those without tests of their own for more than this."""


@pytest.mark.clock_kernel
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_goes_through_and_makes_claims(name: str, command: Command, tmp_path: Path) -> None:
    command.finish("reproduce", name, "--quick")
    drawn = tmp_path / "results" / "quick" / name / "drawn"
    assert read_claims(drawn / "claims.csv")
    made, committed = ({path.name: path for path in at.glob("*.png")} for at in (drawn, Command.shipped / name))
    assert made.keys() == committed.keys(), "it draws what is committed"
    assert all(path.stat().st_size > 0 for path in made.values())
