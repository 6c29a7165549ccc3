"""What the figure programs of experiments/ are built on."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

import testbed
from testbed.errors import ResultsError, SpecError
from testbed.metrics.verdicts import judge
from testbed.report import experiments, plots, publishing


@pytest.mark.slow
def test_only_runs_that_ended_well_are_read(experiment: Path) -> None:
    every, good = testbed.load(experiment), experiments.runs_frame(experiment)
    assert 0 < len(good) < len(every)
    assert set(good.status) == {"ok"}
    assert list(good.profile) == list(good.network)
    assert not good.certified.all()
    assert good[good.certified].certificate.eq("PASS").all()


@pytest.mark.slow
def test_curves_have_every_evaluation_at_the_time_of_training(experiment: Path) -> None:
    curves, runs = experiments.curves(experiment), experiments.runs_frame(experiment)
    for run in runs.itertuples():
        one = curves[(curves.cell_id == run.cell_id) & (curves.run == run.run)]
        steps = testbed.steps(experiment / run.folder)
        trained = steps[steps.phase == "train"].step_s.sum()
        assert one.end_s.max() == pytest.approx(trained)
        assert one.end_s.is_monotonic_increasing or one.sort_values("step").end_s.is_monotonic_increasing
        assert one[one.phase == "evaluation"].loss.iloc[-1] == run.validation_loss


def test_a_caption_names_engine_transport_machine_and_what_is_not_certified(experiment: Path) -> None:
    runs = experiments.runs_frame(experiment)
    words = experiments.caption(runs)
    assert set(runs.engine) <= set(words.split()[1].rstrip(";").split("|"))
    for part in (*runs.transport, *runs.machine, *runs.pipeline):
        assert part in words
    assert "not certified" in words
    assert "not certified" not in experiments.caption(runs[runs.certified])


def test_a_folder_without_a_good_run_is_an_error(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = testbed.load(experiment)
    monkeypatch.setattr(testbed, "load", lambda _: every[every.status != "ok"])
    with pytest.raises(ResultsError, match="no run"):
        experiments.runs_frame(experiment)


def test_a_table_has_a_line_for_each_row_and_a_dash_for_what_is_missing() -> None:
    frame = pd.DataFrame({"codec": ["int8", "fp32"], "loss": [5.4321, np.nan], "runs": [3, 12]})
    head, rule, *rows = experiments.markdown_of(frame).splitlines()
    assert head == "| codec | loss | runs |"
    assert rule == "| --- | ---: | ---: |"
    assert rows == ["| int8 | 5.432 | 3 |", "| fp32 | – | 12 |"]  # noqa: RUF001


def test_a_band_holds_every_seed() -> None:
    axes = Figure().add_subplot()
    losses = [[5.0, 4.0, 3.5], [5.2, 3.8, 3.4], [5.1, 4.1, 3.0]]
    plots.band(axes, [1, 2, 3], losses, "#123456", "three")
    (line,), (area,) = axes.lines, axes.collections
    assert list(line.get_ydata()) == pytest.approx(np.mean(losses, axis=0))
    corners = area.get_paths()[0].vertices
    for x, column in zip([1, 2, 3], zip(*losses, strict=True), strict=True):
        heights = corners[corners[:, 0] == x][:, 1]
        assert (heights.min(), heights.max()) == (min(column), max(column))
    with pytest.raises(ValueError, match="each seed needs one at each point"):
        plots.band(axes, [1, 2], losses, "#123456", "three")


def test_figures_are_written_with_the_same_bytes_and_no_large_svg(tmp_path: Path) -> None:
    def drawn(points: int) -> list[Path]:
        figure = Figure()
        figure.add_subplot().plot(np.random.default_rng(0).random(points), "o")
        return publishing.save_figure(figure, tmp_path, "one")

    png, svg = drawn(10)
    first = png.read_bytes(), svg.read_bytes()
    assert matplotlib.image.imread(png).std() > 0
    drawn(10)
    assert (png.read_bytes(), svg.read_bytes()) == first
    assert drawn(9_000) == [png]
    assert not svg.exists()


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=3))
def test_three_numbers_tell_three_seeds(values: list[float]) -> None:
    told = experiments.seed_values(float(np.mean(values)), min(values), max(values), len(values))
    assert sorted(told) == pytest.approx(sorted(values), abs=1e-9)


def test_four_seeds_are_not_told_by_three_numbers() -> None:
    with pytest.raises(ValueError, match="4 seeds"):
        experiments.seed_values(0.0, -1.0, 1.0, 4)


def test_a_loss_is_judged_alike_from_runs_and_from_their_summary(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    losses = {codec: 5 + rng.normal(0.2 * (codec == "int2"), 0.01, 3) for codec in ("fp32", "int2")}
    rows = [
        {"codec": codec, "seed": seed, "validation_loss": loss, "tuned_field": "", "stated": False}
        for codec, of_codec in losses.items()
        for seed, loss in enumerate(of_codec)
    ]
    less = losses["int2"] - losses["fp32"]
    whole = {"codec": "int2", "seeds": 3, "less": less.mean(), "less_low": less.min(), "less_high": less.max()}
    pd.DataFrame([whole, {**whole, "codec": "int1"}]).to_csv(tmp_path / "summary.csv", index=False)
    arms = {"codec": "int2"}, {"codec": "fp32"}
    from_summary = experiments.judge_loss(tmp_path, 0.1, *arms, "less")
    pd.DataFrame(rows).to_csv(tmp_path / "seeds.csv", index=False)
    from_runs = experiments.judge_loss(tmp_path, 0.1, *arms, "less")
    assert from_runs.value == pytest.approx(from_summary.value)
    assert from_runs.verdict == from_summary.verdict == "fails"
    # of an arm without rows of its seeds the summary tells
    assert experiments.judge_loss(tmp_path, 0.1, {"codec": "int1"}, {"codec": "fp32"}, "less") == from_summary
    assert experiments.judge_loss(tmp_path, 0.1, {"codec": "int3"}, {"codec": "fp32"}, "less") is None


def test_what_is_left_open_says_how_many_seeds_and_how_much_time_close_it() -> None:
    base = dict.fromkeys(range(5), 1.0)
    sure, unsure = (judge("loss", dict(enumerate(each)), base, 0.5) for each in ([1.1] * 5, [0.0, 1.0, 2.0, 1.5, 2.5]))
    assert experiments.open_words("why", sure, 60.0) == "why"
    stated, published = unsure.seeds_for(0.5), unsure.seeds_for(1.0)
    assert stated is not None
    assert published is not None
    said = experiments.open_words("why", unsure, 60.0)
    assert said.startswith("why; can detect")
    assert said.endswith(
        f"{stated} seeds per arm instead of 5 would detect 0.5 nats with 80 % power: {stated - 5} min 00 s of one core"
    )
    assert f"{published} seeds per arm" in experiments.more_seeds(unsure, 60.0, 1.0, "points")


def test_seeds_that_would_find_the_published_effect_leave_the_bound_open() -> None:
    near = judge("speed_up", {0: 1.0, 1: 1.1, 2: 0.95}, {0: 1.02, 1: 1.08, 2: 1.0}, 1.0)
    said = experiments.more_seeds(near, 1.0, 3.0)
    assert f"{near.seeds:,} seeds per arm instead of 3 would resolve the observed effect" in said
    assert "(3 would detect a factor of 3 with 80 % power, which the interval excludes)" in said
    assert "more than 10,000 seeds per arm" in experiments.more_seeds(near._replace(seeds=None), 1.0)
    one = experiments.more_seeds(judge("loss", {0: 1.0}, {0: 1.1}, 0.0), 90.0)
    assert one.endswith("two seeds per arm do: 1 min 30 s of one core")


def test_a_program_takes_as_long_as_its_file_says(tmp_path: Path) -> None:
    (tmp_path / "reproduce.toml").write_text('[[step]]\nrun = "train.py --output {output}"\ntakes = "60s"\n')
    assert experiments.takes_s(tmp_path, "train.py", 4) == 15.0
    with pytest.raises(SpecError, match=r"time of play\.py"):
        experiments.takes_s(tmp_path, "play.py", 4)


def test_what_is_larger_is_not_called_so_many_times_smaller() -> None:
    smaller, larger = {0: 1.0, 1: 1.1, 2: 0.95}, {0: 2.0, 1: 2.1, 2: 1.95}
    said = experiments.times_smaller(judge("speed_up", smaller, larger, 1.0))
    turned = experiments.times_smaller(judge("speed_up", larger, smaller, 1.0))
    assert said[0].endswith(" times smaller")
    assert turned == (said[0].replace("smaller", "larger"), said[1])
