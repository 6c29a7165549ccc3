from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from testbed import results
from testbed.export import columns as export_columns
from testbed.report import collect, numbers, tables
from testbed.report.certificate_text import certificate_table
from testbed.report.collect import latest
from testbed.report.page import write_report
from testbed.report.style import looks
from testbed.report.tables import terminal_table
from tests.synthetic import Pipeline, cell, change_summary, pipe, profile, write_run


def printed(table: object, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()


@pytest.fixture
def runs(experiment: Path) -> list[results.Run]:
    return latest(experiment, results.last_sweep(experiment).cells)


@given(st.floats(1e-4, 1e9))
def test_three_digits_are_within_half_of_the_last(value: float) -> None:
    text = numbers.three(value)
    assert "e" not in text
    assert float(text) == pytest.approx(value, rel=0.006, abs=1e-6)


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_not_known_is_a_dash(value: float | None) -> None:
    assert numbers.three(value) == "-"
    assert numbers.seconds(None) == numbers.size(None) == "-"


@pytest.mark.slow
def test_the_table_shows_every_cell_of_the_last_sweep(runs: list[results.Run]) -> None:
    assert len(runs) == 12
    lines = printed(terminal_table(runs), 120)
    profiles = [line.split()[0] for line in lines if line.split() and line.split()[0] in ("unshaped", "home", "cable")]
    assert profiles == ["unshaped", "home", "cable"]
    rows = [line for line in lines if line.rstrip().endswith(("pass", "FAIL"))]
    assert len(rows) == 11
    assert [row.split()[1] for row in rows if row.startswith("○")] == ["int8"]
    assert any("is not finite" in line for line in lines)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(runs: list[results.Run], width: int) -> None:
    rows = [line for line in printed(terminal_table(runs), width) if line.strip().startswith("fp32")]
    assert len(rows) == 3
    for row in rows:
        assert len(row.rstrip()) <= width
        assert row.rstrip().endswith("pass")
        assert len(row.split()) == 10


def test_rows_of_numbers_end_below_each_other(runs: list[results.Run]) -> None:
    rows = [line for line in printed(terminal_table(runs), 120) if "x " in line and line.rstrip().endswith("pass")]
    ends = [
        [i for i, (a, b) in enumerate(zip(row, row[1:] + " ", strict=True)) if a.isalnum() and b == " "] for row in rows
    ]
    assert len({tuple(row[1:-1]) for row in ends}) == 1


def test_missing_numbers_are_dashes(tmp_path: Path) -> None:
    what = cell("int8")
    run = write_run(tmp_path, what, Pipeline(what.profiles[0]))
    change_summary(run, wire_bytes_per_step=None, efficiency=None)
    (row,) = [line for line in printed(terminal_table([run]), 100) if " int8 " in line]
    assert row.split().count("-") == 3  # no fp32 to compare with, either


def test_two_profiles_of_one_name_stay_apart(tmp_path: Path) -> None:
    for delay in (1, 2):
        link = profile("home", pipe(80_000_000, delay), pipe(80_000_000, delay))
        write_run(tmp_path, cell("fp32", link), Pipeline(link))
    (group,) = collect.groups(collect.read_runs(latest(tmp_path)))
    assert len(group.networks) == 2
    assert all(name.startswith("home [") for name in group.networks)


def test_the_newest_run_that_ended_well_counts(tmp_path: Path) -> None:
    what = cell()
    good = write_run(tmp_path, what, Pipeline(what.profiles[0]))
    write_run(tmp_path, what, Pipeline(what.profiles[0]), failure="lost")
    assert latest(tmp_path) == [good]
    assert latest(tmp_path, cell_ids=()) == []


def test_a_certificate_is_shown_with_its_units(runs: list[results.Run]) -> None:
    certificate = runs[0].certificates.before
    assert certificate is not None
    text = "\n".join(printed(certificate_table(certificate), 120))
    assert all(word in text for word in ("Mbit/s", "rtt, idle", "PASS", "step change"))


@pytest.mark.usefixtures("undrawn")
def test_a_metric_is_shown_by_its_row_alone(
    monkeypatch: pytest.MonkeyPatch, runs: list[results.Run], experiment: Path, tmp_path: Path
) -> None:
    """A newcomer adds only this: exports and the combination of runs follow from the field of Summary."""
    column = tables.ResultColumn("training time", "s", "wall\n", lambda cell: f"{cell.summary.wall_s:.6f}")
    monkeypatch.setattr(tables, "COLUMNS", (*tables.COLUMNS, column))
    shown = {f"{run.summary.wall_s:.6f}" for run in runs if run.summary is not None and run.summary.status == "ok"}
    assert len(shown) > 1
    text = "\n".join(printed(terminal_table(runs), 160))
    page = write_report(experiment, tmp_path / "report.html").read_text()
    assert all(number in text and f">{number}<" in page for number in shown)
    assert "wall_s" in {column.name for column in export_columns.TABLES["runs"]}


@given(st.lists(st.text("abcdefgh-:.", min_size=1, max_size=8), max_size=24))
def test_every_codec_has_a_look_of_its_own(names: list[str]) -> None:
    look_of = looks([*names, "fp32", "int8"])
    known = {"fp32", "int8"} & set(look_of)
    assert len({look_of[name].colour for name in known}) == len(known)
    assert look_of["fp32"] == looks(["fp32"])["fp32"]
    others = set(names) - {"fp32", "int8", "bf16", "delta-int8"}
    assert len({look_of[name].colour for name in others}) == min(len(others), 6)
    assert len({(look_of[name].colour, look_of[name].marker, look_of[name].dash) for name in others}) == len(others)


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_an_interval_is_written_if_its_ends_read_differently(low: float, width: float) -> None:
    for form in (numbers.three, "{:.2f}".format):
        ends = form(low), form(low + width)
        assert numbers.interval((low, low + width), form) == ("" if ends[0] == ends[1] else f"[{ends[0]}, {ends[1]}]")
    assert numbers.interval(None, numbers.three) == ""
