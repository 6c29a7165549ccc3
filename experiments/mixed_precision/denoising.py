"""Search bits for each layer and denoising step of a diffusion transformer that two workers sample: `python
experiments/mixed_precision/denoising.py`.

Keys and values go round a ring as residuals from the step before (CompactFusion), the first ones as int8. What may have
bits of its own is a cell: a layer, a group of steps, or a layer in a group of steps. This writes
denoising_sensitivity.csv, the error of images where one cell alone has a codec; and denoising.csv, a row for each
setting and seed: uniform bits, and those that a greedy search finds for the same bytes, by the sum of what each cell
costs alone, or by what all of them cost together, measured at each step. Errors are relative L2 distances to the
unsplit sampler's images of the same noise; the search sees other seeds than those that judge.
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from testbed import csv_rows
from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.make import make
from testbed.codecs.memory.delta import Delta
from testbed.diffusion import quality
from testbed.diffusion.dit import ROWS, TOKENS, Dit, sample, start
from testbed.diffusion.pretrain import load_dit
from testbed.diffusion.programs import Part, Program
from testbed.diffusion.workers import Codecs, Stream, Workers
from testbed.jobs.sampling import sent_parts
from testbed.policies import precision

CODECS = {4: "int4", 3: "int3", 2: "twobit", 1: "onebit"}
"""By bits. A scale for each token, and for each channel as well at 1 and 2 bits."""
NONE = 32
"""Bits of a cell without a codec."""
BUDGETS = (3, 2)
"""Uniform widths whose bytes the search may take."""
WORKERS = 2
GROUPS: Mapping[int, Sequence[int]] = {8: (1, 2, 4, 6)}
"""Denoising steps -> first step of each group; step 0 is that of key frames. With 8 steps keys and values change from
step to step about as much as FLUX.1-dev's do in 28.
"""
SEARCHES = (("layers", "alone"), ("layers", "together"), ("steps", "alone"), ("steps", "together"), ("both", "alone"))
"""What may have bits of its own, and by what: to measure every layer in every group together takes a thousand requests.
"""
SEARCH_SEEDS, SEARCH_IMAGES = (100,), 16
SEEDS, IMAGES = (0, 1, 2, 3, 4), 64
QUICK: Mapping[int, Sequence[int]] = {4: (1, 2)}
_DIGITS = 6
"""Of numbers in the tables."""

Cell = tuple[int, int]
"""A layer and a group of steps."""


class Sensitivity(NamedTuple):
    """A line of denoising_sensitivity.csv."""

    steps: int
    layer: int
    """-1: only key frames have a codec, which they have in every row."""
    group: int
    """The first of its denoising steps."""
    bits: int
    relative_l2: float
    """Where this cell alone has a codec."""


class Setting(NamedTuple):
    """A line of denoising.csv."""

    steps: int
    cells: str
    """What may have bits of its own: all (uniform), layers, steps, or both."""
    search: str
    """uniform, or greedy by what cells cost: alone, together."""
    budget: int
    """The uniform width with as many bytes, or more."""
    widths: str
    """Layer by layer, with a number for each group of steps."""
    sent_bytes: float
    """By a worker in a request, on average, key frames and last pixels included."""
    predicted: float
    """Relative L2 on the search's images if squared errors of cells add up, and to that of key frames."""
    searched: float
    """Measured there."""
    seed: int
    relative_l2: float


class ByStep:
    """A codec for each group of denoising steps: what they remember is outside, in the residual's memory."""

    def __init__(self, codecs: Sequence[Codec], firsts: Sequence[int]) -> None:
        self._codecs, self._firsts = codecs, firsts

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Encode with the step's codec."""
        return self._of(key).encode(tensor, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Decode with the step's codec."""
        return self._of(key).decode(payload, key)

    def _of(self, key: MessageKey) -> Codec:
        return self._codecs[group_of(key.step, self._firsts)]


def group_of(step: int, firsts: Sequence[int]) -> int:
    """Return the group of a denoising step."""
    return max(place for place, first in enumerate(firsts) if step >= first)


class Sampler:
    """Samples requests of a number of denoising steps with bits for each layer and group of steps."""

    def __init__(self, model: Dit, steps: int, firsts: Sequence[int], seeds: Sequence[int], images: int) -> None:
        self._model, self._firsts = model, firsts
        self._program = Program("ring", WORKERS, model.size.layers, steps, TOKENS, ROWS)
        self._requests = {seed: start(images, seed) for seed in seeds}
        self._unsplit = {seed: sample(model, *request, steps) for seed, request in self._requests.items()}
        self.cells: list[Cell] = list(itertools.product(range(model.size.layers), range(len(firsts))))

    def errors(self, widths: Mapping[Cell, int]) -> tuple[dict[int, float], dict[Part, int]]:
        """Return the relative L2 error of each seed's images, and the length of each message."""

        def codec_of(stream: Stream, context: Context) -> Codec:
            inner = [self._codec(widths[stream[1], group], context) for group in range(len(self._firsts))]
            return Delta(context, ByStep(inner, self._firsts), first="byte")

        team, errors, frame_bytes = (
            Workers(self._model, self._program, Codecs(codec_of, boundary="fp16"), decode_once=True),
            dict[int, float](),
            dict[Part, int](),
        )
        for seed, request in self._requests.items():
            found = team.sample(*request)
            errors[seed] = quality.relative_l2(found.images, self._unsplit[seed])
            frame_bytes = dict(found.frame_bytes)
        return errors, frame_bytes

    @staticmethod
    def _codec(bits: int, context: Context) -> Codec:
        return make("fp32" if bits == NONE else CODECS[bits], context)

    def harm(self, widths: Mapping[Cell, int]) -> float:
        """Return the mean square of the errors: squares of independent errors add up."""
        errors = self.errors(widths)[0].values()
        return sum(error**2 for error in errors) / len(errors)

    def sent_bytes(self, frame_bytes: Mapping[Part, int]) -> float:
        """Return what a worker sends, on average."""
        return sum(frame_bytes[part] for _, part in sent_parts(self._program.actions())) / WORKERS

    def bytes_by_cell(self, bits: int) -> dict[Cell, float]:
        """Return what a worker sends of each cell with so many bits, measured."""
        frame_bytes, found = self.errors(dict.fromkeys(self.cells, bits))[1], dict.fromkeys(self.cells, 0.0)
        for _, part in sent_parts(self._program.actions()):
            if part.kind == "keys and values" and part.step >= self._firsts[0]:
                found[part.layer, group_of(part.step, self._firsts)] += frame_bytes[part] / WORKERS
        return found


def together(cells: Sequence[Cell], kind: str) -> list[list[Cell]]:
    """Return the cells that have the same bits: of a layer, of a group of steps, or each for itself."""
    if kind == "both":
        return [[cell] for cell in cells]
    place = 0 if kind == "layers" else 1
    return [[cell for cell in cells if cell[place] == value] for value in sorted({cell[place] for cell in cells})]


def spread(widths: Sequence[int], groups: Sequence[Sequence[Cell]]) -> dict[Cell, int]:
    """Return the bits of each cell."""
    return {cell: bits for bits, group in zip(widths, groups, strict=True) for cell in group}


def sensitivities(sampler: Sampler, steps: int, firsts: Sequence[int]) -> list[Sensitivity]:
    """Measure each width of each cell, all others without a codec."""
    plain = dict.fromkeys(sampler.cells, NONE)
    return [Sensitivity(steps, -1, 0, NONE, sampler.harm(plain) ** 0.5)] + [
        Sensitivity(steps, layer, firsts[group], bits, sampler.harm({**plain, (layer, group): bits}) ** 0.5)
        for layer, group in sampler.cells
        for bits in CODECS
    ]


def settings(
    sampler: Sampler, judge: Sampler, steps: int, alone: Mapping[Cell, Mapping[int, float]], floor: float
) -> list[Setting]:
    """Judge uniform widths, and those that are found for their bytes. `alone`: what each cell adds to the squared error
    `floor`, which key frames make.
    """
    by_width = {bits: sampler.bytes_by_cell(bits) for bits in CODECS}
    every, rows = together(sampler.cells, "both"), list[Setting]()
    asked = [("all", "uniform", bits, dict.fromkeys(sampler.cells, bits)) for bits in CODECS]
    for kind, search in SEARCHES:
        groups = together(sampler.cells, kind)
        cost = [{bits: sum(of[cell] for cell in group) for bits, of in by_width.items()} for group in groups]
        harms = [{bits: sum(alone[cell][bits] for cell in group) for bits in CODECS} for group in groups]

        def measured(widths: precision.Widths, groups: Sequence[Sequence[Cell]] = groups) -> float:
            return sampler.harm(spread(widths, groups))

        def summed(widths: precision.Widths, harms: precision.Table = harms) -> float:
            return precision.total(widths, harms)

        path = precision.greedy_path(measured if search == "together" else summed, cost)
        for budget in BUDGETS:
            limit = precision.total((budget,) * len(groups), cost)
            asked.append((kind, search, budget, spread(precision.within(path, cost, limit), groups)))
    judged: dict[str, tuple[dict[int, float], float, float]] = {}
    for kind, search, budget, widths in asked:
        text = "/".join(
            "".join(str(bits) for (layer, _), bits in sorted(widths.items()) if layer == at)
            for at in sorted({layer for layer, _ in widths})
        )
        if text not in judged:
            errors, frame_bytes = judge.errors(widths)
            judged[text] = errors, judge.sent_bytes(frame_bytes), sampler.harm(widths) ** 0.5
        errors, sent, searched = judged[text]
        added = precision.total(tuple(widths[cell] for (cell,) in every), [alone[cell] for (cell,) in every])
        predicted = (floor + added) ** 0.5
        rows += [
            Setting(steps, kind, search, budget, text, sent, predicted, searched, seed, error)
            for seed, error in errors.items()
        ]
        print(*csv_rows.shortened(rows[-1], _DIGITS), flush=True)  # noqa: T201
    return rows


def main(asked: argparse.Namespace) -> None:
    """Go through the numbers of steps; those in the tables are kept."""
    model = load_dit("dit-digits-nano" if asked.quick else "dit-digits")
    seeds, images, of_search = ((0, 1), 8, 4) if asked.quick else (SEEDS, IMAGES, SEARCH_IMAGES)
    table = csv_rows.Table(asked.output / "denoising.csv", Setting, "steps", say=False)
    sensitivity = csv_rows.Table(asked.output / "denoising_sensitivity.csv", Sensitivity, say=False)
    for steps, firsts in (QUICK if asked.quick else GROUPS).items():
        if (steps,) in table:
            continue
        sampler = Sampler(model, steps, firsts, SEARCH_SEEDS, of_search)
        rows = sensitivities(sampler, steps, firsts)
        floor, alone = rows[0].relative_l2 ** 2, {cell: dict[int, float]() for cell in sampler.cells}
        for row in rows[1:]:
            alone[row.layer, firsts.index(row.group)][row.bits] = row.relative_l2**2 - floor
        found = settings(sampler, Sampler(model, steps, firsts, seeds, images), steps, alone, floor)
        sensitivity.add(rows)
        table.add(found)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
