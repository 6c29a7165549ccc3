"""TAH-Quant: its bytes, its choices against a slow reading of the formulas, what rotation is worth."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ends import FORWARD, KEY
from torch import Tensor

from testbed.codecs.check.tensors import normal
from testbed.codecs.dense import hadamard
from testbed.codecs.dense.tah import Tah
from testbed.errors import CodecError


def _plan(x: Tensor, tile: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Which tiles have 4 bits, which are rotated, and the pivots: the formulas, one tile at a time, in fp64."""
    rows, width = x.shape
    tiles = x.double().numpy().reshape(rows, width // tile, tile)
    wide = np.zeros(tiles.shape[:2], bool)
    rotated, pivot = wide.copy(), np.zeros(tiles.shape[:2], int)
    for row in range(rows):
        entropy = []
        for at, one in enumerate(tiles[row]):
            p = np.abs(one) / np.abs(one).sum()
            entropy.append(-sum(float(v) * math.log(v) for v in p if v > 0))
            a1, a2 = np.sort(np.abs(one))[::-1][:2]
            if a1 > 2.0 * a2:
                rotated[row, at], pivot[row, at] = True, int(np.abs(one).argmax())
        wide[row, np.argsort(entropy)[::-1][: math.ceil(0.8 * len(entropy))]] = True
    return wide, rotated, pivot


def test_choices_follow_the_formulas() -> None:
    x = normal(20, 12 * 32)
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.02] *= 8
    codec = Tah(FORWARD, tile=32)
    of = codec._grouping(tuple(x.shape))
    plan = codec._plan(of.split(x), codec._ranked(tuple(x.shape), of), KEY)
    wide, rotated, pivot = _plan(x, 32)
    assert np.array_equal(plan.wide.view(20, 12).numpy(), wide)
    assert np.array_equal(plan.rotated.view(20, 12).numpy(), rotated)
    assert np.array_equal(plan.pivot.view(20, 12).numpy(), pivot)
    assert 0 < rotated.sum() < rotated.size
    tile = x.view(-1, 32)[plan.rotated][0].clone()
    at = int(plan.pivot[plan.rotated][0])
    tile[[0, at]] = tile[[at, 0]]
    assert torch.allclose(plan.x[plan.rotated][0], tile @ hadamard.matrix(32), atol=1e-5)


def test_tiles_ranked_in_a_sample_are_as_many_however_narrow_a_token_is() -> None:
    x = normal(3, 40, 128)
    tokens, sample = Tah(FORWARD), Tah(FORWARD, per="sample")
    of = tokens._grouping(tuple(x.shape))
    grouped = of.split(x)
    assert bool(tokens._plan(grouped, tokens._ranked((3, 40, 128), of), KEY).wide.all())
    wide = sample._plan(grouped, sample._ranked((3, 40, 128), of), KEY).wide.view(3, 80)
    assert wide.sum(1).tolist() == [64, 64, 64]
    entropy = -(p := grouped.abs() / grouped.abs().sum(-1, keepdim=True)).mul(p.log()).sum(-1).view(3, 80)
    assert all(entropy[one][wide[one]].min() >= entropy[one][~wide[one]].max() - 1e-5 for one in range(3))
    payload = sample.encode(x, KEY)
    assert 8 * (memoryview(payload).nbytes - 16) == 240 * (64 * 3.8 + 40)
    assert ((sample.decode(bytes(payload), KEY) - x).abs() <= sample.bound(x)).all()


def test_rotation_is_worth_its_while_on_tiles_with_one_outlier_and_not_done_on_others() -> None:
    x = normal(64, 768)
    never, gated = Tah(FORWARD, tau=1e9), Tah(FORWARD)
    assert torch.equal(never.decode(never.encode(x, KEY), KEY), gated.decode(gated.encode(x, KEY), KEY))
    x[:, 5::64] = 40.0
    wrong = [float((codec.decode(codec.encode(x, KEY), KEY) - x).norm()) for codec in (never, gated)]
    assert wrong[1] < wrong[0] / 1.5


def test_all_or_none_at_four_bits() -> None:
    x = normal(8, 256)
    for share, bits in ((1, 4), (0, 3)):
        codec = Tah(FORWARD, share=share)
        payload = codec.encode(x, KEY)
        assert 8 * (memoryview(payload).nbytes - 12) == x.numel() * bits + 40 * 32
        assert ((codec.decode(payload, KEY) - x).abs() <= codec.bound(x)).all()


def test_another_number_of_tiles_at_four_bits_is_refused() -> None:
    codec = Tah(FORWARD)
    payload = bytearray(codec.encode(normal(8, 320), KEY))
    flags = 12 + 40 * 4 + 32 * 64 * 4 // 8 + 8 * 64 * 3 // 8  # header, steps and offsets, codes
    payload[flags] ^= 1
    with pytest.raises(CodecError, match="metadata"):
        codec.decode(payload, KEY)
