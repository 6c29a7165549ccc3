"""Sums over the ranks of a gloo group are those of a played cell, bit for bit, for every codec they can have."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor

from testbed.codecs.catalogue.table import CODECS
from testbed.errors import CodecError, SpecError, UnknownNameError
from testbed.jobs.actions import Key, Message
from testbed.nodes.bucket import Bucket, weighted_sum
from testbed.nodes.worker_node import ExchangeNode
from testbed.torch.exchanges import Among, CodedGather, CodedScatter, CodedSum, parse_exchanged, sums_by_parts
from tests.small_replicas import a_recipe, same
from tests.torch_codecs.ranks import in_threads

SHAPES = [(48, 32), (7,), (4099,), ()]
STEPS, SEED = 10, 3


def exchangeable(text: str) -> bool:
    try:
        parse_exchanged(text)
    except SpecError:
        return False
    return True


TEXTS = sorted(text for row in CODECS.values() if exchangeable(text := row.example_text))


def gradients(rank: int, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def played(codec: str, ranks: int) -> list[list[Tensor]]:
    """What the workers of a cell make of these, by step."""
    recipe = a_recipe("all-gather", codec, workers=ranks)
    nodes, sums = [ExchangeNode(recipe, place, SHAPES) for place in range(ranks)], []
    for step in range(STEPS):
        keys = [Key("gradient", step, origin=rank) for rank in range(ranks)]
        sent = [
            Message(key, node.encode(key, gradients(key.origin, step)).payload)
            for key, node in zip(keys, nodes, strict=True)
        ]
        every = [node.work("sum", keys[0], node.decode(sent)) for node in nodes]
        assert all(same(every[0], each) for each in every)
        sums.append(every[0])
    return sums


def exchanged(make: Any, ranks: int, numbers: list[int] | None = None) -> list[list[list[Tensor]]]:
    """What `CodedSum`s, or what `make` makes, return: by rank, then by step."""

    def job(group: Any, rank: int) -> list[list[Tensor]]:
        coded, sums = make(rank), []
        for step in range(STEPS):
            given = gradients(rank, step)
            chosen = given if numbers is None else [given[number] for number in numbers]
            sums.append(coded.start(group, chosen, [1 / ranks] * ranks, step, numbers).wait())
        return sums

    return in_threads(job, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", TEXTS)
def test_a_gathered_sum_is_a_played_cells(codec: str, ranks: int, one_thread: None) -> None:
    expected = played(codec, ranks)
    for sums in exchanged(lambda rank: CodedSum(SHAPES, codec, Among(rank, ranks, SEED), exchange="all-gather"), ranks):
        assert all(same(ours, theirs) for ours, theirs in zip(sums, expected, strict=True))


def starred(codec: str, ranks: int) -> list[list[Tensor]]:
    """By step: each part of the tensors is exchanged in a star of its own, whose server answers with the codec."""
    parts = [[t.tensor_split(ranks)[p].shape for t in map(torch.atleast_1d, gradients(0, 0))] for p in range(ranks)]
    ends = [
        [[Bucket(part, codec, seed=SEED, sender=p * (ranks + 1) + s) for s in range(ranks + 1)] for _ in range(2)]
        for p, part in enumerate(parts)
    ]
    sums = []
    for step in range(STEPS):
        split = [[torch.atleast_1d(t).tensor_split(ranks) for t in gradients(rank, step)] for rank in range(ranks)]
        answers = []
        for p, (senders, receivers) in enumerate(ends):
            sent = [senders[rank].encode([each[p] for each in split[rank]], step) for rank in range(ranks)]
            values = [receivers[rank].decode(payload, step) for rank, payload in enumerate(sent)]
            total = weighted_sum(values, [1 / ranks] * ranks)
            answers.append(receivers[ranks].decode(senders[ranks].encode(total, step), step))
        sums.append([torch.cat(each).view(s) for each, s in zip(zip(*answers, strict=True), SHAPES, strict=True)])
    return sums


@pytest.mark.parametrize("codec", ["fp32", "int8", "ef(int4(64))", "zstd(int8)", "topk(0.1)", "delta(int8)"])
def test_a_sum_by_parts_is_a_star_for_each_part(codec: str, one_thread: None) -> None:
    expected = starred(codec, 3)
    for sums in exchanged(lambda rank: CodedSum(SHAPES, codec, Among(rank, 3, SEED), exchange="parts"), 3):
        assert all(same(ours, theirs) for ours, theirs in zip(sums, expected, strict=True))


def test_auto_takes_parts_where_that_sends_less_and_every_value_is_sent() -> None:
    assert [sums_by_parts("int8", ranks) for ranks in (1, 2, 3)] == [False, False, True]
    assert sums_by_parts("hadamard(int8)", 3)
    assert not any(sums_by_parts(text, 8) for text in ("topk(0.1)", "hadamard(topk(0.1))", "ef(int8)", "zstd(int8)"))
    assert sums_by_parts("topk(0.1)", 2, "parts")
    assert not sums_by_parts("int8", 8, "all-gather")


@pytest.mark.parametrize("codec", ["int8", "ef(topk(0.1))", "delta(int8)"])
@pytest.mark.parametrize("exchange", ["all-gather", "parts"])
def test_it_goes_on_from_a_saved_state_with_some_of_the_tensors_in_any_order(
    codec: str, exchange: Any, one_thread: None
) -> None:
    def make(rank: int) -> CodedSum:
        return CodedSum(SHAPES, codec, Among(rank, 2, SEED), exchange=exchange)

    def job(group: Any, rank: int) -> list[list[Tensor]]:
        coded, sums = make(rank), []
        for step in range(STEPS):
            if step == 5:
                file = io.BytesIO()
                torch.save(coded.memory.state(), file)
                file.seek(0)
                coded = make(rank)
                coded.memory.load(torch.load(file, weights_only=True))
            given = gradients(rank, step)
            later = coded.start(group, [given[2]], [0.5, 0.5], step, [2]).wait()
            others = coded.start(group, [given[3], given[0], given[1]], [0.5, 0.5], step, [3, 0, 1]).wait()
            sums.append([others[1], others[2], later[0], others[0]])
        return sums

    straight = exchanged(make, 2)
    for ours, theirs in zip(in_threads(job, 2), straight, strict=True):
        assert all(same(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("codec", ["int8", "ef(topk(0.1))", "zstd(int8)"])
def test_a_rank_gets_its_part_alone(codec: str, one_thread: None) -> None:
    """A reduce-scatter is the first half of a sum by parts."""
    shapes = [[(2000,)], [(1999,)]]

    def job(group: Any, rank: int) -> list[Tensor]:
        coded = CodedScatter(shapes, codec, Among(rank, 2, SEED))
        return [coded.sum(group, _two(rank, step), [0.5, 0.5], step)[0] for step in range(STEPS)]

    ours = in_threads(job, 2)
    for owner in range(2):
        ends = [[Bucket(shapes[owner], codec, seed=SEED, sender=3 * owner + s) for s in range(2)] for _ in range(2)]
        for step in range(STEPS):
            values = [ends[1][s].decode(ends[0][s].encode(_two(s, step)[owner], step), step) for s in range(2)]
            assert same([ours[owner][step]], weighted_sum(values, [0.5, 0.5]))


def _two(rank: int, step: int) -> list[list[Tensor]]:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return [[torch.randn(2000, generator=draw)], [torch.randn(1999, generator=draw)]]


def test_what_cannot_be_exchanged_is_refused() -> None:
    with pytest.raises(SpecError, match=r"bottleneck goes by .* take another, for example ef\(topk\(0.01\)\)"):
        parse_exchanged("ef(bottleneck(4))")
    with pytest.raises(UnknownNameError, match="did you mean 'int8'"):
        parse_exchanged("int9")


def test_a_state_of_other_ranks_or_codecs_is_refused(one_thread: None) -> None:
    two, three = (CodedSum(SHAPES, "ef(topk(0.1))", Among(0, ranks, SEED)) for ranks in (2, 3))
    with pytest.raises(CodecError, match="cannot load a state"):
        CodedGather([SHAPES] * 2, "ef(topk(0.1))", Among(0, 2, SEED), [0, 1]).memory.load(three.memory.state()["0"])
    with pytest.raises(CodecError, match="cannot load a state"):
        CodedSum(SHAPES, "int8", Among(0, 2, SEED)).memory.load(two.memory.state())
