"""A model of two small stages, with everything that codecs in the model require, trained through such a codec."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from testbed.codecs.catalogue.codec_spec import CodecSpec
from testbed.codecs.contract import Codec, Context, Hook, MessageKey, ModelCodec, Paired
from testbed.codecs.make import build_codec
from testbed.codecs.wrap import capability
from testbed.message_key import Side

VOCABULARY, TOKENS, BATCH = 61, 16, 4
RATE = 0.1

StagePlace = Literal["first", "middle", "last"]
Way = Literal["bytes", "graph", "around"]
"""How hidden states pass between stages: as payloads, through only the codec's part of the model, or unchanged."""


class StageSize(NamedTuple):
    """The dimensions of a stage."""

    width: int = 64
    vocabulary: int = VOCABULARY
    context: int = TOKENS


_SMALL = StageSize()


class _StagePart(NamedTuple):
    owner: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        return cast("nn.Module", getattr(self.owner, self.name))

    def replace(self, module: nn.Module) -> None:
        setattr(self.owner, self.name, module)


class TrialStage(nn.Module):
    """A residual layer; preceded at the first stage by embeddings of token and position, followed at the last by an
    output layer.
    """

    learned_positions = True

    def __init__(self, place: StagePlace, size: StageSize = _SMALL) -> None:
        """Draw the weights, each stage's from its own seed."""
        super().__init__()
        width, vocabulary, context = size
        self.width, self.vocabulary, self.context = size
        self.first, self.last = place == "first", place == "last"
        self.kept: dict[str, Any] = {}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(("first", "last", "middle").index(place))
            if self.first:
                self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
            self.norm, self.inside, self.outside = nn.LayerNorm(width), nn.Linear(width, 96), nn.Linear(96, width)
            if self.last:
                self.output = nn.Linear(width, vocabulary)

    def tables(self) -> tuple[_StagePart, ...]:
        """See `model_codec.ChangeableStage`."""
        return (_StagePart(self, "tokens"), _StagePart(self, "positions")) if self.first else ()

    def writers(self) -> tuple[_StagePart, ...]:
        """See `model_codec.ChangeableStage`."""
        return (_StagePart(self, "outside"),)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map token ids (b, n), or hidden states (b, n, d), to hidden states; to logits at the last stage."""
        hidden: Tensor = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1])) if self.first else inputs
        hidden = hidden + self.outside(nn.functional.gelu(self.inside(self.norm(hidden))))
        return self.output(hidden) if self.last else hidden


class TrialStep(NamedTuple):
    """The result of one training step."""

    loss: float
    lost: float
    """|receive(send(h)) - h| / |h| of the hidden states, after the wire."""
    intact: bool
    """Whether decoded values are bit-identical to encoded ones."""
    gradients: dict[str, Tensor]
    """Gradients of both stages' parameters, and of parameters added by the codec."""


def ids_of(step: int) -> Tensor:
    """Make a step's text, which counts upwards modulo the vocabulary; a token follows from the one before."""
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return (start + 7 * torch.arange(TOKENS + 1)) % VOCABULARY


class TrialPipeline:
    """Both stages, with a codec between them."""

    keeps = ("upper", "lower", "sender", "receiver", "taker", "giver", "hooks")

    def __init__(self, spec: CodecSpec, way: Way = "bytes") -> None:
        """Make four instances for the four ends of a boundary."""
        self.sender, self.receiver, self.taker, self.giver = ends_of(spec, spec)
        self._way = way
        self.upper, self.lower = TrialStage("first"), TrialStage("last")
        self.above, self.below = (
            hook_of(self.sender, self.upper, "downstream"),
            hook_of(self.receiver, self.lower, "upstream"),
        )
        self.hooks = [hook for hook in (self.above, self.below) if hook is not None]

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all trained parameters, by name. A parameter of both a hook and a stage appears once."""
        named = itertools.chain(
            ((f"first stage, {name}", one) for name, one in self.upper.named_parameters()),
            ((f"last stage, {name}", one) for name, one in self.lower.named_parameters()),
            (
                (f"the codec's {number} at the {end}", one)
                for end, hook in (("sender", self.above), ("receiver", self.below))
                for number, one in enumerate([] if hook is None else hook.parameters())
            ),
        )
        seen: dict[int, tuple[str, nn.Parameter]] = {}
        for name, parameter in named:
            seen.setdefault(id(parameter), (name, parameter))
        return dict(seen.values())

    def run(self, steps: int, first_step: int = 0) -> Iterator[TrialStep]:
        """Train from `first_step` on, by plain gradient descent; yields each step before its update. Without bytes,
        which may carry data that a codec learns from, only the first step is comparable; the weights then stay.
        """
        parameters = self.parameters()
        for step in range(first_step, steps):
            for hook in self.hooks:
                hook.begin(step, 1)
            key, ids = MessageKey("train", step, 0, tuple(range(BATCH))), ids_of(step)
            inputs, targets = ids[:, :-1], ids[:, 1:]
            hidden = self.upper(inputs)
            direct = self._way == "around"
            coded = hidden if direct or self.above is None else self.above.send(hidden, inputs)
            crossed = coded
            if self._way == "bytes":
                crossed = self.receiver.decode(bytes(self.sender.encode(coded.detach(), key)), key).requires_grad_()
            restored = crossed if direct or self.below is None else self.below.receive(crossed, inputs)
            logits = self.lower(restored)
            loss = nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
            loss.backward()  # type: ignore[no-untyped-call]
            if self._way == "bytes":
                assert crossed.grad is not None
                coded.backward(self.taker.decode(bytes(self.giver.encode(crossed.grad, key)), key))
            yield TrialStep(
                loss=float(loss.detach()),
                lost=float((restored - hidden).detach().norm() / hidden.detach().norm()),
                intact=torch.equal(crossed.detach(), coded.detach()),
                gradients={name: one.grad.clone() for name, one in parameters.items() if one.grad is not None},
            )
            if self._way == "bytes":
                self._update(step, parameters)

    def constrained(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return these updates after the codec's constraint.

        Overwrites the parameters.
        """
        parameters = self.parameters()
        with torch.no_grad():
            for name, gradient in gradients.items():
                parameters[name].copy_(gradient)
        for hook in self.hooks:
            hook.after_step(0, 0.0)
        return {name: parameters[name].detach().clone() for name in gradients}

    def _update(self, step: int, parameters: dict[str, nn.Parameter]) -> None:
        with torch.no_grad():
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=RATE)
                    parameter.grad = None
        for hook in self.hooks:
            hook.after_step(step, RATE)


def ends_of(forward: CodecSpec, backward: CodecSpec) -> tuple[Codec, Codec, Codec, Codec]:
    """Make the instances of a boundary: sender and receiver of activations, and the paired receiver (upper end) and
    sender of gradients.
    """
    sender, receiver = (build_codec(forward, Context(0, 0, "forward")) for _ in range(2))
    taker, giver = (build_codec(backward, Context(0, 0, "backward")) for _ in range(2))
    for codec, other in ((taker, sender), (giver, receiver)):
        if (paired := capability(codec, Paired)) is not None:
            paired.pair(other)
    return sender, receiver, taker, giver


def changes_model(spec: CodecSpec) -> bool:
    """Return whether the codec has a part in a model, at either end."""
    ends: tuple[tuple[StagePlace, Side], ...] = (("first", "downstream"), ("last", "upstream"))
    return any(
        hook_of(build_codec(spec, Context(0, 0, "forward")), TrialStage(place), side) is not None
        for place, side in ends
    )


def is_exact(spec: CodecSpec) -> bool:
    """Return whether the table, or its class in an attribute `exact`, claims exact hidden states with a lossless inner
    codec.
    """
    codec = build_codec(spec, Context(0, 0, "forward"))
    return any(part.row.exact for part in spec.parts()) or getattr(codec, "exact", False) is True


def hook_of(codec: Codec, model: TrialStage, side: Side) -> Hook | None:
    """Return a codec's part in a stage; None where it has none."""
    model_codec = capability(codec, ModelCodec)
    return None if model_codec is None else model_codec.hook(model, side)
