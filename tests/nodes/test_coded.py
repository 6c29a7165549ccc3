"""Payloads that are no buffers of bytes: their sizes are counted in bytes, and they decode."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from testbed.codecs.contract import Context, MessageKey, Payload
from testbed.codecs.make import make
from testbed.jobs.actions import Key, Message
from testbed.message_key import Direction
from testbed.nodes import coded


class Words:
    """Sends fp32 in a buffer of 4-byte words, whose length is a quarter of its bytes."""

    def __init__(self, context: Context) -> None:
        self.shape: tuple[int, ...] = ()

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        head = [tensor.ndim, *tensor.shape]
        words = torch.cat([torch.tensor(head, dtype=torch.int32), tensor.contiguous().view(-1).view(torch.int32)])
        return memoryview(words.numpy())

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        words = torch.frombuffer(bytearray(payload), dtype=torch.int32)
        after = int(words[0]) + 1
        return words[after:].view(torch.float32).view(words[1:after].tolist())


class _Node(coded.CodedNode):
    def __init__(self) -> None:
        self._codecs = coded._Codecs(self._made)
        self._kind: Any = SimpleNamespace(named=lambda key: SimpleNamespace(direction="forward"))

    def _made(self, end: str, what: str, boundary: int, direction: Direction) -> Words:
        return Words(Context(0, boundary, direction))


def test_a_payload_of_words_is_counted_in_bytes_and_decodes() -> None:
    x, key = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), Key("x", 0)
    payload = _Node().encode(key, x).payload
    assert len(payload) == 4 * (3 + 40)
    (value,) = _Node().decode([Message(key, payload)])
    assert torch.equal(value, x)


def test_factors_in_a_payload_of_words_are_counted_in_bytes() -> None:
    x, key = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), MessageKey("train", 0, 0, ())
    ends = [make(f"lowrank({__name__}:Words, 8)", Context(0, 0, "forward")) for _ in range(2)]
    assert torch.allclose(ends[1].decode(ends[0].encode(x, key), key), x, atol=1e-5)
