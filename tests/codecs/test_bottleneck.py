"""Learned bottlenecks and MAPL's hook: shapes, bytes, gradients, and the same numbers every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from testbed.codecs import wrap
from testbed.codecs.check.trial_model import StageSize, TrialStage
from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.in_model import bases
from testbed.codecs.in_model.mapl import MaplHook
from testbed.codecs.in_model.model_codec import Carrying
from testbed.codecs.make import make
from testbed.errors import CodecError, SpecError
from testbed.runtime.wiring import largest_payload

FORWARD, BACKWARD = Context(3, 1, "forward"), Context(3, 1, "backward")
BOTTLENECKS = [
    "bottleneck(4)",
    "bottleneck(4, maxout)",
    "bottleneck(3, maxout)",
    "autoencoder(4)",
    "resbm(4)",
    "resbm(16)",
]


SIZE = StageSize(width=32, vocabulary=11, context=16)


def ends_of(text: str, context: Context = FORWARD) -> tuple[Any, Any, Any, Any]:
    upper: Any = make(text, context)
    lower: Any = make(text, context)
    return (
        upper,
        lower,
        upper.hook(TrialStage("first", SIZE), "downstream"),
        lower.hook(TrialStage("last", SIZE), "upstream"),
    )


def key_at(step: int, microbatch: int = 0, phase: Any = "train") -> MessageKey:
    return MessageKey(phase, step, microbatch, (0,))


IDS = torch.arange(10).view(2, 5)
HIDDEN = bases.normal("hidden", 2, 5, 32)


@pytest.mark.parametrize("text", BOTTLENECKS)
def test_the_same_start_every_time_and_another_at_another_boundary_or_seed(text: str) -> None:
    state = torch.get_rng_state()

    def first(context: Context) -> torch.Tensor:
        up, down = ends_of(text, context)[2:]
        found: torch.Tensor = down.receive(up.send(HIDDEN, IDS), IDS).detach()
        return found

    again = first(FORWARD)
    assert torch.equal(first(FORWARD), again)
    assert not torch.equal(first(FORWARD._replace(boundary=0)), again)
    assert not torch.equal(first(FORWARD._replace(seed=4)), again)
    assert torch.equal(torch.get_rng_state(), state)


def test_swarm_s_two_kinds_are_what_their_formulas_say() -> None:
    norm = nn.functional.layer_norm
    _, _, up, down = ends_of("bottleneck(4)")
    before, linear, _ = up.module
    expected = norm(linear(norm(HIDDEN, (32,))), (8,))
    assert torch.allclose(up.send(HIDDEN, IDS), expected, atol=1e-6)
    assert torch.allclose(down.receive(expected, IDS), expected @ down.module.weight.T + down.module.bias, atol=1e-6)
    assert before.normalized_shape == (32,)
    _, _, up, _ = ends_of("bottleneck(4, maxout)")
    expected = norm(norm(HIDDEN, (32,)).view(2, 5, 8, 4).amax(-1), (8,))
    assert torch.allclose(up.send(HIDDEN, IDS), expected, atol=1e-6)


def test_resbm_s_identity_path_carries_the_first_channels() -> None:
    _, _, up, down = ends_of("resbm(4)")
    with torch.no_grad():
        for parameter in (*up.parameters(), *down.parameters()):
            parameter.zero_()
    back = down.receive(up.send(HIDDEN, IDS), IDS)
    assert torch.equal(back[..., :8], HIDDEN[..., :8])
    assert not back[..., 8:].count_nonzero()


def test_a_model_codec_within_a_model_codec_is_an_error() -> None:
    with pytest.raises(SpecError, match="use one of them"):
        make("subspace(8, inner=bottleneck(2))", FORWARD)


# ------------------------------------------------------------------ MAPL
def mapl_ends() -> tuple[Any, Any, MaplHook, MaplHook, Any, Any]:
    upper, lower, up, down = ends_of("mapl(4, inner=fp32, rate=1)")
    backs: list[Any] = [make("mapl(4, inner=fp32, rate=1)", BACKWARD) for _ in range(2)]
    backs[0].pair(upper)
    backs[1].pair(lower)
    return upper, lower, up, down, *backs


def crossing(step: int, ends: tuple[Any, ...], target: torch.Tensor, parts: int = 2) -> float:
    """One training step of one boundary whose loss is the distance from `target`."""
    upper, lower, up, down, upper_back, lower_back = ends
    up.begin(step, parts)
    down.begin(step, parts)
    total = 0.0
    for part in range(parts):
        coded = up.send(target, IDS)
        leaf = lower.decode(
            bytes(upper.encode(coded.detach(), key_at(step, part))), key_at(step, part)
        ).requires_grad_()
        loss = (down.receive(leaf, IDS) - target).square().sum() / parts
        loss.backward()
        total += float(loss.detach())
        gradient = bytes(lower_back.encode(leaf.grad, key_at(step, part)))
        coded.backward(upper_back.decode(gradient, key_at(step, part)))
    for hook in (up, down):
        hook.after_step(step, 0.05)
    return total


def test_both_ends_of_mapl_s_basis_follow_the_derivative_of_the_whole() -> None:
    ends = mapl_ends()
    up, down = ends[2], ends[3]
    basis = up.basis.detach().clone()
    assert torch.equal(basis, down.basis.detach())
    up.begin(0, 1)
    down.begin(0, 1)
    leaf = basis.clone().requires_grad_()
    fixed = up._embedding(IDS).detach()
    whole = ((HIDDEN - fixed) @ leaf @ leaf.T + fixed - HIDDEN).square().sum()
    whole.backward()
    crossing(0, ends, HIDDEN, parts=1)
    assert leaf.grad is not None
    product = basis.T @ leaf.grad
    tangent = leaf.grad - basis @ ((product + product.T) / 2)
    start = bases.drawn("mapl 3 boundary 1 32 8", 32, 8)
    expected = bases.polar(start - 0.05 * bases.polar(tangent))
    moved = up._master - start
    assert float(moved.norm()) == pytest.approx(0.05 * 8**0.5, rel=0.05)  # every direction turns by the rate
    # bf16 once for the basis, once for the gradient that came back
    assert float((up._master - expected).norm()) < 0.1 * float(moved.norm())


def test_a_lost_basis_is_noticed_and_a_reset_heals() -> None:
    ends = mapl_ends()
    upper, lower, up = ends[:3]
    for step in range(3):
        crossing(step, ends, HIDDEN)
    coded = up.send(HIDDEN, IDS).detach()
    upper.encode(coded, key_at(3))  # lost
    following = bytes(upper.encode(coded, key_at(3, 1)))
    with pytest.raises(CodecError, match="lost"):
        lower.decode(following, key_at(3, 1))
    upper.reset()
    lower.decode(bytes(upper.encode(coded, key_at(3, 1))), key_at(3, 1))
    assert torch.equal(ends[3].basis.detach(), up.basis.detach())
    lower.decode(bytes(upper.encode(coded, key_at(3, 2))), key_at(3, 2))


def test_the_largest_basis_fits_into_a_frame() -> None:
    """One token of width 2048: what is carried is far more than four times its values and a MiB."""
    width = 2048
    payload = wrap.frame(Carrying.code, bytes(2 * width**2), bytes(4 * width))
    assert 4 * 4 * width + 2**20 < len(payload) <= largest_payload(1, width)
    ends = mapl_ends()
    crossing(0, ends, HIDDEN)
    carrying = ends[0].encode(torch.zeros(1, 1, 8), key_at(1))
    rows, rank = ends[2].expected(key_at(1)) or (0, 0)
    assert 2 * rows * rank < len(bytes(carrying)) <= largest_payload(1, rows)


def test_an_evaluation_gets_the_basis_for_itself() -> None:
    ends = mapl_ends()
    upper, lower, up, down = ends[:4]
    crossing(0, ends, HIDDEN)
    coded = up.send(HIDDEN, IDS).detach()
    sizes = []
    for phase, part in (("evaluation", 0), ("evaluation", 1), ("train", 0), ("train", 1)):
        payload = bytes(upper.encode(coded, key_at(1, part, phase)))
        lower.decode(payload, key_at(1, part, phase))
        assert torch.equal(up.basis.detach(), down.basis.detach())
        sizes.append(len(payload))
    plain, carrying = sizes[1], sizes[1] + 2 * up.basis.numel()
    assert sizes == [carrying, plain, carrying, plain]
