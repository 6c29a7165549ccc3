"""A model of two small stages, with all that a codec that changes the model asks of one, and checks of such codecs on it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from testbed.codecs.base import Codec, Context, Hook, ModelCodec, Paired, Slot, Stateful
from testbed.codecs.check.findings import NothingToAsk, require
from testbed.codecs.check.same import difference, same
from testbed.codecs.check.subject import Subject
from testbed.codecs.make import build
from testbed.codecs.recipe import Recipe, read

WIDTH, VOCABULARY, TOKENS, BATCH = 64, 61, 16, 4
_STEPS, _RATE = 40, 0.1
_EXACT, _ALIKE = 1e-5, 1e-5


class _Part(NamedTuple):
    owner: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        return cast("nn.Module", getattr(self.owner, self.name))

    def replace(self, module: nn.Module) -> None:
        setattr(self.owner, self.name, module)


class Stage(nn.Module):
    """A residual layer; at the first stage embeddings of token and position before it, at the last an output layer behind it."""

    width, vocabulary, context, learned_positions = WIDTH, VOCABULARY, TOKENS, True

    def __init__(self, *, last: bool) -> None:
        """Numbers from a seed."""
        super().__init__()
        self.first, self.last = not last, last
        self.kept: dict[str, Any] = {}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(last))
            if self.first:
                self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
            self.norm, self.inside, self.outside = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)
            if last:
                self.output = nn.Linear(WIDTH, VOCABULARY)

    def tables(self) -> tuple[_Part, ...]:
        """See `stage_model`."""
        return (_Part(self, "tokens"), _Part(self, "positions")) if self.first else ()

    def writers(self) -> tuple[_Part, ...]:
        """See `stage_model`."""
        return (_Part(self, "outside"),)

    def forward(self, inputs: Tensor) -> Tensor:
        """Token ids (b, n), or hidden states (b, n, d); logits at the last stage."""
        hidden: Tensor = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1])) if self.first else inputs
        hidden = hidden + self.outside(nn.functional.gelu(self.inside(self.norm(hidden))))
        return self.output(hidden) if self.last else hidden


class Step(NamedTuple):
    """What one step of training came to."""

    loss: float
    lost: float
    """|receive(send(h)) - h| / |h| of the hidden states, after the wire."""
    gradients: list[Tensor]
    """Of the upper stage."""


def _ids(step: int) -> Tensor:
    # a step's text counts upwards modulo the vocabulary, by a stride that is to be guessed from the token before
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    return (start + 7 * torch.arange(TOKENS + 1)) % VOCABULARY


class Pipeline:
    """Both stages with a codec between them, through bytes or, for comparison, straight through the graph."""

    def __init__(self, forward: Recipe, backward: Recipe, *, wire: bool) -> None:
        """Four instances, as four ends of a boundary get them."""
        self.sender, self.receiver = (build(forward, Context(0, 0, "forward")) for _ in range(2))
        self.taker, self.giver = (build(backward, Context(0, 0, "backward")) for _ in range(2))
        for codec, other in ((self.taker, self.sender), (self.giver, self.receiver)):
            if isinstance(codec, Paired):
                codec.pair(other)
        self._wire = wire
        self._upper, self._lower = Stage(last=False), Stage(last=True)
        self._hooks = _hook(self.sender, self._upper, "downstream"), _hook(self.receiver, self._lower, "upstream")

    def run(self, steps: int) -> Iterator[Step]:
        """Train with plain gradient descent; without the wire, which may carry what a codec learns from, only one step."""
        owners: list[Any] = [self._upper, self._lower, *(hook for hook in self._hooks if hook is not None)]
        parameters = list(dict.fromkeys(itertools.chain.from_iterable(owner.parameters() for owner in owners)))
        above, below = self._hooks
        for step in range(steps):
            for hook in self._hooks:
                if hook is not None:
                    hook.begin(step, 1)
            slot, ids = Slot("train", step, 0, tuple(range(BATCH))), _ids(step)
            inputs, targets = ids[:, :-1], ids[:, 1:]
            hidden = self._upper(inputs)
            coded = hidden if above is None else above.send(hidden, inputs)
            crossed = coded
            if self._wire:
                crossed = self.receiver.decode(bytes(self.sender.encode(coded.detach(), slot)), slot).requires_grad_()
            restored = crossed if below is None else below.receive(crossed, inputs)
            logits = self._lower(restored)
            loss = nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))
            loss.backward()  # type: ignore[no-untyped-call]
            if self._wire:
                assert crossed.grad is not None
                coded.backward(self.taker.decode(bytes(self.giver.encode(crossed.grad, slot)), slot))
            lost = float((restored - hidden).detach().norm() / hidden.detach().norm())
            gradients = [one.grad.clone() for one in self._upper.parameters() if one.grad is not None]
            if not self._wire:
                yield Step(float(loss.detach()), lost, gradients)
                return
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=_RATE)
                        parameter.grad = None
            for hook in self._hooks:
                if hook is not None:
                    hook.after_step(step, _RATE)
            yield Step(float(loss.detach()), lost, gradients)


def _hook(codec: Codec, model: Stage, side: Any) -> Hook | None:
    return codec.hook(model, side) if isinstance(codec, ModelCodec) else None


def _both(subject: Subject) -> tuple[Recipe, Recipe]:
    if subject.direction == "backward" or subject.entry.hook is None:
        raise NothingToAsk("it leaves the model alone" if subject.entry.hook is None else "asked of the forward direction")
    return subject.recipe, subject.recipe


def _lossless(recipe: Recipe) -> Recipe:
    arguments = tuple((name, read("fp32") if isinstance(value, Recipe) else value) for name, value in recipe.arguments)
    return dataclasses.replace(recipe, arguments=arguments)


def trains(subject: Subject) -> str:
    """Through bytes, a small model's loss stays finite and falls, and both ends hold the same."""
    pipeline = Pipeline(*_both(subject), wire=True)
    losses = [step.loss for step in pipeline.run(_STEPS)]
    require(all(map(math.isfinite, losses)), f"the loss is no number after {sum(map(math.isfinite, losses))} steps")
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    require(last < first, f"the loss does not fall in {_STEPS} steps: {first:.3f} to {last:.3f}")
    for ours, theirs in ((pipeline.sender, pipeline.receiver), (pipeline.giver, pipeline.taker)):
        if isinstance(ours, Stateful) and isinstance(theirs, Stateful):
            held, other = ours.shared(), theirs.shared()
            require(same(held, other), f"the ends hold different numbers: {difference(held, other)}")
    return f"loss {first:.3f} to {last:.3f} in {_STEPS} steps"


def gradients_alike(subject: Subject) -> str:
    """With fp32 inside, the upper stage's gradients are those of the same model without a wire; and what is lost is said."""
    lossless = tuple(map(_lossless, _both(subject)))
    worst, lost = 0.0, 0.0
    for ours, theirs in zip(Pipeline(*lossless, wire=True).run(1), Pipeline(*lossless, wire=False).run(1), strict=True):
        require(len(ours.gradients) == len(theirs.gradients), "through the wire other parameters have gradients")
        for one, other in zip(ours.gradients, theirs.gradients, strict=True):
            worst = max(worst, float((one - other).norm() / other.norm().clamp_min(1e-6)))
        lost = max(lost, ours.lost)
    require(worst < _ALIKE, f"gradients differ by {worst:.2g} of their norm")
    return f"within {worst:.1g}; the codec's own part of the model changes hidden states by {lost:.1g} of their norm"


def exact(subject: Subject) -> str:
    """Where the table says that nothing is lost, hidden states come back to 1e-5 in fp32, after every step of training."""
    recipes = _both(subject)
    if not subject.entry.exact:
        raise NothingToAsk("the table does not say that hidden states come back exactly")
    pipeline = Pipeline(*map(_lossless, recipes), wire=True)
    lost = [step.lost for step in pipeline.run(_STEPS)]
    require(max(lost) < _EXACT, f"step {lost.index(max(lost))}: hidden states are off by {max(lost):.2g} of their norm")
    return f"off by at most {max(lost):.1g} in {_STEPS} steps"
