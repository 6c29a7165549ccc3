"""state_transfer: what its tables hold, its figure, and its short form."""

from __future__ import annotations

import pytest

from testbed.report import publishing, style
from tests.commands import Command

NAME = "state_transfer"
FOLDER = Command.shipped / NAME


@pytest.mark.slow
def test_every_state_was_judged_and_played_through_all_its_codecs() -> None:
    with publishing.figures_program(FOLDER) as figures, style.applied():
        tables = figures.measured(FOLDER)
        expected = {
            (name, codec)
            for name, transfer in figures.state.STATES.items()
            if name != figures.state.QUICK
            for codec in transfer.arms
        }
        for table in tables:
            assert set(table[["state", "codec"]].itertuples(index=False, name=None)) == expected
        # Links as formulas are the floor, and what is lost of nothing is nothing.
        assert (tables.transfers.seconds >= tables.transfers.ideal_s).all()
        assert (tables.quality.error[tables.quality.codec.isin(["fp32", "zstd(fp32, 3)"])] == 0).all()
        coded = tables.quality.dropna()
        assert (coded.order0_bytes <= coded.payload_bytes).all()
        assert len(figures.draw(tables).axes) == len(tables.states)
