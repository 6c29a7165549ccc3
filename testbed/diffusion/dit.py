"""A class-conditional diffusion transformer (DiT) on 8 x 8 digits, and its sampler on one worker.

Rectified flow: x_t = (1 - t) noise + t image, the model learns the velocity image - noise, and Euler steps lead from
noise at t = 0 to images at t = 1. An image is 16 tokens of 2 x 2 pixels; blocks are those of DiT with adaLN-zero
(Peebles and Xie, ICCV 2023). With experts the feed-forward part is the sum of a shared expert and the top 2 of the
others, weighted by the router's softmax (DiT-MoE, Fei et al., 2024).

Shapes: T tokens, B images, d channels. Everything that must be independent of the split is computed by rows of the
image, `ROW` tokens at a time, because a matrix product of another shape may round differently. Splits are therefore by
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from testbed.workloads.networks import DIGITS

PATCH: Final = 2
TOKENS: Final = (DIGITS.side // PATCH) ** 2
ROWS: Final = DIGITS.side // PATCH
ROW: Final = TOKENS // ROWS
"""Tokens per row."""
TOKEN_PIXELS: Final = PATCH * PATCH
TOP: Final = 2
"""Experts per token."""
_MODULATIONS = 6


class DitSize(NamedTuple):
    """The sizes of a model."""

    layers: int
    width: int
    heads: int
    experts: int = 0
    """0: a dense feed-forward part. Experts, including the shared one, have half its hidden width."""

    @property
    def token_flops(self) -> tuple[int, int]:
        """Return the FLOPs of one token of one image in one layer before and after its keys are known: matrix products,
        2 m k n each, of the dense model.
        """
        return 2 * 3 * self.width**2, 2 * 9 * self.width**2 + 4 * TOKENS * self.width


SIZES: Final = {
    "dit-digits": DitSize(layers=6, width=96, heads=4),
    "dit-digits-moe": DitSize(layers=6, width=96, heads=4, experts=4),
    "dit-digits-nano": DitSize(layers=2, width=32, heads=2),
    "dit-digits-moe-nano": DitSize(layers=2, width=32, heads=2, experts=4),
}
"""Sizes by name. The nano ones are for tests."""


class Projected(NamedTuple):
    """Inputs of attention, each (n, B, d)."""

    q: Tensor
    k: Tensor
    v: Tensor


class Routing(NamedTuple):
    """The experts of tokens."""

    experts: Tensor
    """(..., TOP) int64, the higher score first."""
    scores: Tensor
    """(..., TOP)"""
    probabilities: Tensor
    """(..., experts): all probabilities of the router."""


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width))


class Block(nn.Module):
    """One layer."""

    def __init__(self, size: DitSize) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.modulate = nn.Linear(width, _MODULATIONS * width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = _mlp(width, (2 if size.experts else 4) * width)  # with experts: the shared one
        self.experts = nn.ModuleList(_mlp(width, 2 * width) for _ in range(size.experts))
        self.router = nn.Linear(width, size.experts, bias=False) if size.experts else None
        nn.init.zeros_(self.modulate.weight)
        nn.init.zeros_(self.modulate.bias)

    def modulations(self, condition: Tensor) -> Sequence[Tensor]:
        """Return shift, scale and gate of attention and of the feed-forward part, each (B, d), for (B, d)."""
        made: Sequence[Tensor] = self.modulate(functional.silu(condition)).chunk(_MODULATIONS, dim=-1)
        return made

    def project(self, x: Tensor, modulations: Sequence[Tensor]) -> Projected:
        """Return queries, keys and values of tokens (n, B, d)."""
        return Projected(*self.qkv(_normed(x, *modulations[:2])).chunk(3, dim=-1))

    def attend(self, x: Tensor, q: Tensor, keys: Tensor, values: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """Return tokens (n, B, d) after attention to all keys and values, in the form of `by_heads`."""
        queries = by_heads(q, self.heads)
        scores = queries @ keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
        mixed = scores.softmax(-1) @ values
        attended: Tensor = x + modulations[2] * self.out(mixed.permute(2, 0, 1, 3).reshape(x.shape))
        return attended

    def attend_to_all(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """Return tokens (n, B, d) after attention to one another."""
        q, k, v = self.project(x, modulations)
        return self.attend(x, q, by_heads(k, self.heads), by_heads(v, self.heads), modulations)

    def feed_input(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """Return the input of the feed-forward part."""
        return _normed(x, *modulations[3:5])

    def feed_forward(self, x: Tensor, modulations: Sequence[Tensor]) -> Tensor:
        """Return tokens (n, B, d) after a dense feed-forward part."""
        fed: Tensor = x + modulations[5] * self.feed(self.feed_input(x, modulations))
        return fed

    def route(self, inputs: Tensor) -> Routing:
        """Choose the experts of the tokens."""
        assert self.router is not None
        probabilities = self.router(inputs).softmax(-1)
        scores, experts = probabilities.topk(TOP, dim=-1)
        return Routing(experts, scores, probabilities)


class Dit(nn.Module):
    """The model."""

    def __init__(self, size: DitSize) -> None:
        super().__init__()
        self.size = size
        self.embed = nn.Linear(TOKEN_PIXELS, size.width)
        self.positions = nn.Parameter(torch.randn(TOKENS, 1, size.width) * 0.02)
        self.classes = nn.Embedding(DIGITS.classes, size.width)
        self.time = nn.Sequential(nn.Linear(size.width, size.width), nn.SiLU(), nn.Linear(size.width, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.modulate = nn.Linear(size.width, 2 * size.width)
        self.head = nn.Linear(size.width, TOKEN_PIXELS)
        for part in (self.modulate, self.head):
            nn.init.zeros_(part.weight)
            nn.init.zeros_(part.bias)

    def block(self, layer: int) -> Block:
        """Return a layer."""
        block = self.blocks[layer]
        assert isinstance(block, Block)
        return block

    def condition(self, times: Tensor, labels: Tensor) -> Tensor:
        """Return the conditioning of all layers, (B, d), from times (B,), 0 to 1, and labels (B,)."""
        half = self.size.width // 2
        waves = times[:, None] * 1000 * torch.exp(torch.arange(half) * (-9.21 / half))
        told: Tensor = self.time(torch.cat([waves.cos(), waves.sin()], dim=-1)) + self.classes(labels)
        return told

    def begin(self, pixels: Tensor, tokens: slice) -> Tensor:
        """Return hidden states of some tokens, (n, B, d), from their pixels, (n, B, 4)."""
        begun: Tensor = self.embed(pixels) + self.positions[tokens]
        return begun

    def velocity(self, x: Tensor, condition: Tensor) -> Tensor:
        """Return the velocity (n, B, 4) of tokens (n, B, d) after the last layer."""
        output: Tensor = self.head(_normed(x, *self.modulate(functional.silu(condition)).chunk(2, dim=-1)))
        return output

    def forward(self, pixels: Tensor, times: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return velocities (T, B, 4) of pixels (T, B, 4), all tokens at once, and the imbalance of experts: for
        training.
        """
        condition = self.condition(times, labels)
        x = self.begin(pixels, slice(None))
        uneven = torch.zeros(())
        for layer in range(self.size.layers):
            block = self.block(layer)
            m = block.modulations(condition)
            x = block.attend_to_all(x, m)
            if block.router is None:
                x = block.feed_forward(x, m)
                continue
            inputs = block.feed_input(x, m)
            routing = block.route(inputs)
            weights = torch.zeros_like(routing.probabilities).scatter(-1, routing.experts, routing.scores)
            mixed = torch.stack([expert(inputs) for expert in block.experts], dim=-1) @ weights[..., None]
            x = x + m[5] * (block.feed(inputs) + mixed[..., 0])
            used = (weights > 0).to(torch.float32).mean((0, 1)) / TOP
            uneven = uneven + len(used) * (used * routing.probabilities.mean((0, 1))).sum()
        return self.velocity(x, condition), uneven


def by_heads(x: Tensor, heads: int) -> Tensor:
    """Return (n, B, d) as (B, heads, n, d / heads), contiguous."""
    return x.view(*x.shape[:-1], heads, -1).permute(1, 2, 0, 3).contiguous()


def _normed(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def to_tokens(images: Tensor) -> Tensor:
    """Return images (B, 64) as the pixels of tokens, (T, B, 4)."""
    cut = images.reshape(-1, ROWS, PATCH, ROWS, PATCH).permute(1, 3, 0, 2, 4)
    return cut.reshape(TOKENS, len(images), TOKEN_PIXELS)


def to_images(pixels: Tensor) -> Tensor:
    """Return pixels of tokens (T, B, 4) as images (B, 64): the inverse of `to_tokens`."""
    cut = pixels.reshape(ROWS, ROWS, -1, PATCH, PATCH).permute(2, 0, 3, 1, 4)
    return cut.reshape(-1, DIGITS.side**2)


def build_dit(size: DitSize, seed: int) -> Dit:
    """Make a model, initialised from the seed; the global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Dit(size)


def start(images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noise (T, B, 4) and labels (B,), each class in turn, for a request of `images` images."""
    noise = torch.randn(TOKENS, images, TOKEN_PIXELS, generator=torch.Generator().manual_seed(seed))
    return noise, torch.arange(images) % DIGITS.classes


def rows_of_tokens(first: int, end: int) -> list[slice]:
    """Return the rows of tokens `first` to `end`, which are whole rows."""
    return [slice(at, at + ROW) for at in range(first, end, ROW)]


@torch.no_grad()
def sample(model: Dit, noise: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Return images (B, 64), -1 to 1, from noise (T, B, 4): the unsplit sampler of a dense model; every split without
    codec and staleness must be bit-identical to it.
    """
    z, rows = noise, rows_of_tokens(0, TOKENS)
    for step in range(steps):
        condition = model.condition(torch.full((len(labels),), step / steps), labels)
        x = torch.cat([model.begin(z[at], at) for at in rows])
        for layer in range(model.size.layers):
            block = model.block(layer)
            m = block.modulations(condition)
            projected = [block.project(x[at], m) for at in rows]
            keys, values = (by_heads(torch.cat([p[which] for p in projected]), block.heads) for which in (1, 2))
            attended = [block.attend(x[at], p.q, keys, values, m) for at, p in zip(rows, projected, strict=True)]
            x = torch.cat([block.feed_forward(row, m) for row in attended])
        z = torch.cat([z[at] + model.velocity(x[at], condition) / steps for at in rows])
    return to_images(z)
