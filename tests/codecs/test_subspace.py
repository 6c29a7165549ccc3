"""Subspace networks: exact where the weights are constrained, gradients and all; bytes as in the published table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from testbed.codecs.catalogue.codec_spec import parse_codec
from testbed.codecs.contract import Context, MessageKey
from testbed.codecs.in_model import bases, constrained_stage, subspace
from testbed.codecs.in_model.constrained_stage import ConstrainedStage
from testbed.codecs.in_model.model_codec import Carrying
from testbed.codecs.in_model.subspace import Subspace, SubspaceHook
from testbed.codecs.make import make
from testbed.errors import CodecError, SpecError
from testbed.nodes.optimise import RowwiseAdamW
from testbed.spec import OptimiserSpec, TextSpec
from testbed.workloads.build_stage import build_stage

FORWARD, BACKWARD = Context(3, 0, "forward"), Context(3, 0, "backward")
KEY = MessageKey("train", 0, 0, (0, 1))
KEEPS = ("projected", "reparametrised", "grassmann")
SPEC = OptimiserSpec(learning_rate=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, clip_norm=1.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def stages_of(family: Any, count: int, **changes: Any) -> list[Any]:
    fields = {
        "model": f"{family}-nano",
        "text": "none",
        "sequence_length": 16,
        "batch_size": 2,
        "validation_batches": 1,
        **changes,
    }
    spec = TextSpec(family=family, **fields)
    return [build_stage(spec, stage=stage, stages=count, seed=1, vocabulary=4096) for stage in range(count)]


def ids() -> Tensor:
    return torch.randint(4096, (2, 16), generator=torch.Generator().manual_seed(2))


def hooks_of(stages: list[Any], text: str) -> list[tuple[SubspaceHook, SubspaceHook]]:
    """At each boundary the upper end and the lower."""
    found = []
    for index, (upper, lower) in enumerate(itertools.pairwise(stages)):
        context = Context(3, index, "forward")
        ends: list[Any] = [make(text, context), make(text, context)]
        found.append((ends[0].hook(upper, "downstream"), ends[1].hook(lower, "upstream")))
    return found


def through(
    stages: list[Any], hooks: list[tuple[SubspaceHook, SubspaceHook]], *, cut: bool
) -> tuple[Tensor, list[float]]:
    """The loss, its gradients in the stages' parameters, and what each boundary lost; `cut`: through coordinates,
    detached.
    """
    hidden, crossings, lost = ids(), [], []
    for stage, (up, down) in zip(stages, hooks, strict=False):
        hidden = stage(hidden)
        if cut:
            coded = up.send(hidden, ids())
            leaf = coded.detach().clone().requires_grad_()
            crossings.append((coded, leaf))
            back = down.receive(leaf, ids())
            lost.append(float((back - hidden).detach().abs().max() / hidden.detach().abs().max()))
            hidden = back
    loss = stages[-1].loss(stages[-1](hidden), ids().roll(1))
    loss.backward()
    for coded, leaf in reversed(crossings):
        assert leaf.grad.shape == coded.shape
        coded.backward(leaf.grad)
    return loss.detach(), lost


def gradients(stages: list[Any], basis: Tensor, *, projected: bool) -> dict[str, Tensor]:
    """By stage and name; of constrained weights what the constraint leaves, and nothing of the last stage's."""
    constrained = (
        {id(p): axis for stage in stages[:-1] for p, axis in stage.kept["subspace"]._kept} if projected else {}
    )
    found = {}
    for index, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            gradient = parameter.grad.clone()
            if id(parameter) in constrained:
                constrained_stage.project_(gradient, basis, constrained[id(parameter)])
            found[f"{index}.{name}"] = gradient
    return found


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("keep", KEEPS)
def test_nothing_is_lost_and_gradients_are_the_constrained_model_s_own(keep: str, family: str) -> None:
    results = []
    for cut in (False, True):
        stages = stages_of(family, 3)
        hooks = hooks_of(stages, f"subspace(8, {keep})")
        loss, lost = through(stages, hooks, cut=cut)
        assert all(share < 1e-5 for share in lost)
        assert len(lost) == (2 if cut else 0)
        results.append((loss, gradients(stages, stages[0].kept["subspace"].basis, projected=keep != "reparametrised")))
    (loss, expected), (other, found) = results
    assert float(abs(other - loss)) < 1e-5
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-8, name


def test_with_free_weights_most_is_lost() -> None:
    stages = stages_of("gpt2", 2)
    _, lost = through(stages, hooks_of(stages, "subspace-free(8)"), cut=True)
    assert lost[0] > 0.3


def test_dropout_of_hidden_states_is_an_error() -> None:
    stages = stages_of("gpt2", 2, dropout=0.1)
    stages[0].draw(0, 0)
    stages[0].train()
    with pytest.raises(SpecError, match="dropout"):
        through(stages, hooks_of(stages, "subspace(8)"), cut=True)


def test_boundaries_of_a_model_share_one_subspace() -> None:
    stages = stages_of("gpt2", 3)
    hooks_of(stages, "subspace(8)")
    other: Any = make("subspace(4)", Context(3, 1, "forward"))
    with pytest.raises(SpecError, match="share one subspace"):
        other.hook(stages[1], "upstream")


def test_a_model_that_cannot_be_constrained_is_an_error() -> None:
    codec: Any = make("subspace", FORWARD)
    with pytest.raises(SpecError, match="no writers"):
        codec.hook(torch.nn.Linear(2, 2), "downstream")


def test_row_wise_second_moments_keep_an_update_in_the_span_and_element_wise_ones_do_not() -> None:
    basis = bases.drawn("test", 24, 3)
    shares = []
    for rowwise in (True, False):
        weight = torch.nn.Parameter(bases.normal("w", 40, 3) @ basis.T)
        steps: Any = RowwiseAdamW({weight: -1}, SPEC) if rowwise else torch.optim.AdamW([weight], lr=0.01)
        for step in range(50):
            weight.grad = bases.normal(f"g {step}", 40, 3) @ basis.T
            steps.step(0.01) if rowwise else steps.step()
        shares.append(constrained_stage.outside(weight, basis))
    assert shares[0] < 1e-5
    assert shares[1] > 1e-2


def test_row_wise_adamw_is_adamw_where_a_row_has_one_value() -> None:
    one, two = (torch.nn.Parameter(bases.normal("w", 30, 1)) for _ in range(2))
    ours = RowwiseAdamW({one: -1}, SPEC)
    theirs = torch.optim.AdamW([two], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(20):
        one.grad = bases.normal(f"g {step}", 30, 1)
        two.grad = one.grad.clone()
        ours.step(0.01)
        theirs.step()
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ bases
@given(width=st.integers(1, 40), share=st.floats(0.02, 1), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_bases_are_orthonormal_and_the_same_every_time(width: int, share: float, seed: int) -> None:
    rank = bases.rank_of(width, 1 / share)
    assert 1 <= rank <= width
    one = bases.drawn(f"{seed}", width, rank)
    assert torch.equal(one, bases.drawn(f"{seed}", width, rank))
    assert torch.allclose(one.T @ one, torch.eye(rank), atol=1e-5)
    noisy = one + 0.05 * bases.normal(f"noise {seed}", width, rank) / width**0.5
    for back in (bases.polar(noisy), bases.orthonormal(noisy)):
        assert torch.allclose(back.T @ back, torch.eye(rank), atol=1e-5)
    # The polar factor is the nearest of all: no other may be nearer, not even the basis that the noise was put on.
    assert (bases.polar(noisy) - noisy).norm() <= (one - noisy).norm() + 1e-5


def test_keyed_normal_numbers_are_normal() -> None:
    drawn = bases.normal("law", 100_000).double()
    assert abs(float(drawn.mean())) < 5 / 100_000**0.5
    assert abs(float(drawn.var()) - 1) < 5 * (2 / 100_000) ** 0.5
    assert abs(float((drawn.abs() < 1).double().mean()) - 0.6827) < 0.01
    assert not torch.equal(bases.normal("law", 8), bases.normal("other", 8))


def test_a_grassmann_step_lowers_what_lies_outside_and_a_rate_of_nothing_is_none() -> None:
    wanted = bases.drawn("wanted", 32, 4)
    gradients = bases.normal("g", 200, 4) @ wanted.T + 0.05 * bases.normal("noise", 200, 32)
    basis = bases.drawn("start", 32, 4)
    lost = [float((gradients - gradients @ basis @ basis.T).square().sum())]
    for _ in range(60):
        sampled = gradients.T @ (gradients @ basis)
        assert torch.allclose(subspace.moved(basis, sampled, 0.0), basis, atol=1e-6)
        basis = subspace.moved(basis, sampled, 0.3)
        lost.append(float((gradients - gradients @ basis @ basis.T).square().sum()))
    assert all(after <= before * (1 + 1e-6) for before, after in itertools.pairwise(lost))
    assert lost[-1] < lost[0] / 10


# ------------------------------------------------------------------ bytes
@pytest.mark.parametrize(("width", "rank", "with_ids", "id_bytes"), [(1024, 160, 322, 2), (4096, 40, 84, 4)])
def test_bytes_of_the_published_table(width: int, rank: int, with_ids: int, id_bytes: int) -> None:
    """322 and 84 bytes a token, of which 2 and 4 are the token's id, which here follows from the order of the data."""
    tokens = 64
    assert bases.rank_of(width, width / rank) == rank
    codec = make(f"subspace({width / rank})", FORWARD)
    payload = codec.encode(torch.zeros(1, tokens, rank), KEY)
    assert len(payload) == 16 + tokens * (with_ids - id_bytes)
    spec = parse_codec(f"subspace({width / rank})")
    assert spec.nominal_bits == pytest.approx(8 * (with_ids - id_bytes) / width)


# ------------------------------------------------------------------ what is carried
def moving_ends() -> tuple[Any, Any]:
    """The gradients' codec at the last stage, and at the stage before it, paired with hooks."""
    stages = stages_of("gpt2", 2)
    ends = []
    for stage, side in ((stages[1], "upstream"), (stages[0], "downstream")):
        forward, backward = (make("subspace(8, grassmann)", context) for context in (FORWARD, BACKWARD))
        assert isinstance(forward, Subspace)
        assert isinstance(backward, Carrying)
        backward.pair(forward)
        forward.hook(stage, side)  # type: ignore[arg-type]
        ends.append(backward)
    return ends[0], ends[1]


def test_a_basis_is_carried_once_and_hostile_ones_are_refused() -> None:
    sender, receiver = moving_ends()
    stage: ConstrainedStage = sender._matrix._stage
    new = bases.drawn("another", 64, 8).to(torch.bfloat16)
    gradient = torch.randn(2, 16, 8)
    plain = bytes(sender.encode(gradient, KEY))
    stage.coming = new
    carrying, after = bytes(sender.encode(gradient, KEY)), bytes(sender.encode(gradient, KEY))
    assert len(carrying) == len(plain) + 2 * new.numel()
    assert after == plain
    broken = [carrying[:20], carrying[:-1], carrying + b"\0", b"\x50\x02\0\0" + carrying[4:], b"\x50\x01" + plain[2:]]
    broken += [carrying[:4] + bytes(2 * new.numel()) + carrying[4 + 2 * new.numel() :]]  # no basis
    broken += [carrying[:4] + b"\x80\x7f" + carrying[6:]]  # infinity
    received: ConstrainedStage = receiver._matrix._stage
    for payload in broken:
        with pytest.raises(CodecError):
            receiver.decode(payload, KEY)
        assert received.coming is None
    assert torch.equal(receiver.decode(carrying, KEY), receiver.decode(plain, KEY))
    assert received.coming is not None
    assert torch.equal(received.coming, new)
    fresh = make("subspace(8, grassmann)", BACKWARD)
    with pytest.raises(CodecError, match="waits"):
        fresh.decode(carrying, KEY)
    before = received.basis.clone()
    received.change_over()
    stage.passed_on = True
    stage.change_over()
    assert torch.equal(received.basis, stage.basis)
    assert not torch.equal(received.basis, before)


@pytest.mark.slow
def test_the_wide_model_learns_as_many_parameters_through_40_channels_as_the_plain_one_does() -> None:
    """What experiments/protocol_nanogpt compares."""
    plain, wide = (stages_of("gpt2", 4, model=model) for model in ("gpt2-mini", "gpt2-mini-wide"))
    hooks = hooks_of(wide, "subspace(6.4, reparametrised)")
    assert {hook.agreed()["basis"].shape for pair in hooks for hook in pair} == {(256, 40)}
    learned = [sum(part.numel() for stage in stages for part in stage.parameters()) for stages in (plain, wide)]
    assert learned[1] == pytest.approx(learned[0], rel=0.001)
