"""Jobs whose process groups are coded: bit for bit as played cells, and with codecs that lose nothing as without."""

from __future__ import annotations

import contextlib
import io
import math
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import testbed.torch
from testbed.codecs.contract import Context
from testbed.codecs.make import make
from testbed.commands import execute
from testbed.errors import CodecError, SpecError, UnknownNameError, UserError
from testbed.jobs.kind import Setting
from testbed.message_key import MessageKey
from testbed.nodes.bucket import Bucket
from testbed.nodes.optimise import Optimiser, learning_rate
from testbed.records import StepRecord
from testbed.runtime.gather import global_norm
from testbed.spec import PipelineSpec, Recipe
from testbed.torch import coded, steps
from testbed.torch.coded import OPERATIONS, parse_group_codecs
from testbed.training.alone import train_together
from testbed.training.stages import PipelineTraining
from tests.small_replicas import TEXT, Data, Net, a_recipe, same
from tests.torch_codecs.ranks import in_processes

STEPS, PARTS, VOCABULARY = 10, 4, 96


# ---------------------------------------------------------------------- texts
CODECS = st.sampled_from(["int8", "ef(topk(0.01))", "int4(group=64)", "testbed.codecs.dense.cast:Fp32()", "zstd(bf16)"])


@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), CODECS, CODECS), min_size=1, max_size=4, unique_by=lambda r: r[0]),
    st.sampled_from(["", " ", "  "]),
)
def test_a_text_is_read_as_it_was_meant_and_its_canonical_form_means_the_same(rules: Any, blank: str) -> None:
    both = [(name, one, other if name == "p2p" else one) for name, one, other in rules]
    text = f"{blank};{blank}".join(
        f"{name}{blank}:{blank}{one}" if one == other else f"{name}:{blank}fwd={one},{blank}bwd={other}"
        for name, one, other in both
    )
    codecs = parse_group_codecs(text)
    assert {name: (pair.forward.name, pair.backward.name) for name, pair in codecs.pairs.items()} == {
        name: (_name(one), _name(other)) for name, one, other in both
    }
    assert parse_group_codecs(codecs.text) == codecs


def _name(text: str) -> str:
    return text.partition("(")[0]


def test_the_command_line_knows_its_operations() -> None:
    assert execute.CODED == OPERATIONS


@given(st.text(alphabet=string.ascii_lowercase + "0123456789_:;=(), .", max_size=40))
def test_any_other_text_is_an_error_of_the_user(text: str) -> None:
    with contextlib.suppress(UserError):
        parse_group_codecs(text)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("int8", SpecError, r"'int8' is no rule; write OPERATION: CODEC, as in 'p2p: int8'"),
        ("allreduce: int8", UnknownNameError, "did you mean 'all_reduce'"),
        ("p2p: int9", UnknownNameError, "did you mean 'int8'"),
        ("p2p: int8; p2p: int4", SpecError, "there are two rules for p2p"),
        ("all_reduce: fwd=int8, bwd=int4", SpecError, "all_reduce has one direction"),
        ("p2p: 0: int8", SpecError, "p2p has no boundaries to number"),
        ("p2p: bottleneck(4)", SpecError, "bottleneck goes by activations, by the model"),
        ("all_reduce: topk-shared(0.1)", SpecError, "topk-shared goes by activations"),
        ("p2p: int8;", SpecError, "'' is no rule"),
    ],
)
def test_mistakes_in_a_text_are_named(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_group_codecs(text)


# ---------------------------------------------------------------------- pipelines
def pipelined(recipe: Recipe, tokens: str) -> dict[str, Any]:
    """Train the stages of a recipe with torch's pipelining, in a group that is coded."""
    training, stage = PipelineTraining(Setting(recipe, VOCABULARY, tokens)), dist.get_rank()
    model, data = training.load(stage)
    model.train()
    optimiser = Optimiser(model.parameters(), recipe.optimiser)
    schedule = Schedule1F1B(
        PipelineStage(model, stage, recipe.pipeline.stages, torch.device("cpu")),
        PARTS,
        loss_fn=lambda outputs, targets: model.loss(outputs, targets) / PARTS,
        scale_grads=False,
    )
    losses = []
    for step in range(recipe.training.steps):
        parts = [data.train(step, part, PARTS) for part in range(PARTS)]
        of_parts: list[torch.Tensor] = []
        if stage == 0:
            schedule.step(torch.cat([part.inputs for part in parts]))
        elif stage < recipe.pipeline.stages - 1:
            schedule.step()
        else:
            schedule.step(target=torch.cat([part.targets for part in parts]), losses=of_parts)
            losses.append(math.fsum(loss.item() * PARTS for loss in of_parts) / PARTS)
        squares: list[list[float]] = [[] for _ in range(recipe.pipeline.stages)]
        dist.all_gather_object(squares, optimiser.squares())
        rate = learning_rate(recipe.optimiser, step, recipe.training.steps)
        optimiser.update(global_norm([square for each in squares for square in each]), rate)
    return {"losses": losses, "weights": [parameter.detach() for parameter in model.parameters()]}


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tokens.npy"
    np.save(path, np.random.default_rng(1).integers(0, VOCABULARY, 20_000, dtype=np.uint16))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "stages"),
    [
        ("fp32", 2),
        ("int8", 3),
        ("fwd=int4(64), bwd=ef(topk(0.1))", 2),
        ("delta-int8", 2),
        ("zstd(int8)", 3),
        ("topk-shared(0.1)", 2),
    ],
)
def test_pipelining_has_a_played_cells_losses(codec: str, stages: int, tokens: str, one_thread: None) -> None:
    recipe = a_recipe(steps=STEPS).model_copy(
        update={
            "codec": codec,
            "data": None,
            "workload": TEXT.model_copy(update={"sequence_length": 16}),
            "pipeline": PipelineSpec(stages=stages, microbatches=PARTS, schedule="1f1b", in_flight=stages),
        }
    )
    outputs = [io.StringIO() for _ in range(stages)]
    train_together(PipelineTraining(Setting(recipe, VOCABULARY, tokens)), outputs)
    records = [StepRecord.model_validate_json(line) for line in outputs[-1].getvalue().splitlines()]
    played = [record for record in records if record.phase == "train"]
    folder, codecs = tokens + "-ranks", f"p2p: {codec}"
    ours = in_processes(pipelined, Path(folder), recipe, tokens, ranks=stages, codecs=codecs)
    assert ours[-1]["losses"] == [record.loss for record in played]
    assert len(set(ours[-1]["losses"])) == STEPS


# ---------------------------------------------------------------------- collectives
SIZE = 2000


def drawn(rank: int, step: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(10 * step + rank))


def collectives(first: int = 0, until: int = STEPS, saved: Any = None) -> dict[str, Any]:
    """Do one of each in every step; in the second form of each, the tensors are coded too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if saved is not None:
        coded.load_state_dict(saved[rank])
        for group, state in coded.state_dict().items():  # a checkpoint before anything was used
            assert all(
                state[kind].keys() == saved[rank][group][kind].keys() != set() for kind in ("peers", "exchanges")
            )
    done = []
    for step in range(first, until):
        own = drawn(rank, step)
        summed, again = own.clone(), own.clone()
        dist.all_reduce(summed)
        dist.all_reduce(again, async_op=True).wait()
        gathered = [torch.empty(SIZE) for _ in range(ranks)]
        dist.all_gather(gathered, own)
        flat, part = torch.empty(SIZE * ranks), torch.empty(SIZE)
        dist.all_gather_single(flat, own)
        dist.reduce_scatter_single(part, torch.cat([drawn(rank, 100 * p + step) for p in range(ranks)]))
        got = torch.empty(SIZE)
        works = [dist.isend(own, (rank + 1) % ranks), dist.irecv(got, (rank - 1) % ranks)]
        [work.wait() for work in works]
        done.append([summed, again, torch.cat(gathered), flat, part, got])
        testbed.torch.step()
    return {"done": done, "state": coded.state_dict()}


CODED = "p2p: delta(int8); all_reduce: ef(topk(0.05)); all_gather: int4(64); reduce_scatter: ef(zstd(int8(group=64)))"


def in_two_runs() -> list[Any]:
    before = collectives(until=4)
    torch.save(before["state"], f"state-{dist.get_rank()}.pt")
    return before["done"]


def second_run() -> list[Any]:
    saved = {dist.get_rank(): torch.load(f"state-{dist.get_rank()}.pt", weights_only=True)}
    return collectives(first=4, saved=saved)["done"]


@pytest.mark.slow
def test_collectives_are_those_of_the_codecs_and_go_on_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.chdir(tmp_path)
    straight = [each["done"] for each in in_processes(collectives, tmp_path / "one", codecs=CODED)]
    before = in_processes(in_two_runs, tmp_path / "two", codecs=CODED)
    after = in_processes(second_run, tmp_path / "three", codecs=CODED)
    for rank in range(2):
        for ours, theirs in zip(straight[rank], before[rank] + after[rank], strict=True):
            assert same(ours, theirs)
    _check_against_buckets(straight)


def _check_against_buckets(done: list[Any]) -> None:
    """Each codec's messages, made and taken by buckets and by codecs alone."""

    def ends(codec: str, sender: int, direction: Any = "backward") -> list[Bucket]:
        return [Bucket([(SIZE,)], codec, seed=3, sender=sender, direction=direction) for _ in range(2)]

    def cross(pair: list[Bucket], value: torch.Tensor, step: int) -> torch.Tensor:
        return pair[1].decode(pair[0].encode([value], step), step)[0]

    reduced = [[ends("ef(topk(0.05))", 2 * number + rank) for rank in range(2)] for number in range(2)]
    gathered = [[ends("int4(64)", 2 * number + rank, "forward") for rank in range(2)] for number in range(2)]
    scattered = [[ends("ef(zstd(int8(group=64)))", 3 * owner + rank) for rank in range(2)] for owner in range(2)]
    ways = [Context(3, 0, "forward"), Context(3, 0, "backward")]
    sent = [[make("delta(int8)", way) for _ in range(2)] for way in ways]
    for step in range(STEPS):
        own = [drawn(rank, step) for rank in range(2)]
        sums = [cross(pairs[0], own[0], step) + cross(pairs[1], own[1], step) for pairs in reduced]
        gathers = [torch.cat([cross(pairs[rank], own[rank], step) for rank in range(2)]) for pairs in gathered]
        key = MessageKey("train", step, 0, ())
        for rank in range(2):
            of_mine = [cross(scattered[rank][r], drawn(r, 100 * rank + step), step) for r in range(2)]
            encoder, decoder = sent[1 - rank]
            got = decoder.decode(encoder.encode(own[1 - rank], key), key)
            assert same(done[rank][step], [*sums, *gathers, of_mine[0] + of_mine[1], got])


def left_alone() -> list[torch.Tensor]:
    rank = dist.get_rank()
    done = []
    for tensor in (torch.arange(4000) + rank, torch.full((100,), rank + 0.1), drawn(rank, 0).double()):
        dist.all_reduce(tensor)
        done.append(tensor)
    largest, whole = drawn(rank, 0), drawn(rank, 0)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.broadcast(whole, 0)
    functional_sum = functional.all_reduce(drawn(rank, 0), "sum", dist.group.WORLD) + 0
    small, large = functional.all_reduce_coalesced([drawn(rank, 0)[:100], drawn(rank, 0)], "sum", dist.group.WORLD)
    return [*done, largest, whole, small + 0, large + 0, functional_sum]


@pytest.mark.slow
def test_only_large_tensors_of_floats_that_are_added_are_coded(tmp_path: Path, one_thread: None) -> None:
    plain = in_processes(left_alone, tmp_path / "plain")
    ours = in_processes(left_alone, tmp_path / "coded", codecs="p2p: int8; all_reduce: topk(0.1)")
    for one, other in zip(plain, ours, strict=True):
        assert same(one[:-1], other[:-1])
        assert 0.1 < (other[-1] != 0).float().mean() < 0.21


def own_reducer() -> dict[str, Any]:
    net, data = Net(), Data()
    ddp = DistributedDataParallel(net.layers)
    optimiser = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(STEPS):
        batch = data.train(step, dist.get_rank(), dist.get_world_size())
        optimiser.zero_grad()
        net.loss(ddp(batch.inputs), batch.targets).backward()
        optimiser.step()
    return {"weights": [parameter.detach() for parameter in net.parameters()], "state": coded.state_dict()}


@pytest.mark.slow
def test_what_ddps_own_reducer_sends_is_coded(tmp_path: Path, one_thread: None) -> None:
    plain = in_processes(own_reducer, tmp_path / "plain")
    fp32, sparse = (
        in_processes(own_reducer, tmp_path / name, codecs=f"all_reduce: {codec}")
        for name, codec in (("fp32", "fp32"), ("sparse", "ef(topk(0.05))"))
    )
    assert same(plain[0]["weights"], fp32[0]["weights"])  # a + b is b + a, and halves are exact
    assert same(sparse[0]["weights"], sparse[1]["weights"])
    assert not same(sparse[0]["weights"], plain[0]["weights"])
    (state,) = sparse[0]["state"].values()
    assert state["positions"]["all_reduce"] == STEPS


def tagged(posted: list[int]) -> list[torch.Tensor]:
    """Send tensors with the tags 0, 1, 2 twice, in two steps; receive them in the order of `posted`."""
    rank, received = dist.get_rank(), []
    for step in range(2):
        if rank == 0:
            works = [dist.isend(drawn(tag, step), 1, tag=tag) for tag in range(3)]
        else:
            got = {tag: torch.empty(SIZE) for tag in range(3)}
            works = [dist.irecv(got[tag], 0, tag=tag) for tag in posted]
            received += [*got.values()]
        [work.wait() for work in works]
        testbed.torch.step()
    return received


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["randk(0.1)", "delta(int8)", "zstd(mask(0.1))"])
def test_messages_of_several_tags_may_be_received_in_any_order(codec: str, tmp_path: Path, one_thread: None) -> None:
    in_order, other = (
        in_processes(tagged, tmp_path / str(posted[0]), posted, codecs=f"p2p: {codec}")
        for posted in ([0, 1, 2], [2, 0, 1])
    )
    assert len(in_order[1]) == 6
    assert same(in_order[1], other[1])


def by_functions() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gather and scatter a tensor by functional collectives, and by the others."""
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    gathered, part = torch.empty(SIZE * ranks), torch.empty(SIZE)
    parts = torch.cat([drawn(rank, 100 * each) for each in range(ranks)])
    ours = [
        functional.all_gather_tensor(drawn(rank, 0), 0, group) + 0,
        functional.reduce_scatter_tensor(parts, "sum", 0, group) + 0,
    ]
    testbed.torch.step()
    dist.all_gather_single(gathered, drawn(rank, 0))
    dist.reduce_scatter_single(part, parts)
    return [*zip(ours, [gathered, part], strict=True)]


@pytest.mark.slow
def test_functional_collectives_of_one_tensor_are_coded(tmp_path: Path, one_thread: None) -> None:
    codecs = "all_gather: topk(0.1); reduce_scatter: topk(0.1)"
    for pairs in in_processes(by_functions, tmp_path / "functions", codecs=codecs):
        for ours, theirs in pairs:
            assert same([ours], [theirs])
            assert 0 < (ours != 0).float().mean() < 0.21


def of_several() -> list[torch.Tensor]:
    pair = [drawn(dist.get_rank(), step) for step in range(2)]
    dist.group.WORLD.allreduce(pair).wait()  # type: ignore[union-attr, call-overload]
    return pair


@pytest.mark.slow
def test_calls_with_several_tensors_are_unchanged(tmp_path: Path, one_thread: None) -> None:
    plain = in_processes(of_several, tmp_path / "plain")
    ours = in_processes(of_several, tmp_path / "coded", codecs="all_reduce: topk(0.1)")
    assert same(plain[0], ours[0])


# ---------------------------------------------------------------------- FSDP2
def sharded(codecs: str | None, runs: int = 1) -> list[Any]:
    """Train in so many runs, each in a new model that goes on from what torch.save wrote."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    data, saved, state = Data(), None, None
    for run in range(runs):
        net = Net()
        for layer in net.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        if saved is not None:
            net.load_state_dict(saved)
        codes = None if codecs is None else testbed.torch.code_fsdp(net, codecs, seed=3)
        if codes is not None and state is not None:
            codes.load_state_dict(state)
        optimiser = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(run * STEPS // runs, (run + 1) * STEPS // runs):
            batch = data.train(step, dist.get_rank(), dist.get_world_size())
            optimiser.zero_grad()
            net.loss(net.layers(batch.inputs), batch.targets).backward()
            optimiser.step()
        saved = {name: value.clone() for name, value in net.state_dict().items()}
        if codes is not None:
            torch.save(codes.state_dict(), file := f"fsdp-{dist.get_rank()}.pt")
            state = torch.load(file, weights_only=True)
    return [parameter.full_tensor().detach() for parameter in net.parameters()]


@pytest.mark.slow
def test_fsdp2_with_fp32_is_fsdp2_and_a_codec_goes_on_from_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    monkeypatch.chdir(tmp_path)
    plain = in_processes(sharded, tmp_path / "plain", None)
    fp32 = in_processes(sharded, tmp_path / "fp32", "all_gather: fp32; reduce_scatter: fp32")
    assert same(plain[0], fp32[0])
    codecs = "all_gather: int8(group=64); reduce_scatter: ef(topk(0.1))"
    straight = in_processes(sharded, tmp_path / "straight", codecs)
    resumed = in_processes(sharded, tmp_path / "resumed", codecs, 2)
    assert same(straight[0], resumed[0])
    assert not same(straight[0], plain[0])


def fsdp_mistakes() -> list[str]:
    said = []
    for shard, text in ((False, "all_gather: int8"), (True, "p2p: int8")):
        layer = torch.nn.Linear(64, 64)
        if shard:
            fully_shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        try:
            testbed.torch.code_fsdp(layer, text)
        except SpecError as error:
            said.append(str(error))
    return said


def test_mistakes_with_fsdp2_are_named(tmp_path: Path) -> None:
    assert in_processes(fsdp_mistakes, tmp_path / "fsdp", ranks=1)[0] == [
        "no module of the model is sharded; call fully_shard first",
        "codecs 'p2p: int8': FSDP2 gathers and scatters; it has no p2p",
    ]


# ---------------------------------------------------------------------- steps and mistakes
def test_a_position_counts_messages_by_step_and_says_where_steps_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    position = steps.Position()
    assert [position.advance(), position.advance()] == [(0, 0), (0, 1)]
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1).step()
    testbed.torch.step()
    assert position.steps == 1
    assert [position.advance(), position.advance()] == [(1, 0), (1, 1)]
    monkeypatch.setattr(steps, "MOST", 2)
    with pytest.raises(CodecError, match=r"call testbed.torch.step\(\) at the end of each step"):
        position.advance()


def from_anybody() -> str:
    try:
        dist.recv(torch.empty(SIZE))
    except SpecError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_coded_message_has_a_sender(tmp_path: Path) -> None:
    (said,) = in_processes(from_anybody, tmp_path / "any", ranks=1, codecs="p2p: int8")
    assert said == "cannot decode a message from any rank, as its codec depends on the sender; name the rank"
