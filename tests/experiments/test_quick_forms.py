"""The short form of an experiment goes through all its steps and judges something; those of cells.toml alone are in
tests/predict/test_predict.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.report.claims import read_claims
from tests.commands import Command

NAMES = (
    "aqsgd_finetuning", "clocks", "codec_or_baseline", "compactfusion", "context_parallel", "cost_of_failures",
    "dagc", "data_parallel_time", "decode", "deco_sgd", "deco_varying", "dice", "diloco_scale", "fedht", "fedluck",
    "gloo_on_home_links", "jitter_and_stragglers", "local_steps_or_codec", "mesongs", "mixed_precision",
    "networks_x_codecs", "newer_methods", "one_shot", "protocol_nanogpt", "sites", "state_transfer",
    "subspace_growth", "subspace_ratio", "topk_knee", "varying_links",
)  # fmt: skip
"""Those without tests of their own for more than this."""
ELSEWHERE = {"byte_split", "default", "outlier_channels", "codec_quality", "seed_activation_delta", "subspace_80mbps"}
"""Tested in test_trained_tensors.py, by the tests of sweeps, and in files of their own."""


def test_no_experiment_is_without_a_test_of_its_short_form() -> None:
    steps = {
        path.parent.name for name in ("sweep.toml", "reproduce.toml") for path in Command.shipped.glob(f"*/{name}")
    }
    assert steps == ELSEWHERE | set(NAMES)


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
