"""mixed_precision: what its tables hold, its figure, and its short form."""

from __future__ import annotations

from testbed.report import publishing, style
from tests.commands import Command

NAME = "mixed_precision"
FOLDER = Command.shipped / NAME


def test_what_a_search_finds_costs_at_most_its_budget_and_every_arm_has_every_seed() -> None:
    with publishing.figures_program(FOLDER) as figures, style.applied():
        tables = figures.measured(FOLDER)
        for model in tables.models:
            for budget in tables.budgets(model):
                uniform = tables.setting(model, "uniform", budget)
                for search in figures.SEARCHES:
                    bits, seconds = (tables.setting(model, search, budget, cost) for cost in ("bytes", "seconds"))
                    assert (bits.bits.to_numpy() <= uniform.bits.to_numpy() + 1e-6).all()
                    assert (seconds.seconds.to_numpy() <= uniform.seconds.to_numpy() * (1 + 1e-6)).all()
        for arm in figures.ARMS:
            assert {len(tables.of_arm(arm, bits)) for bits in tables.widths} == {3}
        assert len(figures.draw(tables).axes) == len(tables.models) + 1


def test_bits_for_layers_and_steps_take_at_most_the_bytes_of_uniform_ones_and_are_judged_on_the_same_images() -> None:
    with publishing.figures_program(FOLDER) as figures, style.applied():
        tables = figures.denoising_figures.denoising(FOLDER)
        searched = list(tables.searched())
        assert {each[0] for each in searched} == set(tables.steps)
        for steps, budget, cells, search in searched:
            ours = tables.setting(steps, cells, search, budget)
            uniform = tables.setting(steps, "all", "uniform", budget)
            assert (ours.sent_bytes.to_numpy() <= uniform.sent_bytes.to_numpy() + 1).all()
            assert list(ours.seed) == list(uniform.seed)
        assert len(figures.denoising_figures.draw(tables).axes) == len(tables.steps) + 1
