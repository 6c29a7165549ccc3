"""adaptive: the slowest link compresses most, from measurements alone; the receiver needs none."""

from __future__ import annotations

import pytest
import torch
from ends import FORWARD
from torch import Tensor

from testbed.codecs.adaptive import Adaptive
from testbed.codecs.contract import MessageKey, ObservesLink
from testbed.codecs.make import make
from testbed.codecs.wrap import capability

SHAPE = (4, 64, 128)
FP32_BYTES = 4 * 4 * 64 * 128


def normal(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def converse(text: str, rates: list[float]) -> list[int]:
    """The codec chosen for each message over a link of these rates (bytes a second)."""
    sender, receiver, chosen, sent = make(text, FORWARD), make(text, FORWARD), [], 0
    assert isinstance(sender, ObservesLink)
    for step, rate in enumerate(rates):
        key = MessageKey("train", step, 0, (0,))
        if step:
            sender.observe(sent, sent / rate)
        payload = bytes(sender.encode(normal(step), key))
        sent = len(payload)
        chosen.append(payload[1])
        decoded = receiver.decode(payload, key)
        assert decoded.shape == SHAPE
    return chosen


@pytest.mark.parametrize(
    ("rate", "choice"), [(1e9, 0), (0.4 * FP32_BYTES / 0.05, 1), (0.2 * FP32_BYTES / 0.05, 2), (1e3, 2)]
)
def test_the_slower_the_link_the_stronger_the_codec(rate: float, choice: int) -> None:
    chosen = converse("adaptive(50)", [rate] * 8)
    assert chosen[0] == 0
    assert chosen[-3:] == [choice] * 3


def test_it_follows_a_link_that_changes() -> None:
    chosen = converse("adaptive(50, strong=delta(int4))", [1e9] * 4 + [1e5] * 30 + [1e9] * 6)
    assert chosen[3] == 0
    assert chosen[33] == 2
    assert chosen[-1] == 0


def test_without_measurements_it_stays_mild_and_small_ones_do_not_count() -> None:
    codec = make("adaptive(0.001)", FORWARD)
    assert isinstance(codec, Adaptive)
    for step in range(3):
        codec.observe(100, 1.0)
        assert bytes(codec.encode(normal(step), MessageKey("train", step, 0, ())))[1] == 0


def test_measurements_reach_it_through_wrappers() -> None:
    codec = make("zstd(adaptive(0.001))", FORWARD)
    observer = capability(codec, ObservesLink)
    sizes = []
    for step in range(5):
        observer.observe(10**5, 1.0)
        sizes.append(len(codec.encode(normal(0), MessageKey("train", step, 0, ()))))
    assert sizes[-1] < 0.5 * sizes[0]
