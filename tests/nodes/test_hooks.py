"""Codecs that change the model, in stages of a real one in threads over loopback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from testbed.codecs.catalogue import placement
from testbed.codecs.catalogue import table as codecs
from testbed.codecs.contract import Codec, Context
from testbed.codecs.in_model.constrained_stage import outside
from testbed.codecs.in_model.subspace import Subspace, SubspaceHook
from testbed.codecs.make import make
from testbed.errors import SpecError
from testbed.spec import Cell
from tests.nodes.test_stage import TOKENS, Result, ToyBatch, ToyData, train
from tests.training.test_alone import a_tiny_cell, model_of

CODECS = [
    "subspace(4, fp32)",
    "subspace(4, reparametrised)",
    "subspace(4, grassmann, every=16)",
    "subspace-free",
    "mapl(4)",
    "bottleneck(4)",
    "bottleneck(4, maxout, inner=bf16)",
    "autoencoder(4)",
    "resbm(4)",
    "fwd=autoencoder(4), bwd=int8",
]
WIDTH = 32
pytestmark = pytest.mark.usefixtures("one_thread", "tiny_models")


def cell_of(stages: int, **changes: Any) -> Cell:
    cell = a_tiny_cell(stages, **{"steps": 6, **changes})
    return cell.model_copy(update={"optimiser": cell.optimiser.model_copy(update={"clip_norm": 1.0})})


class Counting(ToyData):
    """Text in which each token is the one before and 3: something to learn."""

    def train(self, step: int, microbatch: int, microbatches: int) -> ToyBatch:
        drawn = super().train(step, microbatch, microbatches)
        text = (drawn.inputs[:, :1] + 3 * torch.arange(drawn.inputs.shape[1] + 1)) % TOKENS
        return drawn._replace(inputs=text[:, :-1].contiguous(), targets=text[:, 1:].contiguous())


def run(codec: str, cell: Cell, made: list[Codec] | None = None) -> Result:
    def one(context: Context) -> Codec:
        instance = make(codec, context)
        if made is not None:
            made.append(instance)
        return instance

    return train(cell, one, data=lambda stage: Counting(), model=model_of(cell))


def test_every_codec_that_changes_the_model_is_here() -> None:
    """The others train in `test_alone`."""
    named = {
        part.name for text in CODECS for recipe in placement.parse_placement(text).specs() for part in recipe.parts()
    }
    assert {entry.name for entry in codecs.CODECS.values() if entry.hook is not None} <= named


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "family"), [*((codec, "gpt2") for codec in CODECS), *((codec, "llama") for codec in CODECS[:5])]
)
def test_it_learns_over_three_stages(codec: str, family: str) -> None:
    found = run(codec, cell_of(3, family=family, steps=20, evaluate_every=10, evaluate_uncompressed=True))
    assert found.errors == [None] * 3
    losses = [loss for loss in found.losses() if loss is not None]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - (0.05 if "free" in codec else 0.2)
    assert len(found.losses("uncompressed")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["subspace(4)", "subspace(4, reparametrised)"])
def test_layers_that_compute_in_bf16_stay_near_enough_to_the_subspace(codec: str) -> None:
    cell = cell_of(3, steps=12, evaluate_every=0)
    cell = cell.model_copy(update={"workload": cell.workload.model_copy(update={"precision": "bf16"})})
    found = run(codec, cell)
    assert found.errors == [None] * 3
    exact = run(codec, cell_of(3, steps=12, evaluate_every=0))
    assert found.losses() == pytest.approx(exact.losses(), abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_schedule_recomputation_and_uncompressed_evaluations_do_not_touch_the_numbers(codec: str) -> None:
    steps = 18 if "every=16" in codec else 4
    cell = cell_of(3, steps=steps, evaluate_every=0)
    kept = run(codec, cell)
    assert kept.errors == [None] * 3
    hidden = cell.workload.batch_size // 4 * cell.workload.sequence_length * WIDTH
    assert {f.raw_bytes for records in kept.records for record in records for f in record.sent} == {4 * hidden}
    changes = {"schedule": "gpipe", "recompute": True, "evaluate_every": 3, "evaluate_uncompressed": True}
    other = run(codec, cell_of(3, steps=steps, **changes))
    assert other.losses() == kept.losses()
    assert all(torch.equal(a, b) for a, b in zip(other.parameters, kept.parameters, strict=True))


class Whole(Subspace):
    """The same constraint on the model, and hidden states as they are at the boundaries."""

    def hook(self, model: Any, side: Any) -> SubspaceHook:
        hook: Any = super().hook(model, side)
        hook.send = hook.receive = lambda states, ids: states
        return hook  # type: ignore[no-any-return]


@pytest.mark.slow
def test_training_in_the_subspace_is_training_the_constrained_model_without_a_codec() -> None:
    text = "subspace(4, fp32, reparametrised)"
    cell = cell_of(4, steps=8)

    def whole(context: Context) -> Codec:
        return Whole(context, ratio=4, inner=make("fp32", context), keep="reparametrised")

    ours = run(text, cell)
    theirs = train(cell, whole, data=lambda stage: Counting(), model=model_of(cell))
    assert ours.errors == theirs.errors == [None] * 4
    assert ours.losses() == pytest.approx(theirs.losses(), rel=1e-4)
    assert ours.losses()[0] == pytest.approx(theirs.losses()[0], rel=1e-6)
    for found, expected in zip(ours.parameters, theirs.parameters, strict=True):
        # AdamW makes steps of a size out of gradients that are rounding alone; few are
        assert (found - expected).norm() <= 0.02 * expected.norm() + 1e-3
    (sent,) = {frame.payload_bytes for frame in ours.records[0][0].sent}
    (raw,) = {frame.payload_bytes for frame in theirs.records[0][0].sent}
    assert (sent - 16) * 4 == raw - 16


@pytest.mark.slow
def test_the_basis_moves_at_all_stages_alike_and_the_weights_with_it() -> None:
    still = run("subspace(4, grassmann, every=16)", cell_of(4, steps=16, evaluate_every=0))
    found = run("subspace(4, grassmann, every=16)", cell_of(4, steps=18, evaluate_every=0))
    assert found.errors == still.errors == [None] * 4
    first, *others = [model.kept["subspace"].basis for model in found.models]
    assert all(torch.equal(first, other) for other in others)
    assert torch.allclose(first.T @ first, torch.eye(first.shape[1]), atol=1e-6)
    before = still.models[0].kept["subspace"].basis
    assert torch.linalg.matrix_norm(first @ first.T - before @ before.T) > 1e-3
    for model in found.models[:-1]:
        for part in model.writers():
            assert outside(part.module.weight, first) < 1e-5
    # The basis crossed each boundary upstream once, in bf16, and nothing else of the kind ever did.
    for records in found.records[1:]:
        sizes = [
            frame.payload_bytes
            for r in records
            if r.phase == "train"
            for frame in r.sent
            if frame.direction == "backward"
        ]
        plain = min(sizes)
        assert sorted(set(sizes)) == [plain, plain + 2 * first.numel()]
        assert sizes.count(plain + 2 * first.numel()) == 1


def test_mapl_s_ends_hold_the_same_basis_which_costs_its_bytes_once_a_step() -> None:
    made: list[Codec] = []
    found = run("mapl(4, rate=1)", cell_of(2, steps=6, evaluate_every=3), made)
    assert found.errors == [None, None]
    ends = [hook for codec in made if (hook := getattr(codec, "own_matrix", None)) is not None]
    one, other = (end.basis.detach() for end in ends)
    sender = next(end for end in ends if end._sends)
    assert torch.equal(one, other)
    assert torch.allclose(one.T @ one, torch.eye(one.shape[1]), atol=1e-5)
    assert sender._version == 6
    basis_bytes = 2 * one.numel()
    for phase, step, expected in (("train", 0, 0), ("train", 1, 1), ("train", 5, 1), ("evaluation", 3, 1)):
        (record,) = (r for r in found.records[0] if (r.phase, r.step) == (phase, step))
        sizes = [frame.payload_bytes for frame in record.sent]
        assert sum(size - min(sizes) for size in sizes) == expected * basis_bytes
    for record in found.records[1]:
        if record.phase == "train":  # the receiver's part of the gradient, with the last of them
            sizes = [frame.payload_bytes for frame in record.sent]
            assert [size - min(sizes) for size in sizes] == [0, 0, 0, basis_bytes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "stages", "steps", "message"),
    [
        ("fwd=subspace(4, grassmann, every=16), bwd=bf16", 2, 18, "did not cross"),
        ("fwd=mapl(4), bwd=bf16", 2, 2, "did not come back"),
        ("0: int8; rest: subspace", 3, 2, "outside the subspace"),
    ],
)
def test_a_basis_that_gets_lost_and_states_outside_of_it_are_errors(
    codec: str, stages: int, steps: int, message: str
) -> None:
    errors = run(codec, cell_of(stages, steps=steps, evaluate_every=0)).errors
    assert any(isinstance(error, SpecError) and message in str(error) for error in errors), errors


def test_a_model_codec_for_gradients_alone_is_an_error() -> None:
    context = Context(0, 0, "backward")
    for codec in ("fwd=fp32, bwd=subspace", "fwd=int8, bwd=bottleneck"):
        backward: Any = make(codec, context)
        with pytest.raises(SpecError, match="changes the model"):
            backward.pair(make(codec, context._replace(direction="forward")))
