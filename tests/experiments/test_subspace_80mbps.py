"""subspace_80mbps: its quick form and its figures on real links; and what its full form asks for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas
import pytest

from testbed.codecs.catalogue import placement
from testbed.report import experiments
from testbed.sweep import plan
from tests.commands import STATED, Command, draw

NAME = "subspace_80mbps"
FOLDER = Command.shipped / NAME


def test_the_full_form_differs_in_codec_network_and_seed_alone() -> None:
    cells = plan.cells(plan.load_experiment(NAME), "relay")
    codecs = {cell.codec for cell in cells}
    pairs = Counter((cell.codec, cell.network) for cell in cells)
    assert all(pairs[codec, "scaled-80mbps"] >= 5 for codec in codecs)  # five paired seeds
    assert pairs["fp32", "datacenter"] == 5
    assert len({(cell.workload, cell.pipeline, cell.topology, cell.compute) for cell in cells}) == 1
    assert len({cell.training.model_copy(update={"seed": 0}) for cell in cells}) == 1
    assert {placement.parse_placement(codec).control for codec in codecs} == {False, True}


def test_the_constraint_and_the_learning_rate_are_crossed() -> None:
    experiment = plan.load_experiment(NAME)
    tuned = [variant for variant in experiment.variants if "optimiser" in variant]
    stated = {(variant["codec"], variant["optimiser"]["learning_rate"]) for variant in tuned}
    codecs, rates = {codec for codec, _ in stated}, {rate for _, rate in stated}
    assert codecs == {"subspace(fp32)", "subspace-free(fp32)"}
    assert len(rates) == 2
    assert stated == {(codec, rate) for codec in codecs for rate in rates}


def test_every_codec_but_the_baselines_sends_an_eighth_of_one() -> None:
    experiment = plan.load_experiment(NAME)
    cell = plan.cells(experiment, "relay")[0]
    sent = {"fp32": 32, "bf16": 16, "subspace(bf16)": 2}
    for codec in {variant["codec"] for variant in experiment.variants}:
        nominal = placement.parse_placement(codec).nominal_bits
        if "powersgd" in codec:  # its table entry states a typical shape, here is ours
            rank = int(codec.split("(")[1].rstrip(")"))
            tokens = cell.workload.batch_size // 4 * cell.workload.sequence_length
            nominal = 16 * rank * (1 / 128 + 1 / tokens)
        assert nominal == pytest.approx(sent.get(codec, 4), rel=0.07), codec


@pytest.mark.clock_kernel
@pytest.mark.slow
def test_the_quick_form_and_its_figures(command: Command, tmp_path: Path) -> None:
    command.finish("sweep", NAME, "--quick", *STATED)
    results, output = tmp_path / "results" / NAME, tmp_path / "figures"
    said = draw(FOLDER, results, output)

    runs, curves = experiments.runs_frame(results), experiments.curves(results)
    arms = set(zip(runs.codec, runs.profile, strict=True))
    codecs = set(runs.codec)
    assert len(codecs) == 2
    assert arms == {("fp32", "datacenter"), *((codec, "scaled-80mbps") for codec in codecs)}
    assert np.isfinite(curves.loss).all()
    for _, same in curves.groupby(["codec", "seed", "phase", "step"]):
        assert same.loss.nunique() == 1  # whatever the network
    # fp32 coordinates on the wire: there is nothing to leave out
    constrained = curves[curves.codec == "subspace(inner=fp32)"].groupby("phase").loss.last()
    assert constrained["evaluation"] == constrained["uncompressed"]

    table = pandas.read_csv(output / "summary.csv")
    assert set(zip(table.codec, table.profile, strict=True)) == arms
    fp32, others = table[table.codec == "fp32"], table[table.codec != "fp32"]
    assert (fp32.bits_per_value - 32).abs().max() < 0.1
    assert (others.bits_per_value - 4).abs().max() < 0.1
    assert (table.speed_up[table.codec == "fp32"] == 1).all()
    assert list(table.negative_control) == [placement.parse_placement(codec).control for codec in table.codec]
    assert table.parameters.nunique() == 1  # projected weights are all learned
    for codec, network in arms:
        assert f"`{codec}`" in said
        assert network in said
    assert matplotlib.image.imread(output / "loss.png").std() > 0
