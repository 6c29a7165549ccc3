"""3D Gaussians and a renderer of them in torch: front-to-back alpha blending in a pinhole camera's view, as in 3D
Gaussian splatting (Kerbl et al., SIGGRAPH 2023, arXiv 2308.04079).

A Gaussian's covariance is projected by the camera's local linearisation, and widened by 0.3 square pixels. Its colour
is spherical harmonics of degree 3 in the direction from the eye. An image is cut into square tiles, each of which
blends the Gaussians whose three standard deviations touch it, the nearest first.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 16
"""Pixels of a tile's side."""
NEAR = 0.2
"""Least depth of a Gaussian that is drawn."""
_WIDENED, _LEAST, _MOST = 0.3, 1 / 255, 0.99
"""Added variance in square pixels; the opacities at a pixel that are left out, and that are cut off."""
_C0 = 0.28209479177387814
_C1 = 0.4886025119029199
_C2 = (1.0925484305920792, 1.0925484305920792, 0.31539156525252005, 1.0925484305920792, 0.5462742152960396)
_C3 = (0.5900435899266435, 2.890611442640554, 0.4570457994644658, 0.3731763325901154, 0.4570457994644658,
       1.445305721320277, 0.5900435899266435)  # fmt: skip


class Scene(NamedTuple):
    """n Gaussians: 59 numbers each."""

    positions: Tensor
    """(n, 3)."""
    opacities: Tensor
    """(n, 1), before the sigmoid."""
    colours: Tensor
    """(n, 3): the constant coefficients."""
    rest: Tensor
    """(n, 45): the 15 others, three channels each."""
    scales: Tensor
    """(n, 3): logarithms of standard deviations along the Gaussian's own axes."""
    rotations: Tensor
    """(n, 4): quaternions, of any length."""

    def at(self, places: Tensor) -> "Scene":
        """Return some of the Gaussians."""
        return Scene(*(part[places] for part in self))


class View(NamedTuple):
    """A camera."""

    eye: Tensor
    """(3,)."""
    axes: Tensor
    """(3, 3): the camera's right, down and forward."""
    focal: float
    """In pixels."""
    side: int
    """Of the square image, in pixels."""


class Drawn(NamedTuple):
    """An image."""

    pixels: Tensor
    """(side, side, 3)."""
    weights: Tensor
    """(n,): the sum over the pixels of what each Gaussian weighs there."""


def matrices(quaternions: Tensor) -> Tensor:
    """Return rotations (n, 3, 3) of quaternions (n, 4), real part first."""
    w, x, y, z = torch.nn.functional.normalize(quaternions, dim=1).unbind(1)
    rows = (
        1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
        2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
        2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y),
    )  # fmt: skip
    return torch.stack(rows, 1).view(-1, 3, 3)


def colours_towards(scene: Scene, eye: Tensor) -> Tensor:
    """Return the colours (n, 3) that are seen from a place, none negative."""
    x, y, z = torch.nn.functional.normalize(scene.positions.detach() - eye, dim=1).unbind(1)
    xx, yy, zz, xy, yz, xz = x * x, y * y, z * z, x * y, y * z, x * z
    basis = torch.stack(
        (
            -_C1 * y, _C1 * z, -_C1 * x,
            _C2[0] * xy, -_C2[1] * yz, _C2[2] * (2 * zz - xx - yy), -_C2[3] * xz, _C2[4] * (xx - yy),
            -_C3[0] * y * (3 * xx - yy), _C3[1] * xy * z, -_C3[2] * y * (4 * zz - xx - yy),
            _C3[3] * z * (2 * zz - 3 * xx - 3 * yy), -_C3[4] * x * (4 * zz - xx - yy), _C3[5] * z * (xx - yy),
            -_C3[6] * x * (xx - 3 * yy),
        ), 1,
    )  # fmt: skip
    return (0.5 + _C0 * scene.colours + (basis[:, :, None] * scene.rest.view(-1, 15, 3)).sum(1)).clamp_min(0)


def constant_colours(seen: Tensor) -> Tensor:
    """Return the constant coefficients of Gaussians that look like this from everywhere."""
    return (seen - 0.5) / _C0


class _Flat(NamedTuple):
    """Gaussians in the image's plane."""

    centres: Tensor
    """(n, 2), in pixels."""
    inverse: Tensor
    """(n, 3): the inverse covariance's xx, xy and yy."""
    radii: Tensor
    """(n,): three standard deviations along the longer axis."""
    depths: Tensor


def _project(scene: Scene, view: View) -> _Flat:
    x, y, z = ((scene.positions - view.eye) @ view.axes.T).unbind(1)
    safe = z.clamp_min(NEAR)
    centres = view.focal * torch.stack((x / safe, y / safe), 1) + view.side / 2
    none = torch.zeros_like(z)
    slopes = torch.stack((1 / safe, none, -x / safe**2, none, 1 / safe, -y / safe**2), 1).view(-1, 2, 3) * view.focal
    half = slopes @ view.axes @ (matrices(scene.rotations) * scene.scales.exp()[:, None])
    flat = half @ half.transpose(1, 2)
    a, b, c = flat[:, 0, 0] + _WIDENED, flat[:, 0, 1], flat[:, 1, 1] + _WIDENED
    inverse = torch.stack((c, -b, a), 1) / (a * c - b * b)[:, None]
    with torch.no_grad():
        longest = (a + c) / 2 + (((a - c) / 2) ** 2 + b * b).sqrt()
    return _Flat(centres, inverse, 3 * longest.sqrt(), z)


def render(scene: Scene, view: View) -> Drawn:
    """Draw a scene on black."""
    flat, colours, opacities = _project(scene, view), colours_towards(scene, view.eye), scene.opacities.sigmoid()
    weights = torch.zeros(len(scene.positions))
    in_front = (flat.depths > NEAR) & (opacities[:, 0] > _LEAST)
    order = torch.argsort(flat.depths.detach().where(in_front, torch.inf), stable=True)[: int(in_front.sum())]
    rows = []
    for top in range(0, view.side, TILE):
        row = []
        for left in range(0, view.side, TILE):
            centre = torch.tensor([left + TILE / 2, top + TILE / 2])
            apart = (flat.centres.detach()[order] - centre).abs().amax(1)
            inside = order[apart < flat.radii[order] + TILE / 2]
            row.append(_tile(flat, colours, opacities, inside, left, top, weights))
        rows.append(torch.cat(row, 1))
    return Drawn(torch.cat(rows)[: view.side, : view.side], weights)


def _tile(
    flat: _Flat, colours: Tensor, opacities: Tensor, inside: Tensor, left: int, top: int, weights: Tensor
) -> Tensor:
    """Blend the Gaussians of a tile, in order of depth; returns (TILE, TILE, 3)."""
    across = torch.arange(TILE) + 0.5
    centres, inverse = flat.centres[inside], flat.inverse[inside]
    x, y = left + across[None] - centres[:, :1], top + across[None] - centres[:, 1:]  # (n, TILE)
    square = (inverse[:, :1] * x * x)[:, None] + (inverse[:, 2:] * y * y)[:, :, None]
    square = square + 2 * (inverse[:, 1:2] * y)[:, :, None] * x[:, None]
    alpha = (opacities[inside][:, :, None] * torch.exp(-0.5 * square)).clamp_max(_MOST).flatten(1)  # (n, pixels)
    alpha = alpha * (alpha.detach() > _LEAST)
    before = torch.cat((torch.ones(1, TILE * TILE), 1 - alpha)).cumprod(0)[:-1]
    blended = alpha * before
    with torch.no_grad():
        weights.index_add_(0, inside, blended.sum(1))
    return (blended.T @ colours[inside]).view(TILE, TILE, 3)
