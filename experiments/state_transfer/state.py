"""What is transferred, and through which codecs: shared by the programs of state_transfer.

A state is a model's weights, each tensor once. A message is a tensor, or a run of its rows of at most `MOST` values, so
that decoding goes on while the rest is on its way. Tensors of less than `SMALL` values go as fp32 through all codecs.
"""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from testbed import paths
from testbed.codecs.catalogue.codec_spec import CodecSpec, parse_codec
from testbed.codecs.contract import Codec, Context, Payload, Stateful
from testbed.codecs.make import build_codec
from testbed.codecs.wrap import capability
from testbed.message_key import MessageKey
from testbed.nodes.fragments import SMALL
from testbed.workloads import checkpoints
from testbed.workloads.build_stage import build_stage
from testbed.workloads.data import Data
from testbed.workloads.prepare import prepare_tokens
from testbed.workloads.real_tensors import FINE_RATE, Chain, specification
from testbed.workloads.stage_model import StageModel

HERE = Path(__file__).resolve().parent
MOST = 2**20
RANGES = "{}(group=64, asymmetric)"
"""MesonGS's quantiser: each run of 64 values has a range of its own."""
WIDTHS = ("int8", "int4", "int3", "int2")
STEPS = {"int8": 0.02, "int4": 0.3, "int3": 0.6, "int2": 1.2}
"""Steps, in root mean squares of a message, whose error is about that of these widths."""
KEY = MessageKey("train", 1, 0, ())
"""Of what is sent; what both ends had before, where they had something, came a step earlier."""
_BEFORE = MessageKey("train", 0, 0, ())
LATER = 20
"""Training steps that a worker has missed which comes back."""
_WARMUP = 10
"""Steps over which the learning rate rises to capture.FINE_RATE: AdamW's moments begin anew."""


def chain(width: str) -> list[str]:
    """Return the links of MesonGS's chain, one after the other, for codes of one width."""
    codes = RANGES.format(width)
    return [codes, f"zstd({codes}, 3)", f"zstd(haar({codes}), 3)"]


def one_step(width: str) -> list[str]:
    """Return an entropy coder behind one step for each message, without and with the transform."""
    step = f"uniform({STEPS[width]:g})"
    return [f"entropy({step})", f"entropy(haar({step}))"]


def _whole() -> tuple[str, ...]:
    """Return the codecs of a whole state: as it is, without loss, rounded, and the chain; at 4 bits, besides, with a
    coder of single bytes in place of zstd, and another transform.
    """
    links = [codec for width in WIDTHS for codec in (*chain(width), *one_step(width))]
    dense = ["fp32", "zstd(fp32, 3)", "bf16", "fp8", "int8"]
    return (*dense, *links, f"entropy({RANGES.format('int4')})", f"zstd(hadamard({RANGES.format('int4')}), 3)")


class Transfer(NamedTuple):
    """One state that is transferred."""

    checkpoint: str
    sequences: int
    """Held-out sequences that it is judged by."""
    arms: tuple[str, ...]
    missed: int = 0
    """Training steps since the state that the receiver has; 0: it has none."""


STATES = {
    "gpt2-mini-trained": Transfer("gpt2-mini-trained", 32, _whole()),
    "gpt2-mini-later": Transfer(
        "gpt2-mini-trained",
        32,
        (
            "fp32",
            f"zstd({RANGES.format('int8')}, 3)",
            "delta(zstd(fp32, 3), fp32)",
            *(f"delta(zstd({RANGES.format(width)}, 3), fp32)" for width in WIDTHS),
            *(f"delta({one_step(width)[0]}, fp32)" for width in WIDTHS[1:]),
            "delta(topk(0.1, tensor), fp32)",
            "delta(topk(0.01, tensor), fp32)",
        ),
        missed=LATER,
    ),
    "gpt2-nano": Transfer("gpt2-nano", 4, ("fp32", *chain("int8"), *one_step("int8"))),
}
"""What is sent, by name; the last is for the short form."""
QUICK = "gpt2-nano"


class State(NamedTuple):
    """A model, its weights, and the text that it is judged by."""

    name: str
    model: StageModel
    data: Data
    tensors: Mapping[str, Tensor]
    """fp32, each once: a tensor that equals another stands for both."""
    same: Mapping[str, str]
    """Of a tensor that is left out: the one that it equals."""
    before: Mapping[str, Tensor] | None
    """What the receiver has; None: nothing."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the model these weights."""
        self.model.load_state_dict({**tensors, **{name: tensors[other] for name, other in self.same.items()}})

    def losses(self, sequences: int) -> list[float]:
        """Return the loss of each held-out sequence, in nats per token."""
        self.model.train(False)
        with torch.no_grad():
            batches = (self.data.validation(number, 0, 1) for number in range(sequences))
            return [float(self.model.loss(self.model(each.inputs), each.targets)) for each in batches]


def data_of(checkpoint: str, sequences: int, seed: int) -> tuple[Data, int]:
    """Open a checkpoint's text, in batches of so many sequences; returns the size of its vocabulary besides."""
    text = prepare_tokens("bundled", checkpoint, paths.cache_folder())
    return Data(np.load(text.path, mmap_mode="r"), specification(checkpoint, sequences), seed), text.vocabulary


def state_of(name: str) -> State:
    """Build a model as its checkpoint has it, which is made first where it is not on this machine."""
    transfer = STATES[name]
    checkpoints.make(transfer.checkpoint)
    data, vocabulary = data_of(transfer.checkpoint, 1, 0)
    spec = specification(transfer.checkpoint, 1)
    model = build_stage(spec, stage=0, stages=1, seed=0, vocabulary=vocabulary)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()} if transfer.missed else None
    if transfer.missed:
        learn(model, transfer.checkpoint, transfer.missed, seed=0)
    tensors, same = dict[str, Tensor](), dict[str, str]()
    for key, tensor in model.state_dict().items():
        twin = next((k for k, v in tensors.items() if v.shape == tensor.shape and torch.equal(v, tensor)), None)
        if twin is not None and tensor.ndim > 1:
            same[key] = twin
        else:
            tensors[key] = tensor.clone()
    return State(name, model, data, tensors, same, before)


def learn(model: StageModel, checkpoint: str, steps: int, *, seed: int) -> None:
    """Train on, batches of 4 sequences in an order of the seed's; moments begin anew, as after a restart."""
    data, _ = data_of(checkpoint, 4, seed)
    learner = Chain([model.train(True)])
    for step in range(steps):
        learner.step(data.train(step, 0, 1), FINE_RATE * min(1.0, (step + 1) / _WARMUP))


def messages(of: State) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """Yield what is sent, in order: the tensor's name, a run of its rows, and what the receiver has of them."""
    for name, tensor in of.tensors.items():
        rows = max(1, MOST // tensor[0].numel()) if tensor.ndim > 1 else len(tensor)
        bases = [None] * len(tensor) if of.before is None else of.before[name].split(rows)
        yield from ((name, part, base) for part, base in zip(tensor.split(rows), bases, strict=False))


class Line:
    """A codec, for one message after the other."""

    def __init__(self, codec: str) -> None:
        self._spec: CodecSpec = parse_codec(codec)
        self._dense: CodecSpec = parse_codec("fp32")

    def ends(self, number: int, part: Tensor, base: Tensor | None) -> tuple[Codec, Codec]:
        """Make sender and receiver of a message, which both know `base` if the codec remembers."""
        spec = self._dense if part.numel() < SMALL else self._spec
        sender, receiver = (build_codec(spec, Context(0, number, "forward")) for _ in range(2))
        if base is not None and capability(sender, Stateful) is not None:
            receiver.decode(sender.encode(base, _BEFORE), _BEFORE)
        return sender, receiver

    def restored(self, of: State) -> tuple[dict[str, Tensor], list[Payload]]:
        """Return the tensors that arrive, and all payloads."""
        parts, payloads = dict[str, list[Tensor]](), list[Payload]()
        for number, (name, part, base) in enumerate(messages(of)):
            sender, receiver = self.ends(number, part, base)
            payloads.append(sender.encode(part, KEY))
            parts.setdefault(name, []).append(receiver.decode(payloads[-1], KEY))
        return {name: torch.cat(each) for name, each in parts.items()}, payloads


def names(asked: argparse.Namespace) -> list[str]:
    """Return the states that a command line of one of the programs asks for."""
    return [QUICK] if asked.quick else [name for name in STATES if name != QUICK]
