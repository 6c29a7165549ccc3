"""MesonGS's chain: importance, pruning, an octree of positions, RAHT, codes, a codebook and an entropy coder.

Source: MesonGS (Xie et al., ECCV 2024, arXiv 2409.09756), after its authors' code. A Gaussian's importance is what it
weighs in all views, times its volume's share of a large one's to the power `BETA`. Opacity, Euler angles and constant
colour go through RAHT; its root is sent as fp32, and each channel's other coefficients as 8-bit codes in `BLOCKS` runs
with a range each. Scales have such codes without the transform, and the other colour coefficients are an index into a
codebook of k-means. Rounding passes gradients on unchanged, for fine-tuning.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import octree
import torch
import zstandard
from splat import Scene, View, matrices, render
from torch import Tensor

DEPTH, BLOCKS, CODEBOOK, BETA, PRUNED = 10, 16, 128, 0.1, 0.3
"""Levels of the octree; runs of a channel; codebook entries; the exponent of the volume; the share that is dropped."""
_ROUNDS, _LEVEL = 12, 19
"""Of k-means; zstd's level."""
_LARGE = 0.9
"""The volume at this place of the descending order counts as large."""
Parts = dict[str, bytes]
"""What is sent, by name."""


# ------------------------------------------------------------------ pruning and positions
def importance(scene: Scene, views: Sequence[View]) -> Tensor:
    """Return the importance (n,) of each Gaussian."""
    with torch.no_grad():
        weights = torch.stack([render(scene, view).weights for view in views]).sum(0)
        volumes = scene.scales.sum(1).exp()
        large = volumes.sort(descending=True).values[int(_LARGE * (len(volumes) - 1))]
        return weights * (volumes / large) ** BETA


def kept(importances: Tensor, share: float) -> Tensor:
    """Return the places of the most important Gaussians, all but a share, in their order."""
    count = len(importances) - int(share * len(importances))
    return torch.argsort(importances, descending=True, stable=True)[:count].sort().values


class Voxels(NamedTuple):
    """A scene whose positions are centres of voxels, in the order of their codes; and what the receiver needs."""

    scene: Scene
    codes: octree.Codes
    bounds: tuple[float, ...]
    """The lower corner and the sides of the box."""


def _centres(codes: octree.Codes, bounds: Sequence[float]) -> Tensor:
    low, sides = torch.tensor(bounds[:3]), torch.tensor(bounds[3:])
    return low + (torch.from_numpy(octree.cells_of(codes, DEPTH)).float() + 0.5) / 2**DEPTH * sides


def voxels(scene: Scene, importances: Tensor) -> Voxels:
    """Move Gaussians to the centres of their voxels, and merge those that share one: means by importance."""
    low, high = scene.positions.amin(0), scene.positions.amax(0)
    bounds = tuple(np.concatenate((low.numpy(), (high - low).numpy())).tolist())
    cells = ((scene.positions - low) / (high - low) * 2**DEPTH).long().clamp(0, 2**DEPTH - 1)
    codes, of = np.unique(octree.codes_of(cells.numpy(), DEPTH), return_inverse=True)
    place, shares = torch.from_numpy(of), importances[:, None] + 1e-12
    sums = torch.zeros(len(codes), 1).index_add(0, place, shares)
    merged = [torch.zeros(len(codes), part.shape[1]).index_add(0, place, shares * part) / sums for part in scene]
    return Voxels(Scene(_centres(codes, bounds), *merged[1:]), codes, bounds)


# ------------------------------------------------------------------ angles
def angles_of(quaternions: Tensor) -> Tensor:
    """Return Euler angles (n, 3), about z, y and x in this order, of quaternions (n, 4)."""
    turn = matrices(quaternions)
    about_y = torch.asin((-turn[:, 2, 0]).clamp(-1, 1))
    return torch.stack(
        (torch.atan2(turn[:, 1, 0], turn[:, 0, 0]), about_y, torch.atan2(turn[:, 2, 1], turn[:, 2, 2])), 1
    )


def quaternions_of(angles: Tensor) -> Tensor:
    """Return unit quaternions (n, 4) of Euler angles (n, 3)."""
    (cz, cy, cx), (sz, sy, sx) = ((angles / 2).cos().unbind(1), (angles / 2).sin().unbind(1))
    parts = (
        cz * cy * cx + sz * sy * sx, cz * cy * sx - sz * sy * cx,
        cz * sy * cx + sz * cy * sx, sz * cy * cx - cz * sy * sx,
    )  # fmt: skip
    return torch.stack(parts, 1)


# ------------------------------------------------------------------ codes
class Coded(NamedTuple):
    """Channels in 8-bit codes."""

    codes: Tensor
    """(n, channels), uint8."""
    steps: Tensor
    """(BLOCKS, channels)."""
    zeros: Tensor
    """(BLOCKS, channels): the code of 0."""


def _runs(count: int) -> Tensor:
    """Return the run of each of so many values."""
    return torch.arange(count) * BLOCKS // count


def coded(values: Tensor) -> Coded:
    """Return the codes of values (n, channels): each run of a channel has a range of its own, which includes 0."""
    runs, none = _runs(len(values))[:, None].expand_as(values), torch.zeros(BLOCKS, values.shape[1])
    low, high = (none.scatter_reduce(0, runs, values.detach(), way) for way in ("amin", "amax"))
    steps = ((high - low) / 255).clamp_min(1e-12)
    zeros = (-low / steps).round()
    codes = (values.detach() / steps.gather(0, runs) + zeros.gather(0, runs)).round().clamp(0, 255)
    return Coded(codes.to(torch.uint8), steps, zeros)


def values_of(of: Coded) -> Tensor:
    """Return the values of codes."""
    runs = _runs(len(of.codes))[:, None].expand(of.codes.shape)
    return (of.codes - of.zeros.gather(0, runs)) * of.steps.gather(0, runs)


def rounded(values: Tensor) -> Tensor:
    """Return what arrives of values; the gradient passes unchanged."""
    return values + (values_of(coded(values)) - values).detach()


def codebook(vectors: Tensor, weights: Tensor, entries: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the entries (k, d) and each vector's index (n,), by weighted k-means; entries begin as different vectors
    at random.
    """
    chance = torch.Generator().manual_seed(seed)
    book = vectors[torch.randperm(len(vectors), generator=chance)[:entries]].clone()
    for _ in range(_ROUNDS):
        nearest = torch.cdist(vectors, book).argmin(1)
        sums = torch.zeros_like(book).index_add(0, nearest, weights[:, None] * vectors)
        total = torch.zeros(len(book)).index_add(0, nearest, weights)
        book = torch.where(total[:, None] > 0, sums / total.clamp_min(1e-12)[:, None], book)
    return book, torch.cdist(vectors, book).argmin(1)


# ------------------------------------------------------------------ what is sent
class Latent(NamedTuple):
    """What is coded of a scene in voxels; fine-tuning changes all but positions and indices."""

    attributes: Tensor
    """(n, 7): opacity, Euler angles, constant colour."""
    scales: Tensor
    book: Tensor
    indices: Tensor
    voxels: Voxels


def latent_of(of: Voxels, weights: Tensor, seed: int) -> Latent:
    """Return what is coded."""
    book, indices = codebook(of.scene.rest, weights, CODEBOOK, seed)
    attributes = torch.cat((of.scene.opacities, angles_of(of.scene.rotations), of.scene.colours), 1)
    return Latent(attributes, of.scene.scales, book, indices, of)


def _scene(positions: Tensor, attributes: Tensor, scales: Tensor, rest: Tensor) -> Scene:
    return Scene(
        positions, attributes[:, :1], attributes[:, 4:], rest, scales, quaternions_of(attributes[:, 1:4])
    )  # fmt: skip


def received(of: Latent, raht: octree.Raht | None) -> Scene:
    """Return the scene that the receiver will have, up to the codebook's 16 bits, differentiably."""
    if raht is None:
        attributes = rounded(of.attributes)
    else:
        coefficients = raht.transform(of.attributes)
        attributes = raht.inverse(torch.cat((coefficients[:1], rounded(coefficients[1:]))))
    return _scene(of.voxels.scene.positions, attributes, rounded(of.scales), of.book[of.indices])


def _bytes(of: Coded) -> tuple[bytes, bytes]:
    ranges = of.steps.numpy().tobytes() + of.zeros.to(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(of.codes.numpy().T).tobytes(), ranges


def _coded(codes: bytes, ranges: bytes, channels: int) -> Coded:
    count = BLOCKS * channels
    steps = torch.frombuffer(bytearray(ranges[: 4 * count]), dtype=torch.float32).view(BLOCKS, channels)
    zeros = torch.frombuffer(bytearray(ranges[4 * count :]), dtype=torch.uint8).view(BLOCKS, channels).float()
    return Coded(torch.frombuffer(bytearray(codes), dtype=torch.uint8).view(channels, -1).T, steps, zeros)


def pack(of: Latent, raht: octree.Raht | None) -> Parts:
    """Return what is sent, before the entropy coder."""
    values, parts = of.attributes, Parts()
    parts["positions"] = octree.encode(of.voxels.codes, DEPTH).tobytes()
    parts["bounds"] = np.asarray(of.voxels.bounds, np.float32).tobytes()
    if raht is not None:
        values = raht.transform(values)
        parts["roots"], values = values[0].numpy().tobytes(), values[1:]
    parts["attributes"], parts["attribute ranges"] = _bytes(coded(values))
    parts["scales"], parts["scale ranges"] = _bytes(coded(of.scales))
    parts["codebook"] = of.book.half().numpy().tobytes()
    parts["indices"] = of.indices.to(torch.uint8).numpy().tobytes()
    return parts


def unpack(parts: Parts) -> Scene:
    """Return the scene that was sent."""
    codes = octree.decode(np.frombuffer(parts["positions"], np.uint8), DEPTH)
    bounds = np.frombuffer(parts["bounds"], np.float32).tolist()
    attributes = values_of(_coded(parts["attributes"], parts["attribute ranges"], 7))
    if "roots" in parts:
        roots = torch.frombuffer(bytearray(parts["roots"]), dtype=torch.float32)
        attributes = octree.Raht(codes, DEPTH).inverse(torch.cat((roots[None], attributes)))
    book = torch.frombuffer(bytearray(parts["codebook"]), dtype=torch.float16).float().view(CODEBOOK, -1)
    rest = book[torch.frombuffer(bytearray(parts["indices"]), dtype=torch.uint8).long()]
    scales = values_of(_coded(parts["scales"], parts["scale ranges"], 3))
    return _scene(_centres(codes, bounds), attributes, scales, rest)


def compressed(parts: Parts) -> Parts:
    """Return the parts after the entropy coder, each by itself."""
    coder = zstandard.ZstdCompressor(level=_LEVEL)
    return {name: coder.compress(part) for name, part in parts.items()}


def restored(parts: Parts) -> Parts:
    """Invert `compressed`."""
    decoder = zstandard.ZstdDecompressor()
    return {name: decoder.decompress(part) for name, part in parts.items()}


def size(parts: Parts) -> int:
    """Return the bytes of all parts."""
    return sum(map(len, parts.values()))
