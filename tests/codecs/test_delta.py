"""Differences through any codec: the closed loop holds, the open one drifts, a lost message heals."""

from __future__ import annotations

import pytest
import torch
from ends import BACKWARD, FORWARD, key_at
from torch import Tensor

from testbed.codecs.check.tensors import normal
from testbed.codecs.contract import Codec, Stateful
from testbed.codecs.make import make
from testbed.errors import CodecError


def pair(text: str) -> tuple[Codec, Codec]:
    return make(text, FORWARD), make(text, FORWARD)


def errors(text: str, steps: int) -> list[float]:
    """Relative, of a tensor that wanders."""
    sender, receiver = pair(text)
    x, found = normal(8, 64), []
    for step in range(steps):
        x = 0.999 * x + 0.04 * normal(8, 64, seed=step + 1)
        decoded = receiver.decode(bytes(sender.encode(x, key_at(step))), key_at(step))
        found.append(float((decoded - x).norm() / x.norm()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["int8", "int4"])
def test_the_closed_loop_is_bounded_for_a_thousand_steps_and_the_open_one_grows(inner: str) -> None:
    closed, opened = errors(f"delta({inner}, fp32)", 1000), errors(f"delta-open({inner}, fp32)", 1000)
    assert max(closed[500:]) <= 1.2 * max(closed[1:500])
    early, late = sum(opened[40:60]) / 20, sum(opened[980:]) / 20
    assert late > 3 * early  # a random walk: as the root of the steps, 4.4 times
    assert late > 5 * max(closed[500:])


@pytest.mark.parametrize("inner", ["int8", "int4", "topk(0.1)", "powersgd(4)", "zstd(int4)", "delta(int8)"])
def test_a_message_is_four_bytes_and_the_inner_codec_of_the_difference(inner: str) -> None:
    """From the last of the same phase and micro-batch, where that has the same shape."""
    sender, receiver = pair(f"delta({inner})")
    alone = make(inner, FORWARD)
    previous: dict[tuple[str, int], Tensor] = {}
    for step, shape in enumerate([(4, 64), (4, 64), (4, 64), (8, 64), (8, 64), (64, 8), (4, 64)]):
        train = key_at(step), key_at(step, 1)
        for key in (*train, train[0]._replace(phase="evaluation")):
            x, last = normal(*shape, seed=step + key.microbatch), previous.get((key.phase, key.microbatch))
            payload = bytes(sender.encode(x, key))
            difference = x - last if last is not None and last.shape == x.shape else x
            assert payload[4:] == bytes(alone.encode(difference, key))
            previous[key.phase, key.microbatch] = receiver.decode(payload, key)


def test_what_the_old_name_decodes_the_new_one_does() -> None:
    old, new = pair("delta-int8"), pair("delta(int8)")
    for step in range(5):
        x, key = normal(3, 4, 32, seed=step), key_at(step % 2)
        decoded = [receiver.decode(sender.encode(x, key), key) for sender, receiver in (old, new)]
        assert torch.equal(*decoded)


@pytest.mark.parametrize("inner", ["onebit", "twobit", "lowrank(2)"])
def test_a_repeated_tensor_is_met_ever_closer_by_strong_compressors(inner: str) -> None:
    sender, receiver = pair(f"compactfusion({inner})")
    x, target, found = normal(64, 96, seed=1), normal(64, 96, seed=2), []
    for step in range(40):
        decoded = receiver.decode(sender.encode(x if step == 0 else target, key_at(step)), key_at(step))
        found.append(float((decoded - target).norm() / target.norm()))
    assert found[39] < 0.2 * found[1]


def test_the_first_message_of_compactfusion_is_bf16_and_later_ones_are_a_bit_a_value() -> None:
    sender, _ = pair("compactfusion(onebit)")
    x = normal(64, 96)
    header = 4 + 4 + 4 * 2
    assert len(sender.encode(x, key_at(0))) == header + 2 * x.numel()
    assert len(sender.encode(x, key_at(1))) == header + x.numel() // 8 + 2 * (64 + 96)


def test_no_sum_beyond_fp32_is_remembered() -> None:
    largest, refused = torch.finfo(torch.float32).max, 0
    for seed in range(100):
        sender, receiver = pair("delta-int8")
        assert isinstance(sender, Stateful)
        generator = torch.Generator().manual_seed(seed)
        for step in range(3):
            x = torch.rand((4, 16), generator=generator) * largest
            x[:, 0] = largest
            before = {name: value.clone() for name, value in sender.shared().items()}
            try:
                payload = bytes(sender.encode(x, key_at(step)))
            except CodecError:
                refused += 1
                assert all(torch.equal(value, before[name]) for name, value in sender.shared().items())
                break
            assert receiver.decode(payload, key_at(step)).isfinite().all()
    assert refused


def test_an_error_late_in_the_loop_leaves_the_inner_codec_as_it_was() -> None:
    sender, _ = pair("delta(delta(int8))")
    assert isinstance(sender, Stateful)
    sender.encode(torch.full((1, 4), 3e38), key_at(0))
    before = str(sender.state())
    with pytest.raises(CodecError, match="step 1"):
        sender.encode(torch.full((1, 4), -3e38), key_at(1))
    assert str(sender.state()) == before


def test_gradients_go_over_as_the_codec_named_for_them() -> None:
    x = normal(4, 64)
    delta, plain = make("delta(int4, backward=int8)", BACKWARD), make("int8", BACKWARD)
    assert bytes(delta.encode(x, key_at(0))) == bytes(plain.encode(x, key_at(0)))
