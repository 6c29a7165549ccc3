"""Measure codecs on the tensors at a model's boundaries: bits, errors, and the outliers in those tensors.

An experiment's measure.py is `main` with its models and codecs. Results do not depend on time or machine load.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from testbed.codecs.bench.measure import fidelity
from testbed.codecs.check.subject import subject_of
from testbed.csv_rows import Table
from testbed.errors import status_of
from testbed.message_key import Direction
from testbed.workloads import checkpoints, models
from testbed.workloads.data import Batch
from testbed.workloads.prepare import tokenizer_file
from testbed.workloads.real_tensors import FINE_RATE, chain_of, specification

TENSORS, CODECS = "tensors.csv", "codecs.csv"
_MESSAGES = 2
_TOP = 0.01
Text = Literal["bundled", "repeated"]
"""repeated: every sequence is a number followed by one repeated sentence, as in inference benchmarks."""
_SENTENCE = " The committee met again in the spring, heard the same reports, and adjourned without a vote."


class TensorRow(NamedTuple):
    """A row of tensors.csv: all messages over one boundary in one direction."""

    model: str
    text: Text
    boundary: int
    """Number of layers before it."""
    direction: Direction
    values: int
    """Values per message."""
    kurtosis: float
    """E[x^4] / E[x^2]^2 over all values: 3 for a Gaussian."""
    channel_ratio: float
    """Root mean square of the largest channel over that of the median one."""
    top_channels: float
    """Share of the sum of squares in the largest 1 % of the channels."""
    token_ratio: float
    """Root mean square of the largest token over that of the median one."""


class BoundaryRow(NamedTuple):
    """A row of codecs.csv: one codec applied to those messages in order."""

    model: str
    text: Text
    boundary: int
    direction: Direction
    codec: str
    bits: float
    """Bits per value on the wire, headers included."""
    error: float
    token_error: float
    """Both errors as in `codecs.bench.measure.CodecFidelity`."""


def measure(folder: Path, model: str, text: Text, stages: int, codecs: Sequence[str], *, messages: int) -> None:
    """Measure codecs at each boundary of a model split as evenly as possible; existing rows in `folder` are kept.

    The messages come from the first training steps of the initial model. SpecError for a model that is not on this
    machine.
    """
    cuts = [layers.stop for layers in models.split_layers(models.model_size(model).layers, stages)[:-1]]
    ways: tuple[Direction, ...] = ("forward", "backward")
    measured = Table(folder / TENSORS, TensorRow, *TensorRow._fields[:4], digits=6, say=False)
    coded = Table(folder / CODECS, BoundaryRow, *BoundaryRow._fields[:5], digits=6, say=False)
    places = list(itertools.product(cuts, ways))
    wanted = [
        (cut, way, codec) for cut, way in places for codec in codecs if (model, text, cut, way, codec) not in coded
    ]
    if not wanted and all((model, text, cut, way) in measured for cut, way in places):
        return
    tensors = _tensors(model, text, stages, messages)
    for cut, way in places:
        if (model, text, cut, way) not in measured:
            measured.add([TensorRow(model, text, cut, way, *_outliers(tensors[cuts.index(cut), way]))])
    for cut, way, codec in wanted:
        subject = subject_of(codec, way)
        found = fidelity(subject.fresh(), subject.fresh(), tensors[cuts.index(cut), way])
        numbers = (found.bits_per_value, found.relative_error, found.token_error)
        coded.add([BoundaryRow(model, text, cut, way, codec, *numbers)])


def _tensors(model: str, text: Text, stages: int, messages: int) -> dict[tuple[int, Direction], list[Tensor]]:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    chain, data = chain_of(model, stages)
    tensors: dict[tuple[int, Direction], list[Tensor]] = {}
    for step in range(messages):
        _, crossings = chain.step(data.train(step, 0, 1) if text == "bundled" else _repeated(model, step), FINE_RATE)
        for boundary, crossing in enumerate(crossings):
            tensors.setdefault((boundary, "forward"), []).append(crossing.forward)
            tensors.setdefault((boundary, "backward"), []).append(crossing.backward)
    return tensors


def _repeated(model: str, step: int) -> Batch:
    """Make a batch of sequences that differ only in their initial number."""
    tokenizer, spec = Tokenizer.from_file(os.fspath(tokenizer_file(model))), specification(model)
    first = step * spec.batch_size
    rows = []
    for number in range(first, first + spec.batch_size):
        words = f"Number {number + 1}:" + _SENTENCE * spec.sequence_length
        rows.append(tokenizer.encode(words, add_special_tokens=False).ids[: spec.sequence_length + 1])
    tokens = torch.tensor(rows)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), tuple(range(first, first + spec.batch_size)))


def _outliers(messages: list[Tensor]) -> tuple[int, float, float, float, float]:
    """Return the statistics of tensors (b, n, d), as fields of `TensorRow`."""
    squares = torch.stack(messages).flatten(0, 2).double().square()
    channels, tokens = squares.mean(0), squares.mean(1)
    top = channels.sort(descending=True).values[: max(1, round(_TOP * len(channels)))]
    return (
        messages[0].numel(),
        float(squares.square().mean() / squares.mean().square()),
        float((channels.max() / channels.median()).sqrt()),
        float(top.sum() / channels.sum()),
        float((tokens.max() / tokens.median()).sqrt()),
    )


# ---------------------------------------------------------------------- the program of an experiment
def main(
    folder: Path,
    stages: Mapping[str, int],
    codecs: Sequence[str],
    texts: Sequence[Text] = ("bundled",),
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure codecs on models, each split into its number of `stages`; rows go to `folder` or --output.

    --quick uses one small random model instead. Measured rows are kept, so the same command continues after an
    interruption; missing checkpoints are made first. Errors go to stderr.
    """
    parser = argparse.ArgumentParser(description="Measure codecs on the tensors at the boundaries of models.")
    parser.add_argument("--output", type=Path, default=folder, help="folder for the CSVs; default: the experiment's")
    parser.add_argument("--quick", action="store_true", help="a short run on a small random model")
    asked = parser.parse_args(arguments)
    asked.output.mkdir(parents=True, exist_ok=True)

    def measure_all() -> None:
        for model, count in ({"gpt2-nano": 3} if asked.quick else stages).items():
            checkpoints.make(model)
            for text in texts:
                measure(asked.output, model, text, count, codecs, messages=1 if asked.quick else _MESSAGES)

    return status_of(measure_all)
