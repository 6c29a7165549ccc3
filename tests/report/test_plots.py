"""What the figures of experiments share: an axis shows what it is told to, and marks stand where numbers are."""

from __future__ import annotations

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from testbed.metrics.verdicts import judge
from testbed.report import plots
from testbed.report.numbers import span

NUMBERS = st.floats(-1e3, 1e3)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(-20, 20), min_size=1, unique=True), NUMBERS, st.floats(1, 50))
def test_ticks_name_the_places_that_an_axis_shows_and_do_not_widen_it(
    places: list[int], low: float, width: float
) -> None:
    axes = Figure().add_subplot()
    axes.set_xlim(low, low + width)
    plots.ticks(axes.xaxis, sorted(places), "{:g} %".format)
    assert axes.get_xlim() == (low, low + width)
    at = axes.xaxis.get_majorticklocs()
    assert list(at) == sorted(places)
    assert axes.xaxis.get_major_formatter().format_ticks(at) == [f"{place} %" for place in sorted(places)]
    assert not len(axes.xaxis.get_minorticklocs())


def test_estimates_are_marks_with_intervals_and_what_is_not_known_is_left_out() -> None:
    base = {0: 1.0, 1: 1.1, 2: 1.2}
    found = judge("loss", {0: 1.3, 1: 1.5, 2: 1.4}, base)
    single = judge("loss", {0: 1.3}, {0: 1.0})
    assert found.interval is not None
    for across in (False, True):
        axes = Figure().add_subplot()
        plots.estimates(axes, [(1, found), (2, None), (3, single)], "#123456", across=across)
        ends, marks = axes.lines
        places, numbers = (line.get_ydata() if across else line.get_xdata() for line in (ends, marks)), marks
        assert [list(each) for each in places] == [[1, 1], [1, 3]]
        values = numbers.get_xdata() if across else numbers.get_ydata()
        assert list(values) == [found.value, single.value]
        assert list(ends.get_xdata() if across else ends.get_ydata()) == list(found.interval)


def test_a_curve_leaves_out_places_that_a_seed_lacks() -> None:
    rows = pd.DataFrame({"step": [1, 1, 2, 2, 3], "seed": [0, 1, 0, 1, 0], "loss": [5.0, 6.0, 3.0, 4.0, 1.0]})
    axes = Figure().add_subplot()
    plots.curve(axes, rows, "step", "loss", "#123456", "two seeds")
    (line,) = axes.lines
    assert list(line.get_xdata()) == [1, 2]
    assert list(line.get_ydata()) == [5.5, 3.5]


def test_one_legend_has_each_label_once_of_axes_or_handles() -> None:
    figure, ((left, right),) = plots.panels(1, 2, (4, 2))
    for axes, labels in ((left, "ab"), (right, "bc")):
        for label in labels:
            axes.plot([0, 1], label=label)
    plots.finish(figure, "It is so", [left, right])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "c"]
    assert figure.get_suptitle() == "It is so"
    other, _ = plots.panels(1, 1, (2, 2))
    plots.finish(other, legend=[Line2D([], [], label="by hand")])
    assert [text.get_text() for text in other.legends[0].get_texts()] == ["by hand"]


@pytest.mark.parametrize(("values", "said"), [([1.0, 3.0, 2.0], "1.0 to 3.0 s"), ([2.01, 1.99], "2.0 s")])
def test_a_span_that_reads_alike_at_both_ends_is_one_number(values: list[float], said: str) -> None:
    assert span(values, "{:.1f}".format, " s") == said
