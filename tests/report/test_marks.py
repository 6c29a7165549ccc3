"""What must be known of a number goes wherever the number goes: how it was tuned, and the unigram floor."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed import results
from testbed.records import NEAR_FLOOR
from testbed.report import collect, lines
from testbed.report.settings import settings_words
from testbed.spec import Cell
from tests.synthetic import Pipeline, cell, change_summary, record_sweep, write_run

RATE = "optimiser.learning_rate"


def with_rate(codec: str, rate: float) -> Cell:
    what = cell(codec, steps=4)
    return what.model_copy(update={"optimiser": what.optimiser.model_copy(update={"learning_rate": rate})})


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two codecs at rates that were chosen for them, and both again at two rates that they state."""
    folder = results.make_folder(tmp_path_factory.mktemp("results") / "swept")
    chosen = [with_rate("fp32", 3e-3), with_rate("int8", 1e-3)]
    stated = [with_rate(codec, rate) for rate in (1e-4, 1e-2) for codec in ("fp32", "int8")]
    for what in (*chosen, *stated):
        run = write_run(folder, what, Pipeline(what.profiles[0]))
        loss = change_summary(run).validation_loss
        assert loss is not None
        change_summary(run, unigram_floor=loss + (NEAR_FLOOR / 2 if what == chosen[1] else 1.0), bigram_floor=1.25)
    marks = {chosen[1].id: f"{RATE} at the end of the values tried"}
    return record_sweep(folder, (*chosen, *stated), tuned=True, marks=marks, stated=tuple(what.id for what in stated))


def test_marks_stand_with_the_arm_that_they_are_of_and_no_other(swept: Path) -> None:
    groups = collect.groups(collect.read_runs(collect.latest(swept)))
    marks = {(entry.cell.codec, entry.cell.optimiser.learning_rate): entry.marks for g in groups for entry in g.entries}
    tuned = marks.pop(("int8", 1e-3))
    assert any("at the end of the values tried" in mark for mark in tuned)
    assert any("unigram floor" in mark and "(bigram floor: 1.25)" in mark for mark in tuned)
    assert not any("values tried" in mark or "floor" in mark for several in marks.values() for mark in several)


def test_what_states_a_value_stands_apart_and_what_was_chosen_stays_together(swept: Path) -> None:
    groups = collect.groups(collect.read_runs(collect.latest(swept)))
    rates = [{entry.cell.optimiser.learning_rate for entry in group.entries} for group in groups]
    assert sorted(map(sorted, rates)) == [[1e-4], [1e-3, 3e-3], [1e-2]]
    for group in groups:
        assert set(group.codecs) == {"fp32", "int8"}
        assert group.compared(next(iter(group.networks)), group.entries[1]) is not None
        assert settings_words(group)


def test_the_floor_is_drawn_where_it_lies_within_the_axis_and_named_in_the_caption(swept: Path) -> None:
    groups = collect.groups(collect.read_runs(collect.latest(swept)))
    (group,) = [group for group in groups if RATE in group.own and "as" in group.label]
    known = lines.floors(group)
    assert list(known) == ["unigram", "bigram"]
    drawing = lines.loss_against_time(group, "settings")
    (axes,) = drawing.figure.axes
    low, high = axes.get_ylim()
    level = [line.get_ydata() for line in axes.lines if len(line.get_ydata()) == 2]
    drawn = {ends[0] for ends in level if ends[0] == ends[1]}
    every = [floor for values in known.values() for floor in values]
    assert {floor for floor in every if low <= floor <= high} <= drawn
    for floor in every:
        assert f"{floor:.2f}" in drawing.caption


def test_a_caption_names_the_floors_that_are_known() -> None:
    frequencies = "the frequency of each token in the training part"
    old = f" Unigram floor: 6.60 nats, the loss of a model that knows only {frequencies}."
    assert lines.floor_words({}) == ""
    assert lines.floor_words({"unigram": [6.6]}) == old
    both = lines.floor_words({"unigram": [6.6], "bigram": [4.7, 4.9]})
    assert both.startswith(old)
    assert "Bigram floor: 4.70 or 4.90 nats" in both


def test_old_results_without_a_bigram_floor_name_the_unigram_floor(swept: Path) -> None:
    groups = collect.groups(collect.read_runs(collect.latest(swept)))
    entry = next(each for group in groups for each in group.entries if each.ok)
    assert list(entry.measured.floors) == ["unigram", "bigram"]
    old = entry.measured.model_copy(update={"bigram_floor": None})
    assert list(old.floors) == ["unigram"]
    assert old.model_copy(update={"unigram_floor": None}).floors == {}
