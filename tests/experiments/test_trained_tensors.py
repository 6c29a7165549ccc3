"""byte_split and outlier_channels: their quick forms, and what their claims rest on."""

from __future__ import annotations

from pathlib import Path

import pandas
import pytest

from testbed.report import claims, publishing
from tests.commands import Command, program

NAMES = ("byte_split", "outlier_channels")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_quick_form_measures_draws_and_goes_on(name: str, tmp_path: Path) -> None:
    folder = Command.shipped / name
    said = []
    for arguments in (["measure.py", "--quick"], ["measure.py", "--quick"], ["figures.py"]):
        said.append(program(folder / arguments[0], *arguments[1:], "--output", str(tmp_path)))
        codecs = pandas.read_csv(tmp_path / "codecs.csv")
        assert not codecs.duplicated(["model", "text", "boundary", "direction", "codec"]).any()
    assert codecs[["bits", "error", "token_error"]].gt(0).all(axis=None)
    assert "GPT-2 nano, random" in said[-1]
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("name", NAMES)
def test_the_full_form_has_every_model_at_every_boundary(name: str) -> None:
    folder = Command.shipped / name
    codecs = pandas.read_csv(folder / "codecs.csv")
    assert set(codecs.model) == {"gpt2-mini", "gpt2-mini-trained", "smollm2-135m"}
    rows = codecs.groupby(["model", "text"]).size()
    boundaries = codecs.groupby("model").boundary.nunique()
    for (model, _), count in rows.items():
        assert count == 2 * boundaries[model] * codecs.codec.nunique()
    with publishing.figures_program(folder) as figures:
        made = publishing.claims_of(vars(figures), folder)
    assert made == claims.read_claims(folder / claims.FILE)
    assert all(claim.interval for claim in made)
