"""Entries: which runs stand together, which are marked, and that a codec has one colour everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from matplotlib.colors import to_hex
from test_tables import printed

from testbed import results
from testbed.errors import ResultsError, UnknownNameError
from testbed.metrics import compare
from testbed.records import Summary, WorstStep
from testbed.report import collect, gantt, numbers
from testbed.report.bars import step_time
from testbed.report.canvas import Drawing
from testbed.report.certificates import link_ratios
from testbed.report.collect import latest
from testbed.report.comparison import comparison_table
from testbed.report.gantt import median_step
from testbed.report.lines import loss_against_time
from testbed.report.page import draw_figures, draw_gantt, write_report
from testbed.report.settings import settings_words
from testbed.report.style import looks
from testbed.report.tables import result_tables, terminal_table
from testbed.results import Run
from testbed.spec import Calibrated, Cell, Measured, Paced
from tests.synthetic import Pipeline, cell, pipe, profile, write_run
from tests.synthetic import change_summary as change

HOME = profile("home", pipe(80_000_000, 10_000_000), pipe(80_000_000, 10_000_000))
PACED = Paced(forward_ns=(2_000_000,), backward_ns=(4_000_000,), update_ns=0, source="stated")
PAYLOADS = {"fp32": 131_072, "bf16": 65_536, "int8": 32_768}


def seeded(what: Cell, seed: int, **optimiser: Any) -> Cell:
    training, learned = what.training.model_copy(update={"seed": seed}), what.optimiser.model_copy(update=optimiser)
    return what.model_copy(update={"training": training, "optimiser": learned})


def add(folder: Path, what: Cell, number: int, **changes: Any) -> Run:
    payload = PAYLOADS.get(what.codec, 32_768)
    return write_run(
        folder, what, Pipeline(HOME, payload_bytes=payload, jitter=0.2, seed=number), error=0.01 * number, **changes
    )


def one_group(folder: Path) -> collect.Group:
    (group,) = collect.groups(collect.read_runs(latest(folder)))
    return group


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make 3 codecs with 2 seeds and 2 runs each; int8 has a learning rate of its own."""
    folder = results.make_folder(tmp_path_factory.mktemp("seeds") / "seeds")
    for codec, seed, repeat in itertools.product(PAYLOADS, (1, 2), (0, 1)):
        rate = 2e-3 if codec == "int8" else 1e-3
        add(folder, seeded(cell(codec, HOME), seed, learning_rate=rate), 2 * seed + 10 * repeat)
    return folder


@pytest.mark.slow
def test_seeds_and_repeats_are_one_entry(seeds: Path) -> None:
    group = one_group(seeds)
    assert group.label == ""
    entry = group.cells["home", "int8"]
    assert (len(entry.good), entry.count) == (4, "4 runs of 2 seeds")
    each = [run.summary for run in (result.run for result in entry.good)]
    steps = [summary.step_s for summary in each if summary is not None and summary.step_s is not None]
    assert min(steps) <= (entry.measured.step_s or 0) <= max(steps)
    assert entry.measured.step_interval_s is not None
    split = entry.measured.split
    assert split.compute_s + split.codec_s + split.wire_s + split.wait_s == pytest.approx(entry.measured.step_s)
    assert entry.typical in entry.good


@pytest.mark.slow
def test_a_tuned_setting_sets_no_group_apart_and_is_said(seeds: Path) -> None:
    group = one_group(seeds)
    assert group.own == {"optimiser.learning_rate": {"fp32": 1e-3, "bf16": 1e-3, "int8": 2e-3}}
    assert "per codec: optimiser.learning_rate fp32 0.001, bf16 0.001, int8 0.002" in settings_words(group)


@pytest.mark.parametrize(
    ("field", "values", "changed"),
    [
        ("optimiser.learning_rate", (0.001, 0.002), lambda what, rate: seeded(what, 1, learning_rate=rate)),
        ("pipeline.in_flight", (1, 3), lambda what, depth: cell(what.codec, HOME, schedule="1f1b", in_flight=depth)),
        ("topology", ("line", "star"), lambda what, shape: cell(what.codec, HOME, topology=shape)),
    ],
)
def test_a_setting_that_codecs_share_sets_groups_apart(
    tmp_path: Path, field: str, values: tuple[Any, Any], changed: Callable[[Cell, Any], Cell]
) -> None:
    for value, codec in itertools.product(values, ("fp32", "int8")):
        what = changed(cell(codec, HOME), value)
        write_run(tmp_path, what, Pipeline(HOME, topology=what.topology))
    groups = collect.groups(collect.read_runs(latest(tmp_path)))
    assert [group.label for group in groups] == [f"{field} = {value}" for value in values]
    assert all(group.codecs == ("fp32", "int8") for group in groups)


@pytest.mark.slow
def test_comparisons_are_those_of_metrics(seeds: Path) -> None:
    group = one_group(seeds)
    shown = comparison_table(group)
    ours, base = group.cells["home", "int8"], group.cells["home", "bf16"]
    expected = compare(ours.steps, base.steps)
    assert expected.pairs == 4
    line = next(line for line in shown.sections["home"] if line.entry is ours)
    assert line.over_second.value == f"{expected.speed_up.value:.2f}x"
    assert f"{expected.speed_up.interval.low:.2f}" in line.over_second.detail
    assert any("4 pairs" in rule for rule in shown.rules)
    assert shown.target == max(run.validation[-1].loss for run in group.cells["home", "fp32"].steps)
    fp32 = next(line for line in shown.sections["home"] if line.entry.cell.codec == "fp32")
    assert fp32.over_first.value == "-"
    assert fp32.to_loss.value.endswith(" s")


@pytest.mark.slow
def test_what_is_not_separable_is_said(tmp_path: Path) -> None:
    for codec in ("fp32", "other"):
        write_run(tmp_path, cell(codec, HOME), Pipeline(HOME, jitter=0.3))
    group = one_group(tmp_path)
    line = next(line for line in comparison_table(group).sections["home"] if line.entry.cell.codec == "other")
    assert "not separable" in line.over_first.detail
    ((_, row),) = result_tables([group])[0].sections.values()
    assert row.cells[1] == "~1.00x"
    assert not row.best
    assert "~ not separable" in "\n".join(printed(terminal_table(latest(tmp_path)), 120))


@pytest.mark.slow
def test_bands_hold_every_seed(seeds: Path) -> None:
    group = one_group(seeds)
    drawing = loss_against_time(group, "")
    (axes,) = drawing.figure.axes
    assert len(axes.collections) >= 2 * len(group.codecs)  # a band and the validations' spread, for each codec
    assert any("of 2 seeds" in label for label in legend_of(drawing))
    drawing = loss_against_time(one_group_of_one_seed(seeds), "")
    assert not any("seeds" in label for label in legend_of(drawing))


def legend_of(drawing: Drawing) -> list[str]:
    (legend,) = drawing.figure.legends
    return [text.get_text() for text in legend.get_texts()]


@pytest.mark.slow
def test_a_legend_explains_lines_and_titles_say_what_was_found(tmp_path: Path) -> None:
    for codec, payload in {"fp32": 400_000, "int8": 100_000}.items():
        write_run(tmp_path, cell(codec, HOME, steps=40), Pipeline(HOME, payload_bytes=payload))
    group = one_group(tmp_path)
    times, steps = loss_against_time(group, ""), step_time(group, "")
    assert {"validation loss", "each step", "training loss, mean of 3 steps"} <= set(legend_of(times))
    fp32, int8 = (group.cells["home", codec].measured.step_s or 0.0 for codec in ("fp32", "int8"))
    assert steps.title == f"int8: {fp32 / int8:.2f} times as fast as fp32 over home"
    assert times.title.startswith("Over home 40 steps take")
    (axes,) = steps.figure.axes
    said = [text.get_text() for text in axes.texts]
    assert any(text.startswith(f"{numbers.three(1e3 * int8)} ms") for text in said), "a bar's number has its unit"
    assert any(text.startswith("codec ") for text in said), "encoding is too thin to see, so it is written"


def test_panels_share_their_time_axis_unless_one_would_vanish(tmp_path: Path) -> None:
    for speed, shared in ((20_000_000, True), (200_000, False)):
        folder = tmp_path / str(speed)
        for link in (HOME, profile("slow", pipe(speed, 0), pipe(speed, 0))):
            write_run(folder, cell("fp32", link), Pipeline(link))
        group = one_group(folder)
        for drawing in (step_time(group, ""), loss_against_time(group, "")):
            left, right = (axes.get_xlim() for axes in drawing.figure.axes)
            assert (left == right) is shared
            assert any("its own time axis" in text.get_text() for text in drawing.figure.texts) is not shared


def one_group_of_one_seed(folder: Path) -> collect.Group:
    (group,) = collect.groups([each for each in collect.read_runs(latest(folder)) if each.cell.training.seed == 1])
    return group


@pytest.mark.slow
@pytest.mark.parametrize(("share", "marked", "hollow"), [(0.004, False, False), (0.02, True, False), (0.2, True, True)])
def test_overruns_are_marked_everywhere(tmp_path: Path, share: float, marked: bool, hollow: bool) -> None:
    for codec in ("fp32", "int8"):
        run = add(tmp_path, cell(codec, HOME).model_copy(update={"compute": PACED}), 1)
        change(run, overrun_share=share if codec == "int8" else 0.0)
    group = one_group(tmp_path)
    entry = group.cells["home", "int8"]
    assert any("overruns" in mark for mark in entry.marks) is marked
    assert entry.sound is not hollow
    assert any("invalid" in mark for mark in entry.marks) is hollow
    text = "\n".join(printed(terminal_table(latest(tmp_path)), 130))
    assert ("† " in text) is marked
    assert ("○ int8" in text) is hollow
    if hollow:
        page = write_report(tmp_path, tmp_path / "report.html").read_text()
        assert "too slow for the emulated device" in page
        assert "hollow: overruns" in page
        assert "paced: forward 2 ms, backward 4 ms" in page


@pytest.mark.slow
def test_played_is_a_group_of_its_own_and_every_caption_says_so(tmp_path: Path) -> None:
    pace = {"live": Measured(), "played": Calibrated()}
    for timing, compute in pace.items():
        for codec in ("fp32", "int8"):
            add(tmp_path, cell(codec, HOME).model_copy(update={"timing": timing, "compute": compute}), 1)
    played, live = collect.groups(collect.read_runs(latest(tmp_path)))
    assert "timing = live" in live.label, (live.label, played.label)
    assert "timing = played" in played.label
    words = settings_words(played)
    assert "real clock" in words
    assert "timing played" in words
    assert "codecs take the time they take on this machine" in words
    assert "timing played" not in settings_words(live)


def test_dilation_is_said_with_its_caveats(tmp_path: Path) -> None:
    slowed = {"compute": PACED.model_copy(update={"dilation": 4})}
    write_run(tmp_path, cell("fp32", profile("unshaped")).model_copy(update=slowed), Pipeline(profile("unshaped")))
    foot = settings_words(one_group(tmp_path))
    assert "the lab runs 4 times slower" in foot
    assert "retransmission timeout" in foot


@pytest.mark.slow
def test_a_codec_has_one_colour_everywhere(tmp_path: Path) -> None:
    """It holds for codecs outside the table too, and in groups that hold other codecs."""
    codecs = ("fp32", "int8", "acme:One", "acme:Two")
    for codec in codecs:
        add(tmp_path, cell(codec, HOME), 1)
    for codec in codecs[1:3]:
        add(tmp_path, cell(codec, HOME, schedule="1f1b", in_flight=3), 1)
    wanted = {codec: look.colour for codec, look in looks(codecs).items()}
    assert len(set(wanted.values())) == len(codecs)
    for group in collect.groups(collect.read_runs(latest(tmp_path))):
        bars = step_time(group, "").figure.axes[0].patches
        assert {to_hex(bar.get_facecolor()) for bar in bars} == {wanted[codec] for codec in group.codecs}
        for drawing in draw_figures(group, "", same_maths=False):
            if drawing.name in ("loss-time", "links", "efficiency", "bytes"):
                drawn = {to_hex(line.get_color()) for axes in drawing.figure.axes for line in axes.lines}
                drawn |= {to_hex(bar.get_facecolor()) for axes in drawing.figure.axes for bar in axes.patches}
                assert {wanted[codec] for codec in group.codecs} <= drawn, drawing.name
                assert not ({wanted[codec] for codec in set(codecs) - set(group.codecs)} & drawn), drawing.name


@pytest.mark.slow
def test_asked_against_measured_holds_every_ratio(tmp_path: Path) -> None:
    run = add(tmp_path, cell("fp32", HOME), 1, verdict="FAIL")
    ratios = [point for point in link_ratios(one_group(tmp_path)) if point.quantity == "rate"]
    before, after = run.certificates.before, run.certificates.after
    assert before is not None
    assert after is not None
    every = [one for part in (before, after) for one in part.measurements if one.quantity == "rate"]
    assert sorted(point.ratio for point in ratios) == sorted((one.measured or 0) / (one.expected or 1) for one in every)
    assert all(not point.passed and abs(point.ratio - 1) > point.tolerance for point in ratios)


@pytest.mark.slow
def test_any_cell_can_be_drawn_step_by_step(tmp_path: Path) -> None:
    run = add(tmp_path, cell("int8", HOME), 1)
    picture = draw_gantt(tmp_path, run.cell.id, tmp_path / "figures")
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = picture.with_suffix(".svg").read_text()
    assert all(f">{word}<" in text for word in ("stage 0", "stage 2", "1 to 0", "1 to 2"))
    with pytest.raises(UnknownNameError, match="no cell"):
        draw_gantt(tmp_path, "int9", tmp_path)
    failed = add(tmp_path, cell("bf16", HOME), 1, failure="lost")
    with pytest.raises(ResultsError, match="no successful run"):
        draw_gantt(tmp_path, failed.cell.id, tmp_path)


def test_the_step_drawn_is_nearest_to_the_median(tmp_path: Path) -> None:
    run = add(tmp_path, cell("int8", HOME, steps=15), 1)
    from testbed.metrics import align, steady

    steps = align([run.steps(stage) for stage in range(3)])
    chosen, counted = median_step(steps), sorted(step.seconds for step in steady(steps))
    below = sum(seconds < chosen.seconds for seconds in counted)
    assert abs(below - (len(counted) - 1) / 2) <= 0.5
    assert median_step([step for step in steps if step.warmup]) is None


def test_a_run_that_lost_a_node_in_its_first_step_has_no_step_to_draw(tmp_path: Path) -> None:
    run = add(tmp_path, cell("int8", HOME), 1)
    assert [drawing.name for drawing in gantt.usual(one_group(tmp_path), "")] == ["gantt-1"]
    summary = run.summary
    (run.folder / "steps-2.jsonl").write_text("", encoding="utf8")
    run.finish(summary)  # type: ignore[arg-type]
    assert one_group(tmp_path).cells["home", "int8"].ok, "others went on"
    assert gantt.usual(one_group(tmp_path), "") == []


def slow(medians: float) -> WorstStep:
    """A worst step so many times the median."""
    stated = {"step": 3, "at_s": 1.0, "seconds": 1.0, "medians": medians, "links": (), "recovered_s": 1.0}
    return WorstStep(**stated, retransmitted_bytes=None)


def test_the_mark_of_a_slow_step_is_that_of_the_slowest(tmp_path: Path) -> None:
    for number, worst in enumerate((None, slow(3.0), slow(51.2)), 1):
        change(add(tmp_path, cell("int8", HOME), number), worst=worst)
    marks = one_group(tmp_path).cells["home", "int8"].marks
    assert "one step took 51.2 times the median" in marks
    assert not [mark for mark in marks if "took 3 times" in mark]


def test_no_field_of_several_runs_is_silently_the_first_run_s(tmp_path: Path) -> None:
    """Every field of Summary is combined by its type or by a rule of its own, so a new one cannot be forgotten."""
    runs = [add(tmp_path, seeded(cell("int8", HOME), seed), seed) for seed in (1, 2, 3)]
    kinds = {name: {field.annotation, *get_args(field.annotation)} for name, field in Summary.model_fields.items()}
    numbers = {name for name, kind in kinds.items() if kind & {int, float}}
    for run, whole, real, ended in zip(runs, (40, 10, 20), (4.0, 1.0, 2.0), ("steps", "target", "steps"), strict=True):
        measured = {name: whole if int in kinds[name] else real for name in numbers}
        change(run, ended=ended, lost={f"worker {whole}": "killed"}, worst=slow(whole), **measured)
    combined = one_group(tmp_path).cells["home", "int8"].measured
    assert combined.ended is None
    assert combined.lost.keys() == {"worker 40", "worker 10", "worker 20"}
    assert combined.worst == slow(40)
    expected = {name: 20 if int in kinds[name] else 2.0 for name in numbers}
    expected |= {"measured_steps": 70, "overrun_share": 4.0}
    learned = ("train_loss", "validation_loss", "uncompressed_loss", "validation_accuracy")
    expected |= dict.fromkeys(learned, pytest.approx(7 / 3))
    del expected["step_s"]  # made of the steps themselves
    assert {name: getattr(combined, name) for name in expected} == expected
    assert all(type(getattr(combined, name)) in kinds[name] for name in numbers)
    # What is left is made of the steps or the cells, or cannot differ between runs that stand together and ended well.
    of_steps = {"step_interval_s", "step_quartiles_s", "split"}
    of_cells = {"cell_id", "engine", "timing", "certificate"}
    assert set(kinds) - numbers == of_steps | of_cells | {"status", "error", "ended", "lost", "worst"}


@pytest.mark.slow
def test_a_contended_run_is_hollow_and_no_speed_up_is_computed_from_it(tmp_path: Path) -> None:
    folder = results.make_folder(tmp_path / "contended")
    add(folder, cell("fp32", HOME), 1)
    contended = add(folder, cell("int8", HOME), 2)
    add(folder, cell("bf16", HOME), 3)
    change(contended, contended=0.4)
    group = one_group(folder)
    entry = group.cells["home", "int8"]
    assert (entry.sound, entry.doubt) == (False, "contended")
    assert any("40 %" in mark for mark in entry.marks)
    speed_ups = {codec: group.compared("home", group.cells["home", codec]) for codec in ("int8", "bf16")}
    assert speed_ups["int8"] is not None
    assert speed_ups["int8"].speed_up is None
    assert speed_ups["bf16"] is not None
    assert speed_ups["bf16"].speed_up is not None
    change(contended, contended=0.04)
    assert one_group(folder).cells["home", "int8"].sound
