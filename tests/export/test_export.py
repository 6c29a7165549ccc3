from __future__ import annotations

from pathlib import Path

import pandas
import pyarrow.parquet
import pytest
from pandas.testing import assert_frame_equal
from typer.testing import CliRunner

import testbed
from testbed import results
from testbed.cli import make_app
from testbed.errors import ResultsError, SpecError, UnknownNameError
from testbed.export import FORMATS, columns, export, rows, runs_to_export, table_files
from testbed.metrics import loss_curve, validation_curve
from testbed.spec import CodecRates, Varied
from tests.known import known
from tests.small_replicas import DIGITS, a_recipe, cell_of, trained

TABLES = pytest.mark.parametrize("table", columns.TABLES)


@pytest.fixture(scope="module")
def written(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    for form in ("csv", "parquet"):
        export(experiment, form, folder)
    return folder


def test_every_table_can_be_made(experiment: Path) -> None:
    assert columns.TABLES.keys() == rows.MAKERS.keys()
    for table, described in columns.TABLES.items():
        names = [column.name for column in described]
        assert len(names) == len(set(names))
        recorded = map(rows.RecordedRun, runs_to_export(experiment))
        made = {name for run in recorded for row in rows.MAKERS[table](run) for name in row}
        assert made <= set(names), f"{table} makes values that no column holds: {made - set(names)}"
        known = {"compute.forward_ns", "compute.backward_ns", "compute.update_ns", "compute.source"}  # of paced cells
        known |= {"workload.weights", "outside"}  # of cells that begin with trained weights, or run a stranger's codec
        # of cells whose codecs cost a device's time
        known |= {f"codec_rates.{name}" for name in CodecRates.model_fields}
        known |= {name for name in names if name.startswith("data.")}  # of data parallel cells
        varied = tuple(f"compute.{name}" for name in Varied.model_fields)
        known |= {name for name in names if name.startswith(varied)}  # of cells whose durations vary
        known |= {"lost", "resumed_at"}  # of asynchronous cells, and of live runs that resumed a checkpoint
        known |= {name for name in names if name.startswith("worst.")}  # of runs with a step like no other
        known |= {name for name in names if name.startswith("sites.") or ".background" in name}  # of some networks
        known |= {"tcp_rto_max_ms", "training.device"}  # of some labs, and of cells that are trained on a GPU
        known |= {"workload.images", "workload.alpha", "validation_accuracy"}  # of cells that learn images
        known |= {"optimiser.algorithm", "optimiser.frozen_after"}  # of cells without AdamW, and of 1-bit Adam
        assert set(names) - made <= known


@pytest.mark.slow
@TABLES
def test_files_read_back_as_the_frame(experiment: Path, written: Path, table: str) -> None:
    """CSV and Parquet hold bit for bit the same numbers, in columns of the types that columns.csv states."""
    frame = table_files.pandas_frame(table, runs_to_export(experiment))
    assert len(frame) > 0
    stated = pandas.read_csv(written / table_files.DICTIONARY).set_index(["table", "column"]).type
    types = stated[table].to_dict()
    assert list(types) == list(frame.columns)
    read = pandas.read_csv(written / f"{table}.csv", dtype=types)
    assert_frame_equal(read, frame, check_exact=True)
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == types
    parquet = pyarrow.parquet.read_table(written / f"{table}.parquet")
    assert parquet.schema.equals(columns.schema(table))
    assert_frame_equal(parquet.to_pandas(types_mapper=table_files.pandas_type), frame, check_exact=True)


def test_runs_hold_their_summaries(experiment: Path) -> None:
    frame = table_files.pandas_frame("runs", runs_to_export(experiment)).set_index(["cell_id", "run"])
    assert len(frame) == 5
    assert sorted(frame.status) == ["failed", "ok", "ok", "ok", "ok"]
    for run in runs_to_export(experiment):
        summary, row = known(run.summary), frame.loc[(run.folder.parent.name, run.number)]
        assert row.step_s == summary.step_s
        assert (row["step_quartiles_s.low"], row["step_quartiles_s.high"]) == summary.step_quartiles_s
        assert row["split.wire_s"] == known(summary.split).wire_s
        assert row["workload.batch_size"] == run.cell.workload.batch_size
        assert (experiment / row.folder / "cell.json").exists()
        assert pandas.isna(row.up_rate_bps) == (run.cell.network == "unshaped")


def test_steps_frames_and_losses_are_those_of_the_records(experiment: Path) -> None:
    run = next(run for run in runs_to_export(experiment) if run.summary and run.summary.status == "ok")
    stages = [run.steps(stage) for stage in range(run.cell.pipeline.stages)]
    steps, frames, losses = (table_files.pandas_frame(table, [run]) for table in ("steps", "frames", "losses"))
    assert len(steps) == sum(len(records) for records in stages)
    activities = [name for name in steps.columns if name.removesuffix("_s") in rows.ACTIVITIES]
    spent = steps[activities].sum(axis=1)
    assert (spent <= steps.stage_end_s - steps.stage_begin_s + 1e-9).all()
    whole = steps[steps.stage == 0]
    assert whole.begin_s.to_numpy()[1:] == pytest.approx((whole.begin_s + whole.step_s).to_numpy()[:-1])
    every = [sent for records in stages for record in records for sent in record.sent]
    assert len(frames) == len(every)
    assert frames.payload_bytes.sum() == sum(sent.payload_bytes for sent in every)
    assert (frames.received_s > frames.first_byte_s).all()
    assert ((frames.receiver - frames.sender == 1) == (frames.direction == "forward")).all()
    sizes = frames.groupby(["phase", "step", "sender"]).frame_bytes.sum()
    sums = steps.set_index(["phase", "step", "stage"]).sent_frame_bytes
    assert all(sums[key] == size for key, size in sizes.items())
    for phase, curve in (("train", loss_curve), ("evaluation", validation_curve)):
        points = [(point.step, point.seconds, point.loss) for point in curve(run.cell, stages)]
        exported = losses[losses.phase == phase][["step", "training_s", "loss"]].itertuples(index=False, name=None)
        assert list(exported) == points


def test_workers_that_learn_images_are_exported_as_stages_are(tmp_path: Path) -> None:
    recipe = a_recipe("star", workload=DIGITS, evaluate_every=3)
    run, records = results.new_run(tmp_path, cell_of(recipe)), trained(recipe).records
    for node, own in enumerate(records):
        lines = "".join(record.model_dump_json() + "\n" for record in own)
        (run.folder / f"steps-{node}.jsonl").write_text(lines, encoding="utf8")
    steps, losses = (table_files.pandas_frame(table, [run]) for table in ("steps", "losses"))
    train = steps[steps.phase == "train"]
    assert ((train.local_s > 0) == (train.stage < 4)).all()  # the last node is the server
    evaluated = [record for record in records[-1] if record.phase == "evaluation"]
    for frame in (losses, testbed.steps(run.folder)):
        rows = frame[frame.phase == "evaluation"]
        assert [*zip(rows.loss, rows.accuracy, strict=True)] == [(each.loss, each.accuracy) for each in evaluated]
        assert frame[frame.phase == "train"].accuracy.isna().all()


def test_links_carry_what_the_counters_say(experiment: Path) -> None:
    run = runs_to_export(experiment)[0]
    frame, samples = table_files.pandas_frame("links", [run]), list(run.samples())
    assert len(frame) == sum(len(ways) for sample in samples for ways in sample.links.values())
    for (link, way), one in frame.groupby(["link", "direction"]):
        seconds = one.at_s.diff()
        carried = (one.rate_bps * seconds).sum() / 8
        assert carried == pytest.approx(samples[-1].links[link][way].bytes - samples[0].links[link][way].bytes)


def test_what_cannot_be_exported_is_said(experiment: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"no format 'exel'.*csv"):
        export(experiment, "exel", tmp_path)
    with pytest.raises(ResultsError, match=r"holds no run.*nothing to export"):
        export(tmp_path, "csv", tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="choose another folder with -o"):
        export(experiment, "csv", tmp_path / "file" / "out")


@pytest.mark.parametrize("form", FORMATS)
def test_the_command_says_where_it_wrote(experiment: Path, tmp_path: Path, form: str) -> None:
    if form == "tensorboard":
        pytest.importorskip("tensorboard")
    done = CliRunner().invoke(make_app(), ["export", str(experiment), "--to", form, "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "out") in done.output.replace("\n", "")
    assert list((tmp_path / "out").iterdir())
