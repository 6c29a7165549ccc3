"""mesongs: the renderer, each part of the chain, and what the tables hold."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.report import publishing, style
from tests.commands import Command

FOLDER = Command.shipped / "mesongs"


@pytest.fixture(scope="module")
def figures() -> Iterator[ModuleType]:
    with publishing.figures_program(FOLDER) as module, style.applied():
        yield module


def gaussians(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Draw the numbers of Gaussians in front of `camera`."""
    chance = torch.Generator().manual_seed(seed)

    def drawn(width: int) -> torch.Tensor:
        return torch.randn(count, width, generator=chance)

    return [0.4 * drawn(3), drawn(1), 0.5 * drawn(3), 0.1 * drawn(45), 0.3 * drawn(3) - 2, drawn(4)]


def camera(figures: ModuleType) -> object:
    return figures.compress.chain.View(torch.tensor([0.0, 0.0, -3.0]), torch.eye(3), 30.0, 32)


# ------------------------------------------------------------------ the renderer
def test_what_is_opaque_in_front_hides_what_is_behind_and_order_is_by_depth(figures: ModuleType) -> None:
    scene_class, render = figures.compress.Scene, figures.compress.chain.render
    view = camera(figures)

    def wall(depth: float, colour: list[float], opacity: float) -> list[torch.Tensor]:
        constant = figures.compress.world.constant_colours(torch.tensor([colour]))
        at, size = torch.tensor([[0.0, 0.0, depth]]), torch.full((1, 3), 1.0)
        return [at, torch.full((1, 1), opacity), constant, torch.zeros(1, 45), size, torch.tensor([[1.0, 0, 0, 0]])]

    red, green = wall(0.0, [1.0, 0, 0], 20.0), wall(1.0, [0, 1.0, 0], 20.0)
    for order in ((red, green), (green, red)):
        pixels = render(scene_class(*(torch.cat(pair) for pair in zip(*order, strict=True))), view).pixels
        # At the centre the opacity is cut off at 0.99, so a hundredth of what is behind comes through.
        assert pixels[15:17, 15:17, 0].mean() == pytest.approx(0.99, abs=0.01)
        assert pixels[15:17, 15:17, 1].mean() < 0.011
    glass = wall(0.0, [1.0, 0, 0], 0.0)
    pixels = render(scene_class(*(torch.cat(pair) for pair in zip(glass, green, strict=True))), view).pixels
    assert pixels[15:17, 15:17].mean((0, 1)).tolist() == pytest.approx([0.5, 0.5, 0.0], abs=0.01)


def test_weights_add_up_to_what_is_covered_and_nothing_behind_the_eye_is_drawn(figures: ModuleType) -> None:
    parts = gaussians(60)
    parts[2], parts[3] = figures.compress.world.constant_colours(torch.ones(60, 3)), torch.zeros(60, 45)
    view = camera(figures)
    drawn = figures.compress.chain.render(figures.compress.Scene(*parts), view)
    # All are white, so a pixel is as bright as it is covered.
    assert float(drawn.weights.sum()) == pytest.approx(float(drawn.pixels[..., 0].sum()), rel=1e-4)
    parts[0] = parts[0] - torch.tensor([0.0, 0.0, 10.0])
    assert not figures.compress.chain.render(figures.compress.Scene(*parts), view).pixels.any()


def test_gradients_are_those_of_finite_differences(figures: ModuleType) -> None:
    parts, view = gaussians(6), camera(figures)
    parts[1] += 1.0

    def brightness(*changed: torch.Tensor) -> torch.Tensor:
        pixels = figures.compress.chain.render(figures.compress.Scene(*changed), view).pixels
        return (pixels * torch.linspace(0, 1, 32)[:, None]).sum()

    for place, each in enumerate(parts):
        if place == 0:
            continue  # colours by direction do not follow positions, as in the source
        leaf = each.clone().requires_grad_()
        brightness(*parts[:place], leaf, *parts[place + 1 :]).backward()
        assert leaf.grad is not None
        at = int(leaf.grad.abs().argmax())
        ends = []
        for sign in (1, -1):
            moved = each.clone()
            moved.view(-1)[at] += sign * 5e-3
            ends.append(float(brightness(*parts[:place], moved, *parts[place + 1 :])))
        assert (ends[0] - ends[1]) / 1e-2 == pytest.approx(float(leaf.grad.view(-1)[at]), rel=0.1)


# ------------------------------------------------------------------ positions and the transform
@settings(max_examples=40, deadline=None)
@given(cells=st.sets(st.tuples(*[st.integers(0, 31)] * 3), min_size=1, max_size=60), data=st.data())
def test_the_octree_and_raht_give_back_what_they_got(
    figures: ModuleType, cells: set[tuple[int, int, int]], data: st.DataObject
) -> None:
    octree, depth = figures.compress.octree, 5
    codes = np.sort(octree.codes_of(np.array(sorted(cells)), depth))
    assert {tuple(cell) for cell in octree.cells_of(codes, depth).tolist()} == cells
    tree = octree.encode(codes, depth)
    assert octree.decode(tree, depth).tolist() == codes.tolist()
    raht = octree.Raht(codes, depth)
    values = torch.tensor(data.draw(st.lists(st.floats(-5, 5, width=32), min_size=len(codes), max_size=len(codes))))
    values = torch.stack((values, torch.ones(len(codes))), 1)
    coefficients = raht.transform(values)
    assert torch.allclose(raht.inverse(coefficients), values, atol=1e-4)
    assert torch.allclose(coefficients.square().sum(0), values.square().sum(0), rtol=1e-4, atol=1e-5)
    # Of a constant only the root is left: the square root of its leaves.
    assert float(coefficients[0, 1]) == pytest.approx(len(codes) ** 0.5, rel=1e-5)
    assert float(coefficients[1:, 1].abs().sum()) < 1e-3


# ------------------------------------------------------------------ the chain
def test_pruning_keeps_the_most_important(figures: ModuleType) -> None:
    importances = torch.rand(50, generator=torch.Generator().manual_seed(1))
    kept = figures.compress.chain.kept(importances, 0.3)
    assert set(kept.tolist()) == set(np.argsort(-importances.numpy())[:35].tolist())
    assert kept.tolist() == sorted(kept.tolist())


def test_a_hidden_gaussian_is_not_important(figures: ModuleType) -> None:
    parts = gaussians(2)
    parts[0] = torch.tensor([[0.0, 0, 0], [0.0, 0, 1.0]])
    parts[1], parts[4] = torch.full((2, 1), 20.0), torch.tensor([[0.5] * 3, [-1.0] * 3])
    found = figures.compress.chain.importance(figures.compress.Scene(*parts), [camera(figures)])
    assert found[0] > 10 * found[1]


def test_angles_turn_as_the_quaternions_did(figures: ModuleType) -> None:
    chain, turns = figures.compress.chain, gaussians(200)[5]
    again = chain.quaternions_of(chain.angles_of(turns))
    assert torch.allclose(chain.matrices(again), chain.matrices(turns), atol=2e-3)


def test_codes_are_within_half_a_step_and_what_is_sent_is_received(figures: ModuleType) -> None:
    chain, scene = figures.compress.chain, figures.compress.Scene(*gaussians(400))
    coded = chain.coded(scene.colours)
    runs = chain._runs(400)
    assert ((chain.values_of(coded) - scene.colours).abs() <= 0.51 * coded.steps[runs] + 1e-6).all()
    voxels = chain.voxels(scene, torch.ones(400))
    latent = chain.latent_of(voxels, torch.ones(len(voxels.codes)), 0)
    raht = figures.compress.octree.Raht(voxels.codes, chain.DEPTH)
    parts = chain.pack(latent, raht)
    assert chain.restored(chain.compressed(parts)) == parts
    # Fine-tuning sees what the receiver has, but for the 16 bits of the codebook.
    for sent, got in zip(chain.received(latent, raht), chain.unpack(parts), strict=True):
        assert torch.allclose(sent, got, atol=2e-3)


def test_tables_hold_every_stage_and_transfers_are_no_faster_than_their_links(figures: ModuleType) -> None:
    stages, transfers = figures.tables(FOLDER)
    assert set(stages.stage) == set(figures.compress.STAGES)
    assert len(stages) == len(figures.compress.STAGES) * stages.scene.nunique()
    assert (transfers.seconds >= transfers.ideal_s).all()
    assert len(figures.draw(FOLDER).axes) == 2
