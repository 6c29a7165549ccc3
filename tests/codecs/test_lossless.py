"""zstd and entropy: what the inner codec decodes, in as few bytes as the codes' distribution allows; never a bomb."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import zstandard
from ends import FORWARD, KEY
from torch import Tensor

from testbed.codecs import lossless
from testbed.codecs.check.tensors import normal
from testbed.codecs.make import make
from testbed.errors import CodecError

OVERHEAD = 4 + 8 + 8


def sizes(text: str, inner: str, x: Tensor) -> tuple[int, int]:
    return len(make(text, FORWARD).encode(x, KEY)), len(make(inner, FORWARD).encode(x, KEY))


@pytest.mark.parametrize(("inner", "over"), [("int8", 0.02), ("int4", 0.02), ("int2", 0.1)])
def test_entropy_comes_close_to_the_codes_own(inner: str, over: float) -> None:
    x = normal(1024, 256)
    packed, plain = sizes(f"entropy({inner})", inner, x)
    counts = np.bincount(np.frombuffer(make(inner, FORWARD).encode(x, KEY), np.uint8), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    order_0 = -(shares * np.log2(shares)).sum() / 8
    assert order_0 * 0.98 < packed / plain < min((1 + over) * order_0, 1 + OVERHEAD / plain)


def test_repeated_tokens_gain_little_in_entropy_and_much_in_zstd() -> None:
    x = normal(32, 256)[torch.randint(0, 32, (1024,), generator=torch.Generator().manual_seed(0))]
    packed, plain = sizes("entropy(int8)", "int8", x)
    assert packed > 0.8 * plain
    packed, plain = sizes("zstd(int8)", "int8", x)
    assert packed < 0.2 * plain


def test_bytes_of_bf16_are_split_and_only_one_plane_packs() -> None:
    x = normal(256, 256)
    split, plain = sizes("zstd(bf16)", "bf16", x)
    whole, _ = sizes("zstd(bf16, whole)", "bf16", x)
    assert split < 0.95 * whole
    payload = bytes(make("zstd(bf16)", FORWARD).encode(x, KEY))
    _, high_and_low = payload[1], struct.unpack_from("<3Q", payload, 4)
    assert high_and_low[0] == plain
    assert high_and_low[1] == plain // 2  # little-endian: the mantissa's byte comes first, and is kept as it is
    assert high_and_low[2] < 0.5 * plain / 2


@pytest.mark.parametrize("wrapper", ["zstd", "entropy"])
def test_no_payload_is_worth_more_than_256_times_its_bytes(wrapper: str) -> None:
    packed, plain = sizes(f"{wrapper}(fp32)", "fp32", torch.zeros(1000, 1000))
    assert packed * lossless.MOST >= plain
    bomb = zstandard.ZstdCompressor().compress(bytes(2**28))
    claim = (
        bytes([(lossless.Zstd if wrapper == "zstd" else lossless.Entropy).code, 1, 0, 0])
        + struct.pack("<QQ", 2**28, len(bomb))
        + bomb
    )
    with pytest.raises(CodecError):
        make(f"{wrapper}(fp32)", FORWARD).decode(claim, KEY)


@pytest.mark.parametrize("wrapper", ["zstd", "entropy"])
def test_a_plane_of_another_length_than_it_claims_is_refused(wrapper: str) -> None:
    payload = bytearray(make(f"{wrapper}(int4)", FORWARD).encode(normal(64, 64), KEY))
    (size,) = struct.unpack_from("<Q", payload, 4)
    for wrong in (size - 1, size + 1, 0, 2**63):
        struct.pack_into("<Q", payload, 4, wrong)
        with pytest.raises(CodecError):
            make(f"{wrapper}(int4)", FORWARD).decode(payload, KEY)
