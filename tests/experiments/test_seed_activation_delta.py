"""seed_activation_delta: its quick form and its two programs, on real links; and what its full form asks for."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pandas
import pytest

from testbed import results
from testbed.report import experiments
from testbed.results import Run
from testbed.spec import Cell
from testbed.sweep import plan
from tests.commands import STATED, Command, draw, program, wire_is_explained

NAME = "seed_activation_delta"
FOLDER = Command.shipped / NAME


def _repeated(cell: Cell) -> bool:
    return cell.workload.training_sequences is not None


def _losses(run: Run) -> dict[tuple[str, int], float | None]:
    return {(step.phase, step.step): step.loss for step in run.steps(run.cell.pipeline.stages - 1)}


def test_the_full_form_has_the_published_setting_and_each_arm_on_both_kinds_of_batch() -> None:
    learned = ["workload.model=gpt2-mini-trained"]  # which needs a checkpoint
    cells = plan.cells(plan.load_experiment(NAME), "relay", exclude=learned)
    codecs = {cell.codec for cell in cells}
    control = {"delta(int4)", "delta-open(int4)"}  # and what it is compared with: the same bits in a closed loop
    assert codecs == {"fp32", "bf16", "int8", "delta-int8", "fwd=delta-int8, bwd=fp32", *control}
    for model in ("gpt2", "gpt2-mini"):
        for network in ("datacenter", "consumer-80mbps"):
            of_fresh = [one for one in cells if one.workload.model == model and not _repeated(one)]
            fresh = {one.codec for one in of_fresh if one.network == network}
            assert fresh == codecs - (set() if (model, network) == ("gpt2-mini", "datacenter") else control)
        repeated = {one.codec for one in cells if one.workload.model == model and _repeated(one)}
        assert repeated >= {"fp32", "int8", "delta-int8"} | (control if model == "gpt2-mini" else set())
    for cell in cells:
        if cell.workload.model == "gpt2":
            assert cell.workload.batch_size * cell.workload.sequence_length == 256
            assert (cell.pipeline.stages, cell.pipeline.microbatches, cell.training.steps) == (2, 1, 20)
    fresh_mini = [one for one in cells if one.workload.model == "gpt2-mini" and not _repeated(one)]
    paired = {(one.codec, one.training.seed) for one in fresh_mini}
    assert len(paired) == 5 * len(codecs)
    for cell in cells:  # a repeated batch is so in the same micro-batches: differences are of the same examples
        assert cell.workload.order == "fixed"
        assert cell.workload.training_sequences in (None, cell.workload.batch_size)


@pytest.mark.clock_kernel
@pytest.mark.slow
def test_the_quick_form_runs_and_its_figures_are_drawn(command: Command, tmp_path: Path) -> None:
    command.finish("sweep", NAME, "--quick", *STATED)
    home = tmp_path / "results" / NAME
    runs = [run for cell in results.last_sweep(home).cells if (run := results.finished(home, cell)) is not None]
    asked = plan.cells(plan.load_experiment(NAME), "netem", quick=True)
    assert len(runs) == len(asked)

    losses: dict[tuple[str, bool, int], dict[tuple[str, int], float | None]] = {}
    for run in runs:
        curve = _losses(run)
        assert None not in curve.values()
        assert all(abs(loss) < float("inf") for loss in curve.values() if loss is not None)
        key = (run.cell.codec, _repeated(run.cell), run.cell.training.seed)
        assert losses.setdefault(key, curve) == curve  # over whichever network, bit for bit
    for (codec, repeated, seed), curve in losses.items():
        first, last = (curve["train", step] for step in (0, runs[0].cell.training.steps - 1))
        assert first is not None
        assert last is not None
        assert last < first, (codec, repeated, seed)

    payload = {}
    for run in runs:
        summary = run.summary
        assert wire_is_explained(summary)
        payload[run.cell.codec] = summary.payload_bytes_per_step
    assert payload["delta-int8"] == payload["int8"] < payload["fp32"] / 3  # a difference is as long as what it replaces

    output = tmp_path / "figures"
    program(FOLDER / "redundancy.py", "--quick", "--output", str(output))
    redundancy = pandas.read_csv(output / "redundancy.csv")
    direct = redundancy[(redundancy.tensor == "X") & (redundancy.gap == 1)]
    assert set(redundancy.step) == {5, 7}
    assert (direct.norm_ratio > 0).all()
    # the error of a quantised difference is that of quantising the tensor, as much smaller as the difference is
    assert ((direct.delta_error / direct.int8_error) / direct.norm_ratio).between(0.5, 2).all()

    said = draw(FOLDER, home, output)
    summary_frame = pandas.read_csv(output / "summary.csv")
    arms = experiments.runs_frame(home)[["codec", "profile"]].drop_duplicates()
    drawn = summary_frame[["codec", "profile"]]
    assert {*arms.itertuples(index=False, name=None)} == {*drawn.itertuples(index=False, name=None)}
    assert len(summary_frame) == len(asked)  # one seed: a cell is an arm
    assert summary_frame[["validation_loss", "mean_step_s", "both_mb", "wire_mb"]].gt(0).all(axis=None)
    assert (summary_frame.forward_mb < summary_frame.both_mb).all()
    assert (summary_frame.both_mb < summary_frame.wire_mb).all()
    for row in summary_frame.itertuples():
        assert f"{row.validation_loss:.4f}" in said
    for name in ("loss", "time-bytes", "redundancy"):
        assert matplotlib.image.imread(output / f"{name}.png").std() > 0
