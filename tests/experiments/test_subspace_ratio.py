"""subspace_ratio: what its full form asks for, its figure from its CSVs, and its quick form."""

from __future__ import annotations

from testbed.codecs.catalogue import placement
from testbed.report import experiment_tables, publishing, style
from testbed.sweep import plan
from tests.commands import Command

NAME = "subspace_ratio"
FOLDER = Command.shipped / NAME


def test_every_ratio_and_the_same_projection_without_the_constraint() -> None:
    cells = plan.cells(plan.load_experiment(NAME), "netem", clock="virtual")
    codecs = {cell.codec for cell in cells}
    with publishing.figures_program(FOLDER) as figures:
        assert {figures.name("subspace", ratio) for ratio in figures.RATIOS} <= codecs
        assert {figures.BASELINE, figures.name(figures.FREE, figures.TUNED_RATIO)} <= codecs
        assert {figures.family(codec) for codec in codecs} <= {figures.BASELINE, *figures.FAMILIES}
    assert {codec for codec in codecs if placement.parse_placement(codec).control} == {"subspace-free"}
    assert len({(cell.workload, cell.pipeline, cell.training.steps) for cell in cells}) == 1


def test_the_figure_has_every_family_and_codecs_that_send_as_many_bits_as_the_subspace() -> None:
    tables = experiment_tables.read_tables(FOLDER)
    with publishing.figures_program(FOLDER) as figures, style.applied():
        rows = figures.best(tables)
        bits = rows.groupby("codec").bits.mean()
        for codec in bits.index:
            if figures.family(codec) not in (figures.BASELINE, figures.MAPL):
                assert min(abs(bits[codec] * ratio / 16 - 1) for ratio in figures.RATIOS) < 0.3, codec
        labels = {text.get_text() for text in figures.draw(tables).legends[0].get_texts()}
        assert labels == {words for words, _, _ in figures.FAMILIES.values()}
