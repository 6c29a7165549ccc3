"""codec_or_baseline: its arithmetic meets the rows on which it is fitted, and its factors multiply to each headline."""

from __future__ import annotations

import math

import pytest

from testbed.report import publishing
from tests.commands import Command

FOLDER = Command.shipped / "codec_or_baseline"


def test_rows_on_which_a_table_is_fitted_are_met_exactly_unless_the_wire_alone_takes_longer() -> None:
    with publishing.figures_program(FOLDER) as figures:
        model = figures.model
        for name, rows in model.published().groupby("table", sort=False):
            table = model.tables()[name]
            if table.kind == "1f1b":
                continue  # a second
            fit = model.fitted(table, rows)
            for at in model._used(table, rows):
                met, said = model.step_s(table, rows.loc[at], fit), table.seconds(rows.value[at])
                assert met == pytest.approx(said, rel=1e-4) or (fit.compute == 0 and met > said), (name, at)


def test_factors_multiply_to_the_published_headline() -> None:
    with publishing.figures_program(FOLDER) as figures:
        for name, row in figures.shares(FOLDER).iterrows():
            factors = [row[part] for part in (*figures.PARTS, "unexplained")]
            assert math.prod(factors) == pytest.approx(row.published, rel=1e-4), name
            table = figures.model.tables()[name]
            assert row["format"] == pytest.approx(1) or table.bits == 32, "a baseline of 16 bits has no wider wires"
            assert row["format"] <= 2.0 + 1e-4, "half of the bytes never gain more than twice"
            assert row.overlap >= 1 - 1e-4, "a better schedule is not slower"


def test_every_table_has_numbers_and_every_number_a_table() -> None:
    with publishing.figures_program(FOLDER) as figures:
        model = figures.model
        assert list(dict.fromkeys(model.published().table)) == list(model.tables())
        for name, rows in model.published().groupby("table"):
            assert model.tables()[name].baseline in set(rows.arm), name


def test_a_step_needs_no_less_time_with_more_bytes_or_more_compute() -> None:
    with publishing.figures_program(FOLDER) as figures:
        model = figures.model
        for name, rows in model.published().groupby("table"):
            table, row = model.tables()[name], rows.iloc[-1]
            if table.kind == "1f1b":
                continue
            for better in (False, True):
                least = model.step_s(table, row, model.Fit(1e-4, 1.0), better=better)
                assert model.step_s(table, row, model.Fit(2e-4, 1.0), better=better) >= least
                assert model.step_s(table, row, model.Fit(1e-4, 2.0), better=better) >= least
