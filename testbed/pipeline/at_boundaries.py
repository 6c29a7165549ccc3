"""What do codecs make of the tensors at a model's boundaries? Bits and errors, and the outliers in what is sent.

An experiment's measure.py is `main` with its models and codecs. Nothing here depends on a clock or on what else the
machine does.
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
from testbed.csv_rows import read_rows, write_rows
from testbed.errors import status_of
from testbed.message_key import Direction
from testbed.workloads import checkpoints, models
from testbed.workloads.capture import FINE_RATE, chain_of, specification
from testbed.workloads.data import Batch
from testbed.workloads.prepare import tokenizer_file

TENSORS, CODECS = "tensors.csv", "codecs.csv"
_MESSAGES = 2
_TOP = 0.01
Text = Literal["bundled", "repeated"]
"""repeated: a number and then one sentence again and again, in every sequence, as benchmarks of inference have it."""
_SENTENCE = " The committee met again in the spring, heard the same reports, and adjourned without a vote."


class TensorRow(NamedTuple):
    """A line of tensors.csv: what is sent over one boundary in one direction, all messages together."""

    model: str
    text: Text
    boundary: int
    """Layers before it."""
    direction: Direction
    values: int
    """Of a message."""
    kurtosis: float
    """E[x^4] / E[x^2]^2 over all values: 3 of a Gaussian."""
    channel_ratio: float
    """Root mean square of the largest channel over that of the median one."""
    top_channels: float
    """The share of all squares that the largest 1 % of the channels hold."""
    token_ratio: float
    """Root mean square of the largest token over that of the median one."""


class BoundaryRow(NamedTuple):
    """A line of codecs.csv: a codec on those messages, sent one after the other."""

    model: str
    text: Text
    boundary: int
    direction: Direction
    codec: str
    bits: float
    """Per value on the wire, headers included."""
    error: float
    token_error: float
    """Both as in `codecs.bench.measure.Fidelity`."""


def measure(folder: Path, model: str, text: Text, stages: int, codecs: Sequence[str], *, messages: int) -> None:
    """Measure codecs at each boundary of a model that is cut as even as can be; rows that `folder` has are kept.

    The messages are of the first training steps of the model as it begins. SpecError where it is not on this machine.
    """
    cuts = [layers.stop for layers in models.split_layers(models.model_size(model).layers, stages)[:-1]]
    ways: tuple[Direction, ...] = ("forward", "backward")
    measured = _keys(folder / TENSORS, 4)
    coded = _keys(folder / CODECS, 5)
    places = list(itertools.product(cuts, ways))
    wanted = [
        (cut, way, codec) for cut, way in places for codec in codecs if (model, text, str(cut), way, codec) not in coded
    ]
    if not wanted and all((model, text, str(cut), way) in measured for cut, way in places):
        return
    tensors = _tensors(model, text, stages, messages)
    for cut, way in places:
        if (model, text, str(cut), way) not in measured:
            _append(folder / TENSORS, TensorRow(model, text, cut, way, *_outliers(tensors[cuts.index(cut), way])))
    for cut, way, codec in wanted:
        subject = subject_of(codec, way)
        found = fidelity(subject.fresh(), subject.fresh(), tensors[cuts.index(cut), way])
        numbers = (found.bits_per_value, found.relative_error, found.token_error)
        _append(folder / CODECS, BoundaryRow(model, text, cut, way, codec, *numbers))


def _tensors(model: str, text: Text, stages: int, messages: int) -> dict[tuple[int, Direction], list[Tensor]]:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    chain, data = chain_of(model, stages)
    found: dict[tuple[int, Direction], list[Tensor]] = {}
    for step in range(messages):
        _, crossings = chain.step(data.train(step, 0, 1) if text == "bundled" else _repeated(model, step), FINE_RATE)
        for boundary, crossing in enumerate(crossings):
            found.setdefault((boundary, "forward"), []).append(crossing.forward)
            found.setdefault((boundary, "backward"), []).append(crossing.backward)
    return found


def _repeated(model: str, step: int) -> Batch:
    """Make a batch of sequences that differ only in the number that each begins with."""
    tokenizer, spec = Tokenizer.from_file(os.fspath(tokenizer_file(model))), specification(model)
    first = step * spec.batch_size
    rows = []
    for number in range(first, first + spec.batch_size):
        words = f"Number {number + 1}:" + _SENTENCE * spec.sequence_length
        rows.append(tokenizer.encode(words, add_special_tokens=False).ids[: spec.sequence_length + 1])
    tokens = torch.tensor(rows)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), tuple(range(first, first + spec.batch_size)))


def _outliers(messages: list[Tensor]) -> tuple[int, float, float, float, float]:
    """Return what of a `TensorRow` describes tensors (b, n, d)."""
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


def _keys(path: Path, count: int) -> set[tuple[str, ...]]:
    """Return the first `count` cells of each row."""
    return {row[:count] for row in read_rows(path)}


def _append(path: Path, row: TensorRow | BoundaryRow) -> None:
    write_rows(path, row._fields, [*read_rows(path), row], digits=6)


# ---------------------------------------------------------------------- the program of an experiment
def main(
    folder: Path,
    stages: Mapping[str, int],
    codecs: Sequence[str],
    texts: Sequence[Text] = ("bundled",),
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure codecs on models, each cut into so many `stages`; rows go to `folder`, or where --output says.

    With --quick one small random model stands for them all. What was measured is kept, so the same command goes on
    after an interruption; checkpoints that are not on this machine yet are made first. Errors go to stderr.
    """
    parser = argparse.ArgumentParser(description="Measure codecs on the tensors at the boundaries of models.")
    parser.add_argument("--output", type=Path, default=folder, help="folder for the CSVs; default: the experiment's")
    parser.add_argument("--models", nargs="+", choices=list(stages), default=list(stages))
    parser.add_argument("--quick", action="store_true", help="the short form, on a small random model")
    asked = parser.parse_args(arguments)
    asked.output.mkdir(parents=True, exist_ok=True)
    chosen = {"gpt2-nano": 3} if asked.quick else {name: stages[name] for name in asked.models}

    def measure_all() -> None:
        for model, count in chosen.items():
            checkpoints.make(model)
            for text in texts:
                measure(asked.output, model, text, count, codecs, messages=1 if asked.quick else _MESSAGES)

    return status_of(measure_all)
