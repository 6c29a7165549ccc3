"""Codecs of other packages, if installed, for comparison with ours.

Each packs into one buffer, as a message must, and unpacks from it; nothing else is added.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from testbed.codecs.contract import Codec, MessageKey, Payload


class PeerCodec(NamedTuple):
    """A codec of another package."""

    codec: str
    """Our corresponding codec."""
    package: str
    make: Callable[[], Codec]


def installed() -> Iterator[PeerCodec]:
    """Yield those that can be imported and work with the installed versions of their dependencies."""
    for package, codec, kind in _PEERS:
        if importlib.util.find_spec(package) is None:
            continue
        try:
            peer = kind()
            peer.decode(peer.encode(torch.ones(2, 64), KEY), KEY)
        except Exception:  # a broken installation counts as missing
            continue
        version = getattr(importlib.import_module(package), "__version__", "")
        yield PeerCodec(codec, f"{package} {version}".strip(), kind)


KEY = MessageKey("train", 0, 0, ())


def _together(codes: Tensor, scales: Tensor) -> Payload:
    first, second = (part.contiguous().view(-1).view(torch.uint8).numpy() for part in (scales, codes))
    return np.concatenate((first, second)).data


class _Bitsandbytes:
    """8-bit dynamic map, blocks of 4,096. Its message omits shape and code book."""

    def __init__(self) -> None:
        self._functional: Any = importlib.import_module("bitsandbytes.functional")

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Return codes and an fp32 absmax per block."""
        codes, state = self._functional.quantize_blockwise(tensor, blocksize=4096)
        _KNOWN["bitsandbytes"] = (tensor.shape, state)
        return _together(codes, state.absmax)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Return an fp32 tensor."""
        shape, state = _KNOWN["bitsandbytes"]
        data = torch.frombuffer(payload, dtype=torch.uint8)
        scales = 4 * state.absmax.numel()
        state.absmax = data[:scales].view(torch.float32)
        decoded: Tensor = self._functional.dequantize_blockwise(data[scales:].view(shape), state)
        return decoded


class _Torchao:
    """int8 with one scale per token, rounded to nearest."""

    def __init__(self) -> None:
        self._primitives: Any = importlib.import_module("torchao.quantization.quant_primitives")

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Return an fp32 scale per token, then the codes."""
        p, x = self._primitives, tensor.reshape(-1, tensor.shape[-1])
        block = (1, x.shape[-1])
        scale, zero = p.choose_qparams_affine(x, p.MappingType.SYMMETRIC, block, torch.int8, -127, 127, 1e-30)
        _KNOWN["torchao"] = tensor.shape
        return _together(p.quantize_affine(x, block, scale, zero, torch.int8, -127, 127), scale)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Return an fp32 tensor."""
        p, shape = self._primitives, _KNOWN["torchao"]
        rows = int(np.prod(shape[:-1]))
        data = torch.frombuffer(payload, dtype=torch.uint8)
        scale, codes = data[: 4 * rows].view(torch.float32), data[4 * rows :].view(torch.int8).view(rows, shape[-1])
        zero = torch.zeros(rows, dtype=torch.int32)
        decoded: Tensor = p.dequantize_affine(codes, (1, shape[-1]), scale, zero, torch.int8, -127, 127)
        return decoded.view(shape)


class _Hivemind:
    """One of its own quantisers, with its own message."""

    def __init__(self, kind: str) -> None:
        self._module: Any = importlib.import_module("hivemind.compression")
        self._compression: Any = getattr(self._module, kind)()
        self._message: Any = importlib.import_module("hivemind.proto.runtime_pb2").Tensor

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        """Return a protocol buffer."""
        payload: bytes = self._compression.compress(
            tensor, self._module.CompressionInfo.from_tensor(tensor)
        ).SerializeToString()
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        """Return an fp32 tensor."""
        decoded: Tensor = self._compression.extract(self._message.FromString(bytes(payload))).float()
        return decoded


_KNOWN: dict[str, Any] = {}
"""Parts omitted from a package's message, by package."""

_PEERS: tuple[tuple[str, str, Callable[[], Codec]], ...] = (
    ("bitsandbytes", "blockwise-8", _Bitsandbytes),
    ("torchao", "int8", _Torchao),
    ("hivemind", "blockwise-8", lambda: _Hivemind("BlockwiseQuantization")),
    ("hivemind", "8-bit, uniform over 6 sigma", lambda: _Hivemind("Uniform8BitQuantization")),
    ("hivemind", "8-bit, quantiles", lambda: _Hivemind("Quantile8BitQuantization")),
    ("hivemind", "fp16", lambda: _Hivemind("Float16Compression")),
)
