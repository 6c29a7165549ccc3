"""Sample digits with several workers and compare them with the unsplit sampler's: `python
experiments/compactfusion/measure.py`.

This writes arms.csv (a row for each arm, number of steps and seed), messages.csv (bytes of messages by denoising step)
and errors.csv (keys and values of one request, step by step). The model is trained once a machine, in minutes:
`python -m testbed.diffusion.pretrain dit-digits`. What is in the output folder already is kept: remove the CSVs to
begin anew.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from testbed import csv_rows
from testbed.diffusion import quality
from testbed.diffusion.dit import ROWS, TOKENS, Dit, sample, start
from testbed.diffusion.pretrain import load_dit
from testbed.diffusion.programs import Part, ProgramName, as_published
from testbed.diffusion.workers import Codecs, Workers
from testbed.jobs.sampling import sent_parts

_DIGITS = 6
"""Of numbers in the tables."""
IMAGES, SEEDS, STEPS = 128, (0, 1, 2, 3, 4), (28, 8)
ERROR_IMAGES = 16
MODEL = "dit-digits"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """How images are sampled."""

    name: str
    program: ProgramName = "ring"
    codec: str = "fp16"
    warmup: int = 1
    options: dict[str, int] = field(default_factory=dict)
    """Of `Codecs`."""
    workers: tuple[int, ...] = (4,)
    steps: tuple[int, ...] = STEPS


def _residual(name: str, inner: str, first: str = "half", **changed: Any) -> Arm:
    return Arm(name=name, codec=f"compactfusion({inner}, first={first})", **changed)


LONG = STEPS[:1]
ARMS = (
    Arm(name="fp16"),
    _residual("residual 1-bit", "onebit"),
    _residual("residual 2-bit", "twobit"),
    Arm(name="PipeFusion", program="pipefusion"),
    Arm(name="DistriFusion", program="displaced"),
    Arm(name="AsyncDiff", program="asyncdiff"),
    Arm(name="1-bit", codec="onebit", steps=LONG),
    Arm(name="2-bit", codec="twobit", steps=LONG),
    Arm(name="open loop 1-bit", codec="delta-open(onebit, first=half)", steps=LONG),
    Arm(name="open loop 2-bit", codec="delta-open(twobit, first=half)", steps=LONG),
    _residual("residual INT4", "int4", steps=LONG),
    _residual("residual low rank 16, INT4 factors", "lowrank(int4, rank=16)", steps=LONG),
    _residual("residual low rank 4", "powersgd(4)", steps=LONG),
    _residual("residual top 1/8", "topk(0.125)", steps=LONG),
    _residual("residual INT4, entropy coded", "entropy(int4)", steps=LONG),
    Arm(name="INT8", codec="int8", steps=LONG),
    _residual("residual 1-bit, INT8 key frame", "onebit", first="byte", steps=LONG),
    _residual("DistriFusion, residual 1-bit", "onebit", program="displaced", steps=LONG),
    _residual("DistriFusion, residual 2-bit", "twobit", program="displaced", steps=LONG),
    _residual("residual 1-bit, 4 key frames", "onebit", options={"key_steps": 4}, steps=LONG),
    Arm(name="DistriFusion, 4 synchronous steps", program="displaced", warmup=4, steps=LONG),
    _residual("residual blocks, 1/8", "topk-blocks(0.125)", steps=LONG),
    _residual("residual blocks, 1/16", "topk-blocks(0.0625)", steps=LONG),
    _residual("residual largest of 8, 2 bits", "topk-chunk(0.125, 8)", steps=LONG),
)
"""The first ones are those of the paper."""
WATCHED = ("1-bit", "open loop 1-bit", "residual 1-bit")


class Row(NamedTuple):
    """A line of arms.csv."""

    arm: str
    program: str
    codec: str
    workers: int
    steps: int
    seed: int
    images: int
    relative_l2: float
    """To the unsplit sampler's images of the same noise."""
    psnr_db: float
    frechet_unsplit: float
    """Between features of these images and of the unsplit sampler's, of the same noise."""
    frechet_real: float
    """Between features of these images and of the digits that the model learned from; it is of as few images as there
    are, and so above 0 for real ones too."""
    sent_bytes: float
    """By a worker in a request, on average: frames, without headers of packets."""
    key_bytes: float
    """Of these, in synchronous steps, key frames and the last pixels: all that is not of the codec's later messages."""


class Message(NamedTuple):
    """A line of messages.csv."""

    arm: str
    program: str
    codec: str
    workers: int
    steps: int
    warmup: int
    kind: str
    step: int
    frame_bytes: float
    """Mean over layers and workers."""


def measure(
    model: Dit, arm: Arm, workers: int, steps: int, seeds: Iterable[int], unsplit: Unsplit
) -> Iterator[Row | Message]:
    """Yield a row for each seed, then what became of the last one's messages."""
    program = as_published(arm.program, workers, model.size.layers, steps, TOKENS, ROWS, arm.warmup)
    team = Workers(model, program, Codecs(arm.codec, boundary="fp16", **arm.options), decode_once=True)
    for seed in seeds:
        noise, labels = start(unsplit.images, seed)
        found = team.sample(noise, labels)
        reference = unsplit(steps, seed)
        sends = [part for _, part in sent_parts(program.actions())]
        yield Row(
            arm.name,
            arm.program,
            arm.codec,
            workers,
            steps,
            seed,
            unsplit.images,
            *unsplit.judge(found.images, reference),
            sum(found.frame_bytes[part] for part in sends) / workers,
            sum(found.frame_bytes[part] for part in sends if _first(arm, part)) / workers,
        )
    by_step = defaultdict[tuple[str, int], list[int]](list)
    for part, size in found.frame_bytes.items():
        by_step[part.kind, part.step].append(size)
    for (kind, step), sizes in sorted(by_step.items()):
        yield Message(arm.name, arm.program, arm.codec, workers, steps, arm.warmup, kind, step, fmean(sizes))


def _first(arm: Arm, part: Part) -> bool:
    return part.step < max(arm.warmup, arm.options.get("key_steps", 1)) or part.kind == "pixels"


class Unsplit:
    """The unsplit sampler's images, made once; and features of the digits."""

    def __init__(self, model: Dit, images: int) -> None:
        self.model, self.images = model, images
        self.judge = quality.Judge()
        self._made: dict[tuple[int, int], Tensor] = {}

    def __call__(self, steps: int, seed: int) -> Tensor:
        if (steps, seed) not in self._made:
            self._made[steps, seed] = sample(self.model, *start(self.images, seed), steps)
        return self._made[steps, seed]


# ---------------------------------------------------------------------- keys and values, step by step
class Error(NamedTuple):
    """A line of errors.csv: norms of all layers' keys and values that a worker received, in one step."""

    arm: str
    step: int
    norm: float
    """Of what was sent."""
    cosine: float
    """Between what was sent and what was in the step before; empty in the first."""
    change: float
    """Norm of the difference between them."""
    error: float
    """Norm of what was decoded less what was sent."""
    deviation: float
    """Norm of what was decoded less what the unsplit sampler has there."""


def errors(model: Dit, steps: int, images: int) -> Iterator[Error]:
    """Yield what becomes of keys and values between two workers, without a codec and with those of `WATCHED`."""
    exact: dict[Part, Tensor] = {}
    codecs = {"fp32": "fp32"} | {arm.name: arm.codec for arm in ARMS if arm.name in WATCHED}
    for name, codec in codecs.items():
        sent: dict[Part, Tensor] = {}
        got: dict[Part, Tensor] = {}

        def watch(part: Part, before: Tensor, after: Tensor, sent: Any = sent, got: Any = got) -> None:
            sent[part], got[part] = before, after

        program = as_published("ring", 2, model.size.layers, steps, TOKENS, ROWS)
        Workers(model, program, Codecs(codec)).sample(*start(images, 0), watch)
        if not exact:
            exact = sent
        for step in range(steps):
            parts = [part for part in sent if part.step == step]
            now, was, true = (torch.stack([of[part] for part in parts]).flatten() for of in (sent, got, exact))
            before = torch.stack([sent[part._replace(step=max(0, step - 1))] for part in parts]).flatten()
            yield Error(
                name,
                step,
                float(now.norm()),
                float(torch.nn.functional.cosine_similarity(now, before, dim=0)) if step else float("nan"),
                float((now - before).norm()) if step else float("nan"),
                float((was - now).norm()),
                float((was - true).norm()),
            )


def main(asked: argparse.Namespace) -> None:
    """Write the CSVs."""
    arms, seeds, images, few = ARMS, SEEDS, IMAGES, 0
    model = load_dit("dit-digits-nano" if asked.quick else MODEL)
    if asked.quick:
        arms, seeds, images, few = ARMS[:10], (0, 1), 16, 4
    if not (asked.output / "errors.csv").exists():
        found = errors(model, few or STEPS[0], min(images, ERROR_IMAGES))
        csv_rows.write_rows(asked.output / "errors.csv", Error._fields, found, digits=_DIGITS)
    unsplit, key = Unsplit(model, images), ("arm", "workers", "steps")
    rows = csv_rows.Table(asked.output / "arms.csv", Row, digits=_DIGITS)
    messages = csv_rows.Table(asked.output / "messages.csv", Message, *key, digits=_DIGITS, say=False)
    for arm in arms:
        for workers, steps in itertools.product(arm.workers, arm.steps[: 1 if few else None]):
            if workers > model.size.layers and arm.program in ("pipefusion", "asyncdiff"):
                continue
            if (arm.name, workers, few or steps) not in messages:
                made = list(measure(model, arm, workers, few or steps, seeds, unsplit))
                rows.add(each for each in made if isinstance(each, Row))
                messages.add(each for each in made if isinstance(each, Message))


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
