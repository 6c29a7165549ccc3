"""Learned bottlenecks: an encoder at the boundary's upper end and a decoder at the lower, trained with the model.

They change what is learned, and are part of the model in every evaluation, with or without the codec on the wire.
They send m = d/ratio values per token, so bits per element are the inner codec's divided by `ratio`. Initial parameters
depend on the seed and the boundary.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from testbed import keyed
from testbed.codecs.contract import Codec, Context
from testbed.codecs.in_model import bases
from testbed.codecs.in_model.model_codec import HookBase, InModel, changeable, device_of
from testbed.message_key import Side

Squeeze = Literal["linear", "maxout"]
"""The layer that maps d channels to m in SWARM's encoder."""

_ONE_AT_A_TIME = threading.Lock()
"""torch initialises layers from the process's global generator: stages in threads would draw from each other's seed."""


class BottleneckHook(HookBase):
    """One end of a bottleneck in a stage's model: see `contract.Hook`."""

    keeps = ("module",)

    def __init__(self, module: nn.Module) -> None:
        """`module` maps (..., d) to (..., m) at the upper end, and back at the lower."""
        self.module = module

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters of this end."""
        return self.module.parameters()

    def send(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Map hidden states (b, n, d) to (b, n, m)."""
        return self.module(hidden)  # type: ignore[no-any-return]

    def receive(self, coded: Tensor, inputs: Tensor) -> Tensor:
        """Map (b, n, m) to hidden states (b, n, d)."""
        return self.module(coded)  # type: ignore[no-any-return]


class _Bottleneck(InModel):
    """Common part of the bottlenecks."""

    def __init__(self, context: Context, *, inner: Codec, ratio: float) -> None:
        super().__init__(context, inner=inner)
        self._ratio = ratio

    def hook(self, model: nn.Module, side: Side) -> BottleneckHook:
        """Make a fresh end, with the same initial parameters for the same seed, boundary and end.

        SpecError for a model of unknown width.
        """
        width = changeable(model, "bottleneck").width
        sends = side == "downstream"
        end = "encoder" if sends else "decoder"
        name = f"{type(self).__name__} {self._context.seed} {self._context.boundary} {end}"
        with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(keyed.key(name, size_bytes=4))
            return BottleneckHook((self.encoder if sends else self.decoder)(width).to(device_of(model)))

    def narrow(self, width: int) -> int:
        """Return m for a hidden size d."""
        return bases.rank_of(width, self._ratio)

    def encoder(self, width: int) -> nn.Module:
        """Make the layers that map (..., d) to (..., m)."""
        raise NotImplementedError

    def decoder(self, width: int) -> nn.Module:
        """Make the layers that map (..., m) to (..., d)."""
        raise NotImplementedError


class Swarm(_Bottleneck):
    """`linear`: LN(d), Linear(d, m), LN(m) | wire | Linear(m, d). `maxout`: instead of the first Linear, the largest
    of each group of `ratio` neighbouring values. Both as in SWARM (Ryabinin et al., ICML 2023), whose wire is 8 bits.
    """

    def __init__(self, context: Context, *, ratio: int, inner: Codec, kind: Squeeze = "linear") -> None:
        super().__init__(context, inner=inner, ratio=ratio)
        self._kind, self._group = kind, ratio

    def narrow(self, width: int) -> int:
        """Return the number of groups, the last of which may be smaller."""
        return -(-width // self._group)

    def encoder(self, width: int) -> nn.Module:
        narrow = self.narrow(width)
        squeeze = _Maxout(self._group) if self._kind == "maxout" else nn.Linear(width, narrow)
        return nn.Sequential(nn.LayerNorm(width), squeeze, nn.LayerNorm(narrow))

    def decoder(self, width: int) -> nn.Module:
        return nn.Linear(self.narrow(width), width)


class _Maxout(nn.Module):
    def __init__(self, group: int) -> None:
        super().__init__()
        self._group = group

    def forward(self, values: Tensor) -> Tensor:
        """Map (..., d) to (..., d / group), with d padded to a multiple of the group."""
        if lacking := -values.shape[-1] % self._group:
            values = nn.functional.pad(values, (0, lacking), value=-torch.inf)
        return values.view(*values.shape[:-1], -1, self._group).amax(-1)


class Autoencoder(_Bottleneck):
    """z = x W_e^T | wire | z W_d^T, without biases, with Xavier's initialisation.

    Source: the learned linear autoencoder of Bian et al. (MLSys 2024).
    """

    def encoder(self, width: int) -> nn.Module:
        return _xavier(width, self.narrow(width))

    def decoder(self, width: int) -> nn.Module:
        return _xavier(self.narrow(width), width)


def _xavier(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.xavier_uniform_(linear.weight)
    return linear


class ResBm(_Bottleneck):
    """Linear, ReLU, Linear, ReLU | wire | Linear, ReLU, each beside an identity path: the first m channels pass
    unchanged, and the receiver pads them with zeros.

    Source: residual bottleneck (Macrocosmos, arXiv 2604.11947 and the IOTA code, as far as available). The width
    between the encoder's layers is not stated: it is d here.
    """

    def encoder(self, width: int) -> nn.Module:
        narrow = self.narrow(width)
        layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, narrow), nn.ReLU())
        return _BesideIdentity(layers, width, narrow)

    def decoder(self, width: int) -> nn.Module:
        narrow = self.narrow(width)
        return _BesideIdentity(nn.Sequential(nn.Linear(narrow, width), nn.ReLU()), narrow, width)


class _BesideIdentity(nn.Module):
    """y = f(x) + x, with x cut or padded with zeros to y's width."""

    def __init__(self, layers: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = layers
        self._more = outputs - inputs

    def forward(self, values: Tensor) -> Tensor:
        """Map (..., inputs) to (..., outputs)."""
        return self.layers(values) + nn.functional.pad(values, (0, self._more))  # type: ignore[no-any-return]
