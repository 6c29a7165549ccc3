"""codec_quality: its quick form and its figures on real links; and what its full form asks for."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import matplotlib.image
import pandas
import pytest

from testbed.codecs.catalogue import placement
from testbed.codecs.catalogue.table import CODECS
from testbed.spec import Cell
from testbed.sweep import plan
from tests.commands import STATED, Command, draw

NAME = "codec_quality"
FOLDER = Command.shipped / NAME


def _parts(cell: Cell) -> set[str]:
    return {part.row.name for recipe in placement.parse_placement(cell.codec).specs() for part in recipe.parts()}


def test_the_full_form_trains_every_codec_of_the_table_with_four_paired_seeds_over_a_shaped_link() -> None:
    cells = plan.cells(plan.load_experiment(NAME), "relay")
    assert set.union(*map(_parts, cells)) == {name for name, row in CODECS.items() if not row.for_gradients}
    seeds, shaped = defaultdict(set), set()
    for cell in cells:
        arm = (cell.codec, cell.workload.training_sequences)
        seeds[arm].add(cell.training.seed)
        if cell.shaped:
            shaped.add(arm)
        if placement.parse_placement(cell.codec).measures:
            assert cell.shaped
        assert cell.training.steps == 200
        assert cell.training.evaluate_uncompressed
    assert set(map(frozenset, seeds.values())) == {frozenset(range(4))}
    assert shaped == set(seeds)
    for codec, share in seeds:
        assert ("fp32", share) in seeds, codec  # what it is compared with


def test_aqsgd_meets_its_examples_again_and_so_does_what_it_is_compared_with() -> None:
    cells = plan.cells(plan.load_experiment(NAME), "relay")
    again = [cell for cell in cells if cell.workload.training_sequences is not None]
    assert {cell.codec for cell in again} == {"fp32", "acsgd", "aqsgd"}
    for cell in again:
        share = cell.workload.training_sequences
        assert share is not None
        assert cell.training.steps * cell.workload.batch_size / share == 4
    assert not [cell for cell in cells if "aqsgd" in _parts(cell) and cell not in again]


@pytest.mark.clock_kernel
@pytest.mark.slow
def test_the_quick_form_runs_and_its_figures_are_drawn(command: Command, tmp_path: Path) -> None:
    command.finish("sweep", NAME, "--quick", *STATED)
    home = tmp_path / "results" / NAME
    asked = plan.apply_choice(plan.load_experiment(NAME), plan.Choice(quick=True))
    arms = {(one["codec"], one.get("workload", {}).get("training_sequences")) for one in asked.variants}

    output = tmp_path / "figures"
    said = draw(FOLDER, home, output)
    summary_frame = pandas.read_csv(output / "summary.csv").set_index("arm")
    shares = summary_frame.training_sequences.astype(object).where(summary_frame.training_sequences.notna(), None)
    assert {*zip(summary_frame.codec, shares, strict=True)} == arms
    assert "Arms that ran with one seed over two networks: 1; their losses differ by 0." in said
    for arm, row in summary_frame.iterrows():
        assert f"| {arm} |" in said
        assert row.bits == pytest.approx((row.bits_forward + row.bits_backward) / 2, rel=1e-4)
        assert row.bits < row.bits_wire
        if row.codec == "fp32":
            assert row.bits == pytest.approx(32, rel=1e-2)
            assert (row.loss_less_fp32, row.plain_less_fp32) == (0, 0)
        else:
            assert row.bits < 31
    assert set(summary_frame[summary_frame.negative_control].codec) == {"delta-open(int8)"}
    assert matplotlib.image.imread(output / "quality.png").std() > 0
