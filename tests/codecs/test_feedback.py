"""Error feedback: nothing is lost, it only comes later; lazily within a step; and EF21, which sends differences."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
import torch
from ends import FORWARD, key_at

from testbed.codecs.check.tensors import normal
from testbed.codecs.make import make
from testbed.codecs.memory.feedback import ErrorFeedback
from testbed.errors import CodecError


def feedback(text: str) -> ErrorFeedback:
    codec = make(text, FORWARD)
    assert isinstance(codec, ErrorFeedback)
    return codec


def test_another_shape_begins_with_nothing_owed() -> None:
    codec = feedback("ef(topk(0.2))")
    codec.encode(normal(3, 40), key_at(0))
    x = normal(4, 40)
    assert bytes(codec.encode(x, key_at(1))) == bytes(make("topk(0.2)", FORWARD).encode(x, key_at(1)))


# ------------------------------------------------------------------ lazily
def test_what_is_owed_is_dropped_when_the_step_ends() -> None:
    lazy = feedback("lazy(topk(0.2))")
    for part in range(3):
        lazy.encode(normal(3, 40, seed=part), key_at(0, part))
    x = normal(3, 40, seed=9)
    plain = bytes(make("topk(0.2)", FORWARD).encode(x, key_at(1)))
    assert bytes(lazy.encode(x, key_at(1))) == plain
    assert bytes(lazy.encode(x, key_at(1, 1))) != plain


def test_an_error_that_is_not_finite_is_refused_and_forgotten() -> None:
    codec = feedback("ef(bf16)")
    with pytest.raises(CodecError, match="error feedback"):
        codec.encode(torch.full((2, 4), torch.finfo(torch.float32).max), key_at(0))
    assert codec.residual(key_at(0)).norm() == 0


def test_after_a_reset_nothing_is_owed() -> None:
    codec = feedback("ef(topk(0.2))")
    codec.encode(normal(3, 40), key_at(0))
    assert codec.residual(key_at(0)).norm() > 0
    codec.reset()
    assert codec.residual(key_at(0)).norm() == 0


# ------------------------------------------------------------------ EF21
def test_ef21_comes_to_hold_a_constant_input() -> None:
    x = normal(4, 100)
    sender, receiver = make("ef21(topk(0.1, fp32))", FORWARD), make("ef21(topk(0.1, fp32))", FORWARD)
    errors = []
    for step in range(10):
        found = receiver.decode(bytes(sender.encode(x, key_at(step))), key_at(step))
        errors.append((found - x).norm().item())
    # Each message sends the largest tenth of what is missing, so no more than 1 - 0.1 of its square is left.
    assert all(after**2 <= 0.9 * before**2 + 1e-9 for before, after in itertools.pairwise(errors))
    assert errors[-1] < 1e-5
    assert errors[0] > 1


# ------------------------------------------------------------------ with decay, with momentum
def test_what_is_owed_decays() -> None:
    inputs, decay = [normal(300, seed=step) for step in range(6)], 0.8
    sender, plain = make(f"ef-decay(topk(0.1, fp32), {decay})", FORWARD), make("topk(0.1, fp32)", FORWARD)
    owed = torch.zeros(300)
    for step, x in enumerate(inputs):
        decoded = plain.decode(bytes(sender.encode(x, key_at(step))), key_at(step))
        total = x + decay * owed
        assert torch.allclose(decoded[decoded != 0], total[decoded != 0])
        owed = total - decoded
    assert float(owed.norm()) > 0


def test_deep_gradient_compression_is_its_formula() -> None:
    sender, plain = make("dgc(topk(0.1, fp32), 0.7)", FORWARD), make("topk(0.1, fp32)", FORWARD)
    u, v = torch.zeros(300), torch.zeros(300)
    for step in range(6):
        if step == 3:  # the state is all that it goes by
            again = make("dgc(topk(0.1, fp32), 0.7)", FORWARD)
            cast(Any, again).load(cast(Any, sender).state())
            sender = again
        x = normal(300, seed=step)
        decoded = plain.decode(bytes(sender.encode(x, key_at(step))), key_at(step))
        u = 0.7 * u + x
        v = v + u
        largest = v.abs().topk(30).indices
        sent = torch.zeros(300).index_copy(0, largest, v[largest])
        assert torch.allclose(decoded, sent, atol=1e-6)
        u[largest] = v[largest] = 0
