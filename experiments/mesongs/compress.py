"""Fit Gaussians to synthetic scenes and compress them: `python experiments/mesongs/compress.py`.

This writes stages.csv, bytes and PSNR after each stage of the chain, in every scene; and messages.csv, what is sent of
the fitted scene and of the compressed one, with the processor time of encoding and decoding on one core, which play.py
sends over links. PSNR is measured on the scene that a receiver decodes. Both the compressed and the fitted scene are
trained on by `TUNED` steps: what the one gains more than the other is due to rounding.
"""

import argparse
import time
from typing import NamedTuple

import chain
import octree
import torch
import world
from splat import Scene

from testbed import csv_rows

SCENES, FITTED, TUNED = range(3), 60, 24
TUNING_RATE = 0.5
"""Learning rates of both further trainings, over those of the fit."""
STAGES = ("fitted", "zstd alone", "fitted further", "pruned", "octree", "codes", "codebook", "zstd", "fine-tuned",
          "without RAHT")  # fmt: skip
_FLOATS = 59
"""Numbers of a Gaussian."""


class Row(NamedTuple):
    """A line of stages.csv."""

    scene: int
    stage: str
    gaussians: int
    bytes: int
    psnr_training: float
    """In dB, mean over the views that the scene was fitted to."""
    psnr: float
    """Of the held-out views."""


class Message(NamedTuple):
    """A line of messages.csv."""

    scene: int
    stage: str
    part: str
    encode_ns: int
    payload_bytes: int
    decode_ns: int


def fitted(of: world.World, gaussians: int, steps: int, seed: int) -> Scene:
    """Fit a scene to its training views."""
    parts = list(of.points(gaussians, seed))
    world.fit(parts, list(world.RATES), lambda: Scene(*parts), of, steps, seed)
    return Scene(*parts)


def further(scene: Scene, of: world.World, steps: int, seed: int) -> Scene:
    """Train a fitted scene on."""
    parts = [part.clone() for part in scene]
    world.fit(parts, [TUNING_RATE * rate for rate in world.RATES], lambda: Scene(*parts), of, steps, seed)
    return Scene(*parts)


def tuned(latent: chain.Latent, raht: octree.Raht, of: world.World, steps: int, seed: int) -> chain.Latent:
    """Fine-tune what is coded; positions and indices stay."""
    rates = world.RATES
    columns = [
        latent.attributes[:, :1],
        latent.attributes[:, 1:4],
        latent.attributes[:, 4:],
        latent.scales,
        latent.book,
    ]
    parts = [part.clone() for part in columns]

    def now() -> chain.Latent:
        return latent._replace(attributes=torch.cat(parts[:3], 1), scales=parts[3], book=parts[4])

    of_parts = (rates.opacities, rates.rotations, rates.colours, rates.scales, rates.rest)
    world.fit(
        parts,
        [TUNING_RATE * float(rate) for rate in of_parts],
        lambda: chain.received(now(), raht),
        of,
        steps,
        seed,
    )
    return now()


def _plain(scene: Scene) -> chain.Parts:
    return {name: part.numpy().tobytes() for name, part in scene._asdict().items()}


def compress(seed: int, *, gaussians: int, fit_steps: int, tune_steps: int) -> tuple[list[Row], list[Message]]:
    """Make a scene, fit and compress it."""
    of = world.World.drawn(seed)
    training, held_out = world.views()
    rows, messages = list[Row](), list[Message]()

    def add(stage: str, scene: Scene, size: int) -> None:
        found = (world.psnr(scene, of, views) for views in (training, held_out))
        rows.append(Row(seed, stage, len(scene.positions), size, *found))
        print(*rows[-1], flush=True)  # noqa: T201

    scene = fitted(of, gaussians, fit_steps, seed)
    add("fitted", scene, chain.size(_plain(scene)))
    rows.append(rows[0]._replace(stage="zstd alone", bytes=chain.size(chain.compressed(_plain(scene)))))
    add("fitted further", further(scene, of, tune_steps, seed), rows[0].bytes)
    messages += [Message(seed, "fitted", name, 0, len(part), 0) for name, part in _plain(scene).items()]

    weights = chain.importance(scene, training)
    keep = chain.kept(weights, chain.PRUNED)
    pruned, weights = scene.at(keep), weights[keep]
    add("pruned", pruned, chain.size(_plain(pruned)))
    at = chain.voxels(pruned, weights)
    tree = octree.encode(at.codes, chain.DEPTH)
    add("octree", at.scene, len(tree) + 24 + 4 * (_FLOATS - 3) * len(at.codes))
    raht = octree.Raht(at.codes, chain.DEPTH)
    merged = torch.zeros(len(at.codes)).index_add(0, _places(pruned, at), weights)
    latent = chain.latent_of(at, merged, seed)
    packed = chain.pack(latent, raht)
    sent = chain.unpack(packed)
    book = len(packed["codebook"]) + len(packed["indices"])
    add("codes", sent._replace(rest=at.scene.rest), chain.size(packed) - book + 4 * at.scene.rest.numel())
    add("codebook", sent, chain.size(packed))
    add("zstd", chain.unpack(chain.restored(chain.compressed(packed))), chain.size(chain.compressed(packed)))
    plain = chain.compressed(chain.pack(latent, None))
    add("without RAHT", chain.unpack(chain.restored(plain)), chain.size(plain))

    latent = tuned(latent, raht, of, tune_steps, seed)
    begin = time.process_time_ns()
    parts = chain.compressed(chain.pack(latent, raht))
    middle = time.process_time_ns()
    received = chain.unpack(chain.restored(parts))
    end = time.process_time_ns()
    add("fine-tuned", received, chain.size(parts))
    first, *_, last = parts
    for name, part in parts.items():
        times = (middle - begin if name == first else 0), (end - middle if name == last else 0)
        messages.append(Message(seed, "fine-tuned", name, times[0], len(part), times[1]))
    return rows, messages


def _places(pruned: Scene, at: chain.Voxels) -> torch.Tensor:
    """Return the voxel of each Gaussian."""
    return torch.cdist(pruned.positions, at.scene.positions).argmin(1)


def main(asked: argparse.Namespace) -> None:
    """Compress the scenes that the tables lack."""
    table = csv_rows.Table(asked.output / "stages.csv", Row, "scene", "stage", say=False)
    sent = csv_rows.Table(asked.output / "messages.csv", Message, "scene", "stage", "part", say=False)
    how = {"gaussians": world.GAUSSIANS, "fit_steps": FITTED, "tune_steps": TUNED}
    if asked.quick:
        how = {"gaussians": 400, "fit_steps": 3, "tune_steps": 2}
    for seed in SCENES[:2] if asked.quick else SCENES:
        if (seed, STAGES[-1]) not in table:
            rows, messages = compress(seed, **how)
            sent.add(messages)
            table.add(rows)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
