"""Floors of texts: drawn where an axis shows them, stated elsewhere, and marked in claims."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from testbed.metrics.verdicts import judge
from testbed.report import claim_rows, floors


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / floors.FILE).write_text("experiment,text,unigram_floor,bigram_floor\nmine,t,6.6,4.7\n", encoding="utf8")
    return tmp_path / "mine"


def test_a_floor_near_an_axis_is_drawn_and_one_far_away_is_stated(home: Path) -> None:
    figure, axes = plt.subplots()
    axes.set_ylim(5.5, 6.5)
    floors.draw_floors(axes, home)
    assert axes.get_ylim()[1] > 6.6
    assert [line.get_ydata()[0] for line in axes.lines] == [6.6, 6.6][: len(axes.lines)]
    assert [text.get_text() for text in axes.texts] == ["unigram floor 6.60", "bigram floor 4.70"]
    plt.close(figure)


def test_differences_have_floors_relative_to_their_base(home: Path) -> None:
    figure, axes = plt.subplots()
    axes.set_ylim(-0.1, 1)
    floors.draw_floors(axes, home, less=6.0)
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([0.6])
    assert axes.texts[1].get_text() == "bigram floor at -1.30"
    plt.close(figure)


@pytest.mark.parametrize(
    ("loss", "mark"), [(6.55, "word frequencies"), (6.0, "a bigram table"), (4.65, "a bigram table")]
)
def test_a_claim_at_a_loss_near_a_floor_or_above_one_is_marked(home: Path, loss: float, mark: str) -> None:
    assert mark in floors.floor_mark(home, loss)
    assert floors.floor_mark(home, 4.5) == floors.floor_mark(home.with_name("other"), loss) == ""
    home.mkdir()
    (home / claim_rows.FILE).write_text(
        '[[claim]]\nclaim = "c"\nours = "o"\nwhy = "w"\ncommand = "x"\ngrade = "B"\nnumber = "f"\nat_most = 0.0\n',
        encoding="utf8",
    )
    facts = {"judgement": judge("loss", {0: loss, 1: loss}, {0: loss, 1: loss + 0.1}, 0.0), "loss": loss}
    (claim,) = claim_rows.claims({"__file__": str(home / "figures.py"), "f": lambda folder: facts}, home)
    assert mark in claim.why
