"""Matrices that workers train in two small bases: the laws, and their training, trace and ideal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import Parameter

from testbed.metrics.links import Pipes
from testbed.nodes import low_rank
from testbed.nodes.fragments import low_rank_shapes, sent_shapes
from testbed.nodes.low_rank import Cores, _Matrix
from testbed.nodes.optimise import Optimiser
from testbed.replay.recorded import records_of
from testbed.replay.workers import job_of
from testbed.spec import DataParallelSpec, LowRankSpec, OuterSpec, Recipe
from testbed.trace.check import check_trace
from tests.small_replicas import EXCHANGES, Learner, a_recipe, cell_of, same, trained
from tests.synthetic import summed
from tests.trace.made_traces import played_over, sent_bytes

OUTER = OuterSpec(learning_rate=0.7, momentum=0.9, nesterov=True)
SPEC = LowRankSpec(rank=4, refresh=2)
FULL = LowRankSpec(rank=64, refresh=2)
SHAPES = [(12, 20), (20,), (30, 3, 4), (4, 40), (5, 5)]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def a_matrix(*shape: int, rank: int, directions: int = 1) -> _Matrix:
    core = [min(rank, side) for side in (shape[0], torch.Size(shape[1:]).numel())]
    return _Matrix(Parameter(torch.zeros(shape)), core, "it", LowRankSpec(rank=rank, refresh=1, directions=directions))


# ---------------------------------------------------------------------- what is sent
def test_a_message_has_cores_and_a_sketch_for_each_basis() -> None:
    each = [low_rank_shapes(shape, SPEC) for shape in SHAPES]
    assert each == [
        [(4, 4), (12, 1), (20, 1)],
        [(20,)],
        [(4, 4), (30, 1), (12, 1)],
        [(4, 4), (40, 1)],
        [(5, 5)],  # 16 + 5 + 5 are no fewer
    ]
    data = a_recipe("all-reduce", low_rank=SPEC).data
    assert data is not None
    assert sent_shapes(SHAPES, data) == [sent[0] for sent in each] + [more for sent in each for more in sent[1:]]
    cores = Cores([Parameter(drawn(*shape)) for shape in SHAPES], SPEC, seed=1)
    cores.project(0)
    message = cores.message([parameter.detach() for parameter in cores.parameters])
    assert [tuple(tensor.shape) for tensor in message] == sent_shapes(SHAPES, data)


@pytest.mark.parametrize("shape", [(12, 20), (30, 3, 4), (4, 40), (40, 4)])
def test_a_core_is_the_value_itself_inside_the_bases_and_the_nearest_one_elsewhere(shape: tuple[int, ...]) -> None:
    matrix, core, other = a_matrix(*shape, rank=4), drawn(4, 4), drawn(*shape)
    torch.testing.assert_close(matrix.inside(matrix.outside(core)), core)
    left = other - matrix.outside(matrix.inside(other))
    torch.testing.assert_close(matrix.inside(left), torch.zeros(4, 4), rtol=0, atol=1e-5)


def test_the_sum_of_messages_is_the_message_of_the_sum() -> None:
    matrix, parts = a_matrix(12, 20, rank=4, directions=3), [drawn(12, 20, seed=seed) for seed in range(3)]
    total = torch.stack(parts).sum(0)
    torch.testing.assert_close(sum(map(matrix.inside, parts)), matrix.inside(total))
    for number, sketch in enumerate(matrix.sketches(total, 7)):
        torch.testing.assert_close(sum(matrix.sketches(part, 7)[number] for part in parts), sketch)


# ---------------------------------------------------------------------- bases
@pytest.mark.parametrize("directions", [1, 4])
def test_new_bases_hold_gradients_of_that_rank_completely(directions: int) -> None:
    matrix, gradient = a_matrix(30, 50, rank=4, directions=directions), drawn(30, 3) @ drawn(3, 50)
    for step in range(4 // directions):
        matrix.remember(matrix.sketches(gradient, step))
    matrix.renew()
    torch.testing.assert_close(matrix.outside(matrix.inside(gradient)), gradient, rtol=1e-3, atol=1e-3)


def test_bases_stay_orthonormal_even_after_sketches_of_nothing() -> None:
    matrix = a_matrix(9, 7, rank=3, directions=2)
    for step, gradient in enumerate([torch.zeros(9, 7), drawn(9, 1) @ drawn(1, 7), drawn(9, 7)]):
        matrix.remember(matrix.sketches(gradient, step))
        matrix.renew()
        for basis in matrix._bases.values():
            torch.testing.assert_close(basis.T @ basis, torch.eye(3), rtol=0, atol=1e-5)


def test_a_basis_of_the_same_space_does_not_turn() -> None:
    """So moments, which are coordinates, keep their meaning."""
    matrix = a_matrix(9, 7, rank=3, directions=6)
    before = {side: basis.clone() for side, basis in matrix._bases.items()}
    inside = matrix.outside(drawn(3, 3))
    matrix.remember(matrix.sketches(inside, 0))
    matrix.renew()
    for side, basis in before.items():
        torch.testing.assert_close(matrix._bases[side], basis, rtol=0, atol=1e-4)


# ---------------------------------------------------------------------- training
@pytest.mark.parametrize("local", [{}, {"local_steps": 2, "outer": OUTER}], ids=["gradients", "changes"])
def test_with_full_rank_it_is_the_same_training(local: dict[str, Any]) -> None:
    whole, plain = (trained(a_recipe("all-reduce", low_rank=spec, **local)) for spec in (FULL, None))
    assert same(whole.weights(), plain.weights())


def test_adam_in_complete_bases_is_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the identity, for which nothing is saved, so workers would send the tensors themselves."""

    def all_of(shape: torch.Size, spec: LowRankSpec) -> list[tuple[int, ...]]:
        return [tuple(shape), (), ()] if len(shape) > 1 else [tuple(shape)]

    plain = trained(a_recipe("all-reduce"))
    monkeypatch.setattr(low_rank, "low_rank_shapes", all_of)
    cores = trained(a_recipe("all-reduce", low_rank=FULL))
    assert all(each._cores is not None and len(each._cores._matrices) == 2 for each in cores.workers)
    for ours, theirs in zip(cores.weights(), plain.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("local", [{}, {"local_steps": 2, "outer": OUTER}], ids=["gradients", "changes"])
def test_all_workers_stay_alike_and_send_less(exchange: Any, local: dict[str, Any]) -> None:
    few, whole = (trained(a_recipe(exchange, low_rank=spec, **local)) for spec in (SPEC, None))
    assert all(same(few.weights(0), few.weights(worker)) for worker in range(1, 4))
    sent, dense = (sum(frame.payload_bytes for frame in done.records[0][2].sent) for done in (few, whole))
    assert sent < 0.25 * dense


@pytest.mark.parametrize("local", [{}, {"local_steps": 3, "outer": OUTER}], ids=["gradients", "changes"])
def test_between_new_bases_a_matrix_moves_inside_the_old_ones(local: dict[str, Any]) -> None:
    first = Learner([1], 0).parameters[0].detach()
    for steps, rank in ((3, 3), (6, 6)):
        done = trained(a_recipe("all-reduce", steps=steps, low_rank=LowRankSpec(rank=3, refresh=3), **local))
        assert torch.linalg.matrix_rank(done.weights()[0] - first, rtol=1e-4) == rank


def test_it_finds_a_matrix_of_that_rank() -> None:
    weight, wanted = Parameter(torch.zeros(40, 30)), drawn(40, 3) @ drawn(3, 30, seed=2)
    cores = Cores([weight], LowRankSpec(rank=4, refresh=4), seed=1)
    optimiser = Optimiser(cores.parameters, a_recipe(workers=2).optimiser)
    for step in range(400):
        weight.grad = weight.detach() - wanted
        cores.project(step)
        (cores.parameters[0].grad,) = cores.receive(cores.message(optimiser.message()))
        optimiser.update(1e-9, 0.3 if step < 200 else 0.03)
        cores.lift(0.0)
        cores.applied(step)
    assert (weight.detach() - wanted).norm() < 0.02 * wanted.norm()


def test_weights_decay_outside_the_bases_too() -> None:
    parameter = Parameter(drawn(12, 20))
    cores, before = Cores([parameter], SPEC, seed=1), parameter.detach().clone()
    cores.lift(0.1)
    torch.testing.assert_close(parameter.detach(), 0.9 * before)


@pytest.mark.parametrize(
    "changes",
    [
        {"staleness": 1},
        {"exchange": "pairs", "outer": OUTER},
        {"exchange": "all-reduce", "aligned": {"share": 0.5}},
        {"outer": OUTER, "streaming": {"fragments": 2}},
    ],
    ids=str,
)
def test_bases_that_workers_would_not_share_are_refused(changes: dict[str, Any]) -> None:
    stated = {"workers": 2, "exchange": "all-to-all", "staleness": 0, "local_steps": 1}
    with pytest.raises(ValidationError, match="low_rank needs bases that all workers share"):
        DataParallelSpec.model_validate({**stated, "low_rank": SPEC, **changes})


@pytest.mark.parametrize("changes", [{"rank": 0}, {"refresh": 0}, {"directions": 0}], ids=str)
def test_bases_of_nothing_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        LowRankSpec.model_validate({**dict(SPEC), **changes})


# ---------------------------------------------------------------------- all follow the one program
JOBS = {
    "gradients": a_recipe("all-reduce", low_rank=SPEC),
    "changes": a_recipe("star", low_rank=SPEC, local_steps=2, outer=OUTER),
}


@pytest.mark.parametrize("recipe", JOBS.values(), ids=JOBS)
def test_a_trace_has_its_messages_and_its_ideal_is_what_is_played_over_ideal_links(recipe: Recipe) -> None:
    cell, training = cell_of(recipe), trained(recipe).records
    job = job_of(cell, training)
    trace = job.trace()
    check_trace(trace, "it")
    for node, records in enumerate(training):
        assert sent_bytes(trace, node) == [frame.frame_bytes for record in records for frame in record.sent]
    played = played_over(trace, Pipes(cell.topology, cell.links, cell.nodes))
    summary = summed(cell, records_of(cell, job, trace, played, training), steady=(2, 1))
    assert summary.ideal_step_s == pytest.approx(summary.step_s, rel=1e-9)
