"""A language model of single characters whose layers have weights and activations of few bits, with learned step sizes.

LSQ (Esser et al., ICLR 2020, arXiv 1902.08153): a value x becomes s round(clip(x / s, -2^(b-1), 2^(b-1) - 1)). What is
not clipped passes its gradient on; the step size s learns from round(x / s) - x / s of each value within the range and
from the range's end for each outside, times 1 / sqrt(n 2^(b-1)) for n values. Here the optimiser sees the step size's
logarithm, so that a learning rate is relative.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from testbed.workloads.characters import SEQUENCE, VOCABULARY

WIDTHS = (6, 4, 3, 2)
ENDS = 8
"""Bits of the embedding and of the output layer, always, as in the source."""
CHANNELS, HEADS, LAYERS = 64, 4, 2
_SPREAD = 0.02
"""Standard deviation of initial weights, as in GPT-2."""
Bits = tuple[int, int]
"""Of a layer's weights, and of its inputs; 0: not rounded."""


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(context, values: Tensor, step: Tensor, bits: int) -> Tensor:  # type: ignore[no-untyped-def, override]
        context.save_for_backward(values, step)
        context.bits = bits
        return step * (values / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def, override]
        values, step = context.saved_tensors
        low, high = -(2 ** (context.bits - 1)), 2 ** (context.bits - 1) - 1
        scaled = values / step
        inside = (scaled >= low) & (scaled <= high)
        of_step = torch.where(inside, scaled.round() - scaled, scaled.clamp(low, high))
        share = 1 / math.sqrt(values.numel() * 2 ** (context.bits - 1))
        return gradient * inside, (gradient * of_step).sum() * share, None


def rounded(values: Tensor, step: Tensor, bits: int) -> Tensor:
    """Return the rounded values; `step` is a scalar tensor."""
    return _Rounded.apply(values, step, bits)  # type: ignore[no-untyped-call]


class Layer(nn.Module):
    """A linear layer without biases, with a step size for each number of bits of its weights, and of its inputs."""

    def __init__(self, inputs: int, outputs: int, widths: Sequence[int] = WIDTHS, spread: float = _SPREAD) -> None:
        super().__init__()
        self.weight = nn.Parameter(spread * torch.randn(outputs, inputs))
        self.bits: Bits = (0, 0)
        self.steps = nn.ParameterDict(
            {f"{what}{bits}": nn.Parameter(torch.zeros(())) for what in ("weights", "inputs") for bits in widths}
        )
        """Logarithms."""
        self.seen: list[float] | None = None
        """While a list: the mean size of inputs is added to it."""

    def start(self, mean_input: float) -> None:
        """Set the step sizes as LSQ begins: twice the mean size over sqrt(2^(b-1))."""
        for name, step in self.steps.items():
            size = float(self.weight.detach().abs().mean()) if name.startswith("weights") else mean_input
            step.data.fill_(math.log(2 * size / math.sqrt(2 ** (int(name[-1]) - 1))))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs, with weights and inputs in the current bits."""
        if self.seen is not None:
            self.seen.append(float(inputs.detach().abs().mean()))
        weights, (of_weights, of_inputs) = self.weight, self.bits
        if of_weights:
            weights = rounded(weights, self.steps[f"weights{of_weights}"].exp(), of_weights)
        if of_inputs:
            inputs = rounded(inputs, self.steps[f"inputs{of_inputs}"].exp(), of_inputs)
        return functional.linear(inputs, weights)


class Passed(NamedTuple):
    """A forward pass."""

    logits: Tensor
    """(b, n, VOCABULARY)."""
    outputs: list[Tensor]
    """Of each layer of `Characters.layers`."""


class Characters(nn.Module):
    """A pre-norm transformer; its norms have no weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.symbols = Layer(VOCABULARY, CHANNELS, (ENDS,))
        self.places = nn.Parameter(_SPREAD * torch.randn(SEQUENCE, CHANNELS))
        added = _SPREAD / math.sqrt(2 * LAYERS)
        self.layers = nn.ModuleList(
            layer
            for _ in range(LAYERS)
            for layer in (
                Layer(CHANNELS, 3 * CHANNELS),
                Layer(CHANNELS, CHANNELS, spread=added),
                Layer(CHANNELS, 4 * CHANNELS),
                Layer(4 * CHANNELS, CHANNELS, spread=added),
            )
        )
        self.out = Layer(CHANNELS, VOCABULARY, (ENDS,))

    @property
    def every(self) -> list[Layer]:
        """All layers with bits, first and last as well."""
        return [self.symbols, *self.layers, self.out]  # type: ignore[list-item]

    def set_bits(self, bits: Sequence[Bits] | None) -> None:
        """Set the bits of each layer between the first and the last; None: nothing is rounded."""
        none: list[Bits] = [(0, 0)] * len(self.every)
        for layer, each in zip(self.every, none if bits is None else [(ENDS, 0), *bits, (ENDS, ENDS)], strict=True):
            layer.bits = each

    def forward(self, symbols: Tensor) -> Passed:
        """Return the logits of symbols (b, n)."""
        seen = list[Tensor]()

        def through(layer: nn.Module, inputs: Tensor) -> Tensor:
            seen.append(layer(inputs))
            return seen[-1]

        hidden = self.symbols(functional.one_hot(symbols, VOCABULARY).float()) + self.places[: symbols.shape[1]]
        for first in range(0, len(self.layers), 4):
            attend, attended, widen, narrow = self.layers[first : first + 4]
            asked = through(attend, _norm(hidden)).unflatten(2, (3, HEADS, CHANNELS // HEADS))
            query, key, value = (part.transpose(1, 2) for part in asked.unbind(2))
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            hidden = hidden + through(attended, mixed.transpose(1, 2).flatten(2))
            hidden = hidden + through(narrow, functional.gelu(through(widen, _norm(hidden))))
        return Passed(self.out(_norm(hidden)), seen)

    def start_steps(self, symbols: Tensor) -> None:
        """Set all step sizes from the weights, and from the inputs that these symbols cause."""
        for layer in self.every:
            layer.seen = []
        self.set_bits(None)
        with torch.no_grad():
            self(symbols)
        for layer in self.every:
            assert layer.seen is not None
            layer.start(layer.seen[0])
            layer.seen = None

    def groups(self, rate: float, of_steps: float) -> list[Mapping[str, object]]:
        """Return the optimiser's groups: weights, and step sizes with a learning rate of their own."""
        steps = [step for layer in self.every for step in layer.steps.values()]
        known = {id(step) for step in steps}
        weights = [each for each in self.parameters() if id(each) not in known]
        return [{"params": weights, "lr": rate}, {"params": steps, "lr": of_steps}]


def _norm(hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, (CHANNELS,))
