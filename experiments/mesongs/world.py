"""A synthetic scene: spheres on a chequered floor under one lamp, its photographs, and Gaussians fitted to them.

Photographs are traced, one ray through each quarter of a pixel. A surface has a colour, a pattern, diffuse light and a
highlight, which moves with the eye. Gaussians begin as points drawn on the surfaces, flat against nothing: round, as
wide as the distance to their neighbours, in the colour that the surface has in diffuse light.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from splat import Drawn, Scene, View, constant_colours, render
from torch import Tensor
from torch.nn.functional import normalize

SIDE, FOCAL = 64, 90.0
GAUSSIANS, TRAINING, HELD_OUT = 2000, 12, 4
"""How many Gaussians, and views that they are fitted to and judged by."""
SPHERES = 5
_FLOOR, _ON_FLOOR = 1.6, 0.45
"""Half the floor's side; the share of Gaussians that begin there."""
_LAMP = (0.4, -0.8, -0.45)
"""Towards the lamp; y points down."""
RATES = Scene(2e-3, 5e-2, 2e-2, 1e-3, 1e-2, 1e-2)  # type: ignore[arg-type]
"""Adam's learning rate of each kind of number."""


class World(NamedTuple):
    """What is photographed."""

    centres: Tensor
    """(SPHERES, 3)."""
    radii: Tensor
    colours: Tensor
    """(SPHERES, 3)."""

    @classmethod
    def drawn(cls, seed: int) -> "World":
        """Draw a world."""
        chance = torch.Generator().manual_seed(seed)
        radii = 0.2 + 0.25 * torch.rand(SPHERES, generator=chance)
        turn = 2 * torch.pi * (torch.arange(SPHERES) + 0.6 * torch.rand(SPHERES, generator=chance)) / SPHERES
        far = 0.35 + 0.6 * torch.rand(SPHERES, generator=chance)
        centres = torch.stack((far * turn.cos(), -radii, far * turn.sin()), 1)
        return cls(centres, radii, 0.2 + 0.75 * torch.rand(SPHERES, 3, generator=chance))

    def surface(self, points: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return the colour (n, 3) and the normal (n, 3) at points (n, 3) of spheres, or of the floor (-1)."""
        on_floor = (which < 0)[:, None]
        sphere = which.clamp_min(0)
        up = torch.tensor([0.0, -1.0, 0.0]).expand_as(points)
        normals = torch.where(on_floor, up, normalize(points - self.centres[sphere], dim=1))
        chequers = (torch.floor(points[:, 0] / 0.4) + torch.floor(points[:, 2] / 0.4)) % 2
        stripes = 0.8 + 0.2 * torch.sin(14 * normals[:, 1:2] + 3 * normals[:, :1])
        floor = (0.35 + 0.45 * chequers)[:, None] * torch.tensor([1.0, 0.95, 0.85])
        return torch.where(on_floor, floor, self.colours[sphere] * stripes), normals

    def lit(self, points: Tensor, which: Tensor, towards_eye: Tensor | None) -> Tensor:
        """Return what is seen (n, 3); without an eye, the diffuse light alone."""
        colours, normals = self.surface(points, which)
        lamp = normalize(torch.tensor(_LAMP), dim=0)
        seen = colours * (0.35 + 0.65 * (normals @ lamp).clamp_min(0))[:, None]
        if towards_eye is not None:
            half = normalize(towards_eye + lamp, dim=1)
            seen = seen + (0.5 * ((half * normals).sum(1).clamp_min(0) ** 24) * (which >= 0))[:, None]
        return seen.clamp(0, 1)

    def photograph(self, view: View) -> Tensor:
        """Return the picture (side, side, 3)."""
        at = (torch.arange(2 * view.side) + 0.5) / 2 - view.side / 2
        y, x = torch.meshgrid(at, at, indexing="ij")
        rays = normalize(torch.stack((x, y, torch.full_like(x, view.focal)), 2).view(-1, 3) @ view.axes, dim=1)
        along = view.eye - self.centres  # (SPHERES, 3)
        half = rays @ along.T
        inside = half**2 - ((along**2).sum(1) - self.radii**2)
        far = torch.where(inside > 0, -half - inside.clamp_min(0).sqrt(), torch.inf)
        far = torch.where(far > 0, far, torch.inf)
        floor = -view.eye[1] / rays[:, 1]
        there = view.eye + floor[:, None] * rays
        hit = (floor > 0) & (there[:, [0, 2]].abs().amax(1) < _FLOOR)
        far = torch.cat((far, torch.where(hit, floor, torch.inf)[:, None]), 1)
        nearest, which = far.min(1)
        points = view.eye + nearest.nan_to_num(posinf=0.0)[:, None] * rays
        which = torch.where(which == SPHERES, -1, which)
        seen = self.lit(points, which, -rays) * torch.isfinite(nearest)[:, None]
        return seen.view(view.side, 2, view.side, 2, 3).mean((1, 3))

    def points(self, count: int, seed: int) -> Scene:
        """Return the Gaussians that a fit begins with."""
        chance = torch.Generator().manual_seed(seed)
        flat = int(_ON_FLOOR * count)
        floor = (2 * torch.rand(flat, 3, generator=chance) - 1) * torch.tensor([_FLOOR, 0.0, _FLOOR])
        which = torch.multinomial(self.radii**2, count - flat, replacement=True, generator=chance)
        outward = normalize(torch.randn(count - flat, 3, generator=chance), dim=1)
        positions = torch.cat((floor, self.centres[which] + self.radii[which, None] * outward))
        which = torch.cat((torch.full((flat,), -1), which))
        apart = torch.cdist(positions, positions).topk(4, largest=False).values[:, 1:].mean(1)
        turns = torch.tensor([1.0, 0.0, 0.0, 0.0]).expand(count, 4).clone()
        colours = constant_colours(self.lit(positions, which, None))
        scales = (0.8 * apart).clamp_min(1e-3).log()[:, None].expand(count, 3).clone()
        return Scene(positions, torch.full((count, 1), 1.5), colours, torch.zeros(count, 45), scales, turns)


def _view(turn: float, height: float) -> View:
    eye = torch.tensor(
        [3.2 * float(torch.cos(torch.tensor(turn))), -height, 3.2 * float(torch.sin(torch.tensor(turn)))]
    )
    forward = normalize(torch.tensor([0.0, -0.25, 0.0]) - eye, dim=0)
    right = normalize(torch.linalg.cross(torch.tensor([0.0, 1.0, 0.0]), forward), dim=0)
    return View(eye, torch.stack((right, torch.linalg.cross(forward, right), forward)), FOCAL, SIDE)


def views() -> tuple[list[View], list[View]]:
    """Return the training and the held-out views: round the scene, at two heights in turn, and between them."""
    step = 2 * torch.pi / TRAINING
    training = [_view(number * step, (1.2, 2.2)[number % 2]) for number in range(TRAINING)]
    return training, [_view((TRAINING / HELD_OUT * number + 0.5) * step, 1.7) for number in range(HELD_OUT)]


def fit(
    parts: list[Tensor], rates: list[float], seen: Callable[[], Scene], world: World, steps: int, seed: int
) -> None:
    """Change `parts`, from which `seen` makes a scene, by Adam: one training view a step, mean absolute error."""
    chance, (training, _) = torch.Generator().manual_seed(seed), views()
    pictures = [world.photograph(view) for view in training]
    groups = [{"params": [part.requires_grad_()], "lr": rate} for part, rate in zip(parts, rates, strict=True)]
    optimiser = torch.optim.Adam(groups, eps=1e-15)
    order: list[int] = []
    for _ in range(steps):
        order = order or torch.randperm(len(training), generator=chance).tolist()
        at = order.pop()
        optimiser.zero_grad()
        drawn: Drawn = render(seen(), training[at])
        (drawn.pixels - pictures[at]).abs().mean().backward()
        optimiser.step()
    for part in parts:
        part.requires_grad_(False)


@torch.no_grad()
def psnr(scene: Scene, world: World, of: list[View]) -> float:
    """Return the mean PSNR over views, in dB."""
    errors = [((render(scene, view).pixels.clamp(0, 1) - world.photograph(view)) ** 2).mean() for view in of]
    return float(torch.stack([-10 * error.log10() for error in errors]).mean())
