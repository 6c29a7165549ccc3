"""topk_knee: what its full form asks for, its figure from its CSVs, and its quick form."""

from __future__ import annotations

from collections import defaultdict

from testbed.report import experiment_tables, publishing, style
from testbed.sweep import plan
from tests.commands import Command

NAME = "topk_knee"
FOLDER = Command.shipped / NAME


def test_one_grid_of_rates_for_arms_that_differ_in_their_codec_alone() -> None:
    experiment = plan.load_experiment(NAME)
    assert experiment.tune.arm == ("codec",)
    seeds = defaultdict(set)
    for point in plan.combinations(experiment, plan.Choice()):
        if experiment.tune.field not in point.stated:
            assert point.stated == {"codec", "training.seed"}
            seeds[point.fields["codec"]].add(point.fields["training"]["seed"])
    with publishing.figures_program(FOLDER) as figures:
        shared = {figures.arm("topk-shared", share) for share in figures.SHARES}
        fed = {figures.arm("topk-shared", figures.KNEE, how) for how in figures.FEEDBACKS}
        own = {figures.arm(mask, figures.KNEE) for mask in figures.MASKS}
        assert {figures.BASELINE, *shared, *fed, *own} <= seeds.keys()
    assert {len(of_arm) for of_arm in seeds.values()} == {3}


def test_the_figure_has_every_share_and_every_kind_of_error_feedback() -> None:
    with publishing.figures_program(FOLDER) as figures, style.applied():
        left, right = figures.draw(experiment_tables.read_tables(FOLDER)).axes
        drawn = {float(x) for line in left.lines for x in line.get_xdata() if len(line.get_xdata()) > 2}
        assert drawn == set(figures.SHARES)
        assert [label.get_text() for label in right.get_xticklabels()] == list(figures.FEEDBACKS.values())
