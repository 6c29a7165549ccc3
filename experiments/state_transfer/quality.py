"""Judge states that were restored: `python experiments/state_transfer/quality.py`.

This writes, for each state and codec: losses.csv, the loss of each held-out sequence; quality.csv, bytes, what an
ideal coder of single codes would make of them, and the error; of the trained GPT-2, recovery.csv, the loss after some
steps of training on from what arrived; and kinds.csv, what the transform does to each kind of tensor, at 4 bits per
value with a range for each 64. No clock is read.
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import state
import torch
from torch import Tensor

from testbed import csv_rows
from testbed.codecs.contract import Payload
from testbed.codecs.wire import bits
from testbed.nodes.fragments import SMALL

RECOVERED = "gpt2-mini-trained"
RECOVERY_STEPS = (10,)
SEEDS = range(3)
KINDS = {
    "token embedding": ("wte", "embed_tokens"),
    "position embedding": ("wpe",),
    "attention": ("attn",),
    "feed-forward": ("mlp",),
    "output layer": ("lm_head",),
}
"""Kinds of tensors, by a part of their names."""


class Quality(NamedTuple):
    """A line of quality.csv."""

    state: str
    codec: str
    values: int
    payload_bytes: int
    order0_bytes: float
    """With codes that take as many bits as their entropy, order 0, each message by itself; NaN where there are none."""
    error: float
    """|restored - tensor| / |tensor|, over all."""


class Loss(NamedTuple):
    """A line of losses.csv."""

    state: str
    codec: str
    sequence: int
    loss: float


class Recovery(NamedTuple):
    """A line of recovery.csv."""

    codec: str
    seed: int
    step: int
    loss: float
    """Of the held-out sequences, mean."""


class Kind(NamedTuple):
    """A line of kinds.csv: 4 bits per value, with a range for 64 values."""

    state: str
    kind: str
    values: int
    plain_bits: float
    """Per value, behind zstd."""
    plain_error: float
    haar_bits: float
    haar_error: float


def order0_bytes(codec: str, payloads: list[Payload], parts: list[Tensor]) -> float:
    """Return the bytes of all payloads with ideal codes in place of their packed ones; NaN for other codecs."""
    width = next((int(name.removeprefix("int")) for name in state.WIDTHS if codec in state.chain(name)[:1]), None)
    if width is None:
        return math.nan
    total = 0.0
    for payload, part in zip(payloads, parts, strict=True):
        view = memoryview(payload).cast("B")
        if part.numel() < SMALL:
            total += len(view)
            continue
        packed = bits.packed_bytes(part.numel(), width)
        codes = bits.unpack(torch.frombuffer(view[-packed:], dtype=torch.uint8), width, part.numel())
        shares = torch.bincount(codes.int(), minlength=2).double() / part.numel()
        entropy = -float((shares * shares.clamp_min(1e-300).log2()).sum())
        total += len(view) - packed + entropy * part.numel() / 8
    return total


def judged(of: state.State, codec: str, sequences: int) -> tuple[Quality, list[Loss]]:
    """Restore a state and judge it."""
    restored, payloads = state.Line(codec).restored(of)
    parts = [part for _, part, _ in state.messages(of)]
    wrong = sum(float((restored[name] - x).double().square().sum()) for name, x in of.tensors.items())
    right = sum(float(x.double().square().sum()) for x in of.tensors.values())
    of.load(restored)
    losses = [Loss(of.name, codec, number, loss) for number, loss in enumerate(of.losses(sequences))]
    of.load(of.tensors)
    size, values = sum(memoryview(each).nbytes for each in payloads), sum(x.numel() for x in of.tensors.values())
    ideal = order0_bytes(codec, payloads, parts)
    return Quality(of.name, codec, values, size, ideal, math.sqrt(wrong / right)), losses


def kinds(of: state.State) -> Iterator[Kind]:
    """Yield what the transform does to each kind of tensor."""
    _, plain, haar = state.chain("int4")
    for kind, parts in KINDS.items():
        tensors = {name: x for name, x in of.tensors.items() if x.ndim > 1 and any(part in name for part in parts)}
        if not tensors:
            continue
        some = of._replace(tensors=tensors)
        values, found = sum(x.numel() for x in tensors.values()), list[float]()
        for codec in (plain, haar):
            restored, payloads = state.Line(codec).restored(some)
            wrong = sum(float((restored[name] - x).double().square().sum()) for name, x in tensors.items())
            right = sum(float(x.double().square().sum()) for x in tensors.values())
            found += [8 * sum(memoryview(each).nbytes for each in payloads) / values, math.sqrt(wrong / right)]
        yield Kind(of.name, kind, values, *found)


def recovered(of: state.State, codec: str, seed: int, sequences: int) -> list[Recovery]:
    """Train on from what arrived."""
    of.load(state.Line(codec).restored(of)[0])
    rows = []
    for first, last in zip((0, *RECOVERY_STEPS), RECOVERY_STEPS, strict=False):
        state.learn(of.model, state.STATES[of.name].checkpoint, last - first, seed=1 + seed + 100 * first)
        losses = of.losses(sequences)
        rows.append(Recovery(codec, seed, last, sum(losses) / len(losses)))
    of.load(of.tensors)
    return rows


def main(asked: argparse.Namespace) -> None:
    """Go through the states and their codecs; what is in the tables is kept."""
    loss_table = csv_rows.Table(asked.output / "losses.csv", Loss, say=False)
    quality_table = csv_rows.Table(asked.output / "quality.csv", Quality, "state", "codec")
    recovery_table = csv_rows.Table(asked.output / "recovery.csv", Recovery, "codec", "seed")
    kind_table = csv_rows.Table(asked.output / "kinds.csv", Kind, "state", say=False)
    for name in state.names(asked):
        transfer = state.STATES[name]
        todo = [codec for codec in transfer.arms if (name, codec) not in quality_table]
        coarse = (transfer.arms[0], *(state.chain(width)[1] for width in state.WIDTHS[2:]))
        pairs = itertools.product(coarse, SEEDS) if name == RECOVERED else ()
        again = [pair for pair in pairs if pair not in recovery_table]
        if not (todo or again) and (name,) in kind_table:
            continue
        of = state.state_of(name)
        if (name,) not in kind_table and of.before is None:
            kind_table.add(kinds(of))
        for codec in todo:
            quality, losses = judged(of, codec, transfer.sequences)
            loss_table.add(losses)
            quality_table.add([quality])
        for codec, seed in again:
            recovery_table.add(recovered(of, codec, seed, transfer.sequences))


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, state.HERE)
