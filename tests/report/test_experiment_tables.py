"""The CSVs of an experiment: written from results, and enough to compute every interval again."""

from __future__ import annotations

import io
from pathlib import Path

import pandas
import pytest

from testbed import results
from testbed.metrics.statistics import difference
from testbed.report import experiment_tables, experiment_verdicts
from testbed.report.page import write_report
from testbed.results import ClaimSpec, CompareSpec, RankCheck, TriedValue, TunedArm, TuningRecord
from testbed.spec import Cell
from tests.synthetic import Pipeline, cell, change_summary, pipe, profile, record_sweep, write_run

LINKS = (profile("home", pipe(80_000_000, 10_000_000), pipe(80_000_000, 10_000_000)), profile("unshaped"))
RATE = "optimiser.learning_rate"
ERRORS = {"fp32": 0.0, "bf16": 0.01, "int8": 0.3}
TARGET = 7.5
ASKED = CompareSpec(
    loss=0.05,
    speed_up=1.001,
    time_to_loss=0.9,
    target_loss=TARGET,
    claims=(
        ClaimSpec(name="int8 costs 0.2", ours={"codec": "int8"}, baseline={"codec": "fp32"}, loss=0.2),
        ClaimSpec(
            name="its rate matters",
            ours={"codec": "int8", "optimiser": {"learning_rate": 0.5}},
            baseline={"codec": "int8"},
            loss=-0.1,
        ),
    ),
)


def made(codec: str, seed: int, link: int, rate: float = 1e-3) -> Cell:
    what = cell(codec, LINKS[link], steps=8, training={"seed": seed, "evaluate_every": 2})
    return what.model_copy(update={"optimiser": what.optimiser.model_copy(update={"learning_rate": rate})})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = results.make_folder(tmp_path_factory.mktemp("results") / "pretended")
    swept = [made(codec, seed, link) for codec in ERRORS for seed in range(4) for link in (0, 1) if seed < 2 or link]
    stated = [made("int8", seed, 1, 0.5) for seed in range(4)]
    for what in (*swept, *stated):
        pipeline = Pipeline(what.profiles[0], payload_bytes=8_000 if what.codec == "int8" else 32_768, jitter=0.01)
        run = write_run(home, what, pipeline, error=ERRORS[what.codec] * (2 if what in stated else 1))
        change_summary(run, unigram_floor=6.9)
    tried = tuple(
        TriedValue(value=value, cells=("a", "b"), losses=(loss, loss + 0.1), mean_loss=loss + 0.05, added=value == 1e-2)
        for value, loss in ((1e-4, 6.0), (1e-3, 5.0), (1e-2, 7.0))
    )
    check = RankCheck(arm={"codec": "fp32"}, steps=8, tried=tried, chosen=1e-3, tau=1.0, regret=0.0, alike=True)
    arms = [
        TunedArm(arm={"codec": codec}, tried=tried, chosen=1e-3, mark="at an end" * (codec == "int8"))
        for codec in ERRORS
    ]
    tuning = TuningRecord(field=RATE, steps=4, seeds=(0, 1), over="unshaped", arms=tuple(arms), check=check)
    results.write_json(home / "tuning.json", tuning)
    marks = {what.id: f"{RATE} at an end" for what in swept if what.codec == "int8"}
    apart = tuple(what.id for what in stated)
    return record_sweep(home, (*swept, *stated), tuned=True, marks=marks, stated=apart, compare=ASKED)


@pytest.fixture(scope="module")
def tables(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> experiment_tables.Tables:
    output = tmp_path_factory.mktemp("output")
    experiment_tables.write_tables(folder, output)
    assert {path.name for path in output.iterdir()} == {f"{name}.csv" for name in experiment_tables.Tables._fields}
    return experiment_tables.read_tables(output)


@pytest.mark.slow
def test_every_good_run_is_a_row_with_what_it_differs_in(tables: experiment_tables.Tables) -> None:
    seeds = tables.seeds
    assert len(seeds) == 3 * 6 + 4
    assert set(seeds.seed) == {0, 1, 2, 3}
    assert set(seeds[RATE]) == {1e-3, 0.5}
    assert seeds.stated.sum() == 4
    assert set(seeds[seeds["mark"].notna()].codec) == {"int8"}
    assert set(seeds.tuned_field) == {RATE}
    assert seeds.validation_loss.notna().all()
    assert "training.steps" not in seeds.columns  # in which no two runs differ


@pytest.mark.slow
def test_comparisons_follow_from_the_rows_of_seeds_csv_and_nothing_else(tables: experiment_tables.Tables) -> None:
    again = experiment_verdicts.compared(tables.seeds, ASKED)
    read_back = pandas.read_csv(io.StringIO(again.to_csv(index=False)))
    pandas.testing.assert_frame_equal(read_back, tables.comparisons, check_exact=True)
    loss = again[(again.measure == "loss") & (again.claim == "")]
    assert len(loss) == 4  # two arms and both baselines, without a baseline and itself; a seed counts once
    for row in loss.itertuples():
        sides = []
        for codec in (row.ours, row.baseline):
            rows = tables.seeds[(tables.seeds.codec == codec) & ~tables.seeds.stated].drop_duplicates("seed")
            sides.append(dict(zip(rows.seed, rows.validation_loss, strict=True)))
        compared = difference(*sides)  # type: ignore[arg-type]
        assert row.value == pytest.approx(compared.estimate.value)
        assert (row.low, row.high) == pytest.approx(compared.estimate.interval)
        assert row.detectable == pytest.approx(compared.detectable)
        assert row.n == 4


def test_times_are_compared_over_one_network_and_claims_by_what_they_name(tables: experiment_tables.Tables) -> None:
    rows = tables.comparisons
    steps = rows[(rows.measure == "speed_up") & (rows.ours == "int8") & (rows.baseline == "fp32")]
    assert dict(zip(steps.profile, steps.n, strict=True)) == {"home": 2, "unshaped": 4}
    faster = dict(zip(steps.profile, steps.value, strict=True))
    assert faster["home"] > 1.01
    assert set(rows[rows.measure == "time_to_loss"].profile) == {"home", "unshaped"}
    claims = rows[rows.claim.notna() & (rows.claim != "")].set_index("claim")
    assert claims.verdict["int8 costs 0.2"] == "fails"  # it costs 0.3 here, whatever the seed
    assert claims.value["its rate matters"] == pytest.approx(0.3)
    assert claims.verdict["its rate matters"] == "fails"


def test_settings_of_any_kind_are_kept_apart_and_a_trainings_runs_are_one_seed() -> None:
    rows = [
        {
            "codec": codec,
            "profile": "home",
            "seed": seed,
            "run": run,
            "tuned_field": "",
            "stated": False,
            "exact": False,
        }
        | {"data.local_steps": steps, "fault": fault, "step_s": step_s, "target_s": step_s, "validation_loss": loss}
        for codec, share in (("fp32", 1.0), ("int8", 0.5))
        for seed in range(3)
        for run in (1, 2, 3)
        for steps, loss in ((1, 3.0), (8, 3.5))
        for fault, late in (("none", 1.0), ("outage", 3.0))
        for step_s in [share * late * (1 + 0.01 * seed + 0.1 * run)]
    ]
    found = experiment_verdicts.compared(pandas.DataFrame(rows), CompareSpec(**ASKED.model_dump(exclude={"claims"})))
    assert found.groupby("measure").size().to_dict() == {"loss": 2, "speed_up": 4, "time_to_loss": 4}
    assert set(found[found.measure == "speed_up"].n) == {9}
    assert set(found[found.measure == "time_to_loss"].n) == {3}
    assert (found[found.measure != "loss"].value - 2).abs().max() < 1e-9


@pytest.mark.slow
def test_tuning_and_its_check_are_listed_by_value_and_seed(tables: experiment_tables.Tables) -> None:
    tuning = tables.tuning
    assert len(tuning) == 3 * 3 * 2 + 3 * 2
    assert set(tuning.kind) == {"tuning", "check"}
    assert tuning[tuning.chosen].value.unique().tolist() == [1e-3]
    assert set(tuning[tuning.added].value) == {1e-2}
    said = experiment_verdicts.tuning_sentence(tuning)
    assert "int8 (at an end)" in said
    assert "fp32" not in said


def test_each_measured_quantity_stands_once_with_the_runs_that_rest_on_it(
    folder: Path, tables: experiment_tables.Tables
) -> None:
    certificates = tables.certificates
    assert set(certificates.profile) == {"home", "unshaped"}
    counts = tables.seeds.groupby("profile").size()
    for network, rows in certificates.groupby("profile"):
        assert set(rows.runs) == {counts[network]}
        assert not rows.duplicated(["link", "direction", "quantity", "detail"]).any()


def test_what_ended_at_the_floor_is_named(tables: experiment_tables.Tables) -> None:
    said = experiment_verdicts.floor_sentence(tables.seeds)
    low = {row.codec for row in tables.seeds.itertuples() if row.validation_loss > 6.8}
    assert said.startswith("Unigram floor: 6.90 nats.") if low else "more than 0.1 nats below" in said
    deep, high = (experiment_verdicts.floor_sentence(tables.seeds.assign(validation_loss=loss)) for loss in (5.0, 6.85))
    assert "Every run ended more than 0.1 nats below the unigram floor, 6.90" in deep
    assert "int8" in high


def test_a_table_for_a_readme_shows_verdicts_and_only_columns_that_tell_something(
    tables: experiment_tables.Tables,
) -> None:
    rows = experiment_verdicts.verdict_table(tables.comparisons, measure="loss", baseline="fp32")
    assert "baseline" not in rows.columns
    assert {"arm", "measured", "verdict"} <= set(rows.columns)
    assert all(verdict.split(" (")[0] in {"holds", "fails", "not resolved"} for verdict in rows.verdict)


def test_a_sweep_without_tuning_or_comparisons_leaves_no_empty_files(folder: Path, tmp_path: Path) -> None:
    record = results.last_sweep(folder)
    try:
        results.write_json(folder / "sweep.json", record.model_copy(update={"compare": None, "tuned": False}))
        for name in ("tuning", "comparisons"):
            (tmp_path / f"{name}.csv").write_text("of an earlier sweep\n")
        experiment_tables.write_tables(folder, tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["certificates.csv", "seeds.csv"]
    finally:
        results.write_json(folder / "sweep.json", record)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_report_has_the_same_verdicts(folder: Path, tables: experiment_tables.Tables, tmp_path: Path) -> None:
    text = write_report(folder, tmp_path / "report.html").read_text(encoding="utf8")
    table = text[text.index('id="verdicts"') : text.index('id="figures"')]
    assert table.count("<tr>") == 1 + len(tables.comparisons)
    for words in set(tables.comparisons.words.dropna()):
        assert words in table
