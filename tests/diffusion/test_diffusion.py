"""Splits change nothing without a codec; codecs' memories agree; bytes are those of the formula."""

from __future__ import annotations

import collections
import functools
import math

import pytest
import torch

from testbed.codecs.contract import Stateful
from testbed.codecs.wrap import capability
from testbed.diffusion import quality
from testbed.diffusion.dit import (
    ROWS,
    SIZES,
    TOKENS,
    Dit,
    DitSize,
    build_dit,
    by_heads,
    sample,
    start,
    to_images,
    to_tokens,
)
from testbed.diffusion.node import Sampled
from testbed.diffusion.pretrain import train
from testbed.diffusion.programs import Costs, Program, divide, trace_of
from testbed.diffusion.workers import Codecs, Conditions, Workers
from testbed.errors import SpecError
from testbed.jobs.sampling import ReceivePart, sent_parts
from testbed.metrics.links import Pipes
from testbed.profiles import load_profile
from testbed.trace.check import check_trace
from testbed.trace.simulate import ideal_step_ns

STEPS, IMAGES = 4, 8
SIZE = DitSize(layers=4, width=32, heads=2)
"""A stage for each of four workers."""


def lively(size: DitSize) -> Dit:
    """Return a model whose layers all do something: at the start adaLN-zero closes their gates."""
    made = build_dit(size, 0).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def all_tokens_at_once(model: Dit, images: int, steps: int) -> torch.Tensor:
    pixels, labels = start(images, 0)
    for step in range(steps):
        pixels = pixels + model(pixels, torch.full((images,), step / steps), labels)[0] / steps
    return to_images(pixels)


@functools.cache
def model() -> Dit:
    return lively(SIZE)


def program(name: str, workers: int, **changed: int) -> Program:
    return Program(name, workers, model().size.layers, STEPS, TOKENS, ROWS, **changed)  # type: ignore[arg-type]


def sampled(of: Program, codec: str = "fp32", **changed: int) -> Sampled:
    return Workers(model(), of, Codecs(codec, **changed)).sample(*start(IMAGES, 0))


@functools.cache
def unsplit() -> torch.Tensor:
    return sample(model(), *start(IMAGES, 0), STEPS)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["ring", "gather", "displaced", "pipefusion", "asyncdiff"])
def test_a_synchronous_split_without_a_codec_changes_no_bit(name: str, workers: int) -> None:
    assert torch.equal(sampled(program(name, workers, warmup=STEPS)).images, unsplit())


@torch.no_grad()
def one_step_behind(warmup: int) -> torch.Tensor:
    """Sample as AsyncDiff with two stages: in late steps the second computes on what the first had a step before."""
    whole, (pixels, labels) = model(), start(IMAGES, 0)
    conditions = Conditions(whole, labels, STEPS)

    def through(hidden: torch.Tensor, step: int, layers: tuple[int, int]) -> torch.Tensor:
        for layer in range(*layers):
            block, m = whole.block(layer), conditions.modulations(step, layer)
            queries, *others = block.project(hidden, m)
            keys, values = (by_heads(each, block.heads) for each in others)
            hidden = block.feed_forward(block.attend(hidden, queries, keys, values, m), m)
        return hidden

    first, second = divide(whole.size.layers, 2)
    before = torch.empty(0)
    for step in range(STEPS):
        now = through(whole.begin(pixels, slice(0, len(pixels))), step, first)
        hidden = through(now if step < warmup else before, step, second)
        pixels = pixels + whole.velocity(hidden, conditions.by_step[step]) / STEPS
        before = now
    return to_images(pixels)


@pytest.mark.parametrize("warmup", range(1, STEPS))
def test_asyncdiff_computes_on_the_inputs_of_the_step_before(warmup: int) -> None:
    ours = sampled(program("asyncdiff", 2, warmup=warmup)).images
    torch.testing.assert_close(ours, one_step_behind(warmup), rtol=1e-4, atol=1e-5)
    assert not torch.equal(ours, unsplit())


@pytest.mark.parametrize("codec", ["compactfusion(onebit)", "delta-open(int4, first=half)"])
def test_who_decodes_changes_nothing_where_messages_are_late(codec: str) -> None:
    of = program("displaced", 3, warmup=2)
    each, once = (Workers(model(), of, Codecs(codec), decode_once=once) for once in (False, True))
    for seed in (0, 1):  # what was decoded once is forgotten with the request
        apart, shared = (workers.sample(*start(IMAGES, seed)) for workers in (each, once))
        assert torch.equal(apart.images, shared.images)
        assert apart.frame_bytes == shared.frame_bytes


def test_all_tokens_at_once_is_the_same_model() -> None:
    torch.testing.assert_close(all_tokens_at_once(model(), IMAGES, STEPS), unsplit(), rtol=1e-4, atol=1e-5)
    assert torch.equal(to_images(to_tokens(unsplit())), unsplit())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ring", "displaced"])
@pytest.mark.parametrize("codec", ["compactfusion(onebit)", "compactfusion(lowrank(int4, rank=4), first=byte)"])
def test_the_bases_of_owner_and_receivers_agree_after_every_step_and_go_with_the_request(name: str, codec: str) -> None:
    for steps in range(1, STEPS + 1):
        of = program(name, 3)._replace(steps=steps)
        workers = Workers(model(), of, Codecs(codec))
        first = workers.sample(*start(IMAGES, 0))
        held = collections.defaultdict(list)  # by stream: what its sender and its receivers remember
        for end in (end for worker in workers.workers for end in (worker.sender, worker.receiver)):
            for stream, codec_of_stream in end.codecs.items():
                if (memory := capability(codec_of_stream, Stateful)) is not None:
                    held[stream].append(memory.shared())
        sent = {(part.layer, part.tokens) for part in first.frame_bytes if part.kind == "keys and values"}
        assert {(layer, tokens) for _, layer, tokens, _ in held} == sent
        for one, *others in held.values():
            assert one
            assert len(others) == of.workers - 1
            assert all(one.keys() == other.keys() for other in others)
            assert all(torch.equal(one[key], other[key]) for other in others for key in one)
    again = workers.sample(*start(IMAGES, 0))
    once = Workers(model(), of, Codecs(codec), decode_once=True).sample(*start(IMAGES, 0))
    assert torch.equal(once.images, again.images)
    assert torch.equal(first.images, again.images)
    assert first.frame_bytes == again.frame_bytes


@pytest.mark.slow
def test_bytes_are_those_of_the_formula_and_a_payload_goes_round_the_ring_as_it_is() -> None:
    of, width = program("ring", 4), model().size.width
    found = sampled(of, "compactfusion(onebit, first=half)").frame_bytes
    values = TOKENS // 4 * IMAGES * width
    for part, size in found.items():
        if part.kind != "keys and values":
            continue
        bits = 16 if part.step == 0 else 1 + 16 / width + 16 / (TOKENS // 4 * IMAGES)
        assert size == pytest.approx(2 * values * bits / 8, abs=180)  # headers
    sends = [part for _, part in sent_parts(of.actions()) if part.kind == "keys and values"]
    assert len(sends) == 3 * len(set(sends)) == 3 * 4 * of.layers * STEPS
    gathered = sampled(program("gather", 4), "compactfusion(onebit, first=half)")
    assert torch.equal(gathered.images, sampled(of, "compactfusion(onebit, first=half)").images)
    assert gathered.frame_bytes == found


def test_key_frames_and_refreshes_are_first_messages() -> None:
    found = sampled(program("ring", 2), "compactfusion(onebit)", key_steps=2, refresh_every=3).frame_bytes
    sizes = {part.step: size for part, size in found.items() if part.kind == "keys and values"}
    assert sizes[0] == sizes[1] == sizes[3] > 4 * sizes[2]


def test_closed_loops_are_better_than_open_ones_and_those_than_none() -> None:
    naive, opened, closed = (
        quality.relative_l2(sampled(program("ring", 2), codec).images, unsplit())
        for codec in ("onebit", "delta-open(onebit, first=half)", "compactfusion(onebit, first=half)")
    )
    assert closed < opened < naive


def test_stale_programs_wait_for_what_is_due_and_less_often() -> None:
    links = [load_profile("link(100Mbit, 20ms)")]

    def seconds(of: Program) -> float:
        costs = Costs(work_ns=lambda action: 1_000_000, frame_bytes=lambda part: 1000)
        trace = trace_of(of.actions(), costs)
        check_trace(trace, "made here")
        return ideal_step_ns(trace, Pipes("star", links, of.workers)) / 1e9

    one, ring = seconds(program("ring", 1)), seconds(program("ring", 2))
    assert one == pytest.approx(STEPS * (3 + 2 * model().size.layers) * 1e-3)
    assert ring > STEPS * model().size.layers * 0.04  # two access links of 20 ms each, at every layer
    assert seconds(program("displaced", 2)) < 0.6 * ring
    for name in ("ring", "displaced", "pipefusion", "asyncdiff"):
        for actions in program(name, 4, patches=2).actions():
            steps = [a.part.step for a in actions if isinstance(a, ReceivePart)]
            assert steps == sorted(steps)


def test_no_split_is_too_fine() -> None:
    assert divide(16, 3) == [(0, 6), (6, 11), (11, 16)]
    for name in ("ring", "pipefusion", "asyncdiff"):
        with pytest.raises(SpecError, match="at most 4 workers"):
            program(name, 5).actions()


def test_frechet_distance_is_that_of_normal_distributions() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4000, 3, generator=generator)
    assert quality.frechet_distance(a, a) == pytest.approx(0, abs=1e-6)
    assert quality.frechet_distance(a, a + 2) == pytest.approx(12, rel=1e-3)
    spread = float(a.to(torch.float64).var(0).sum())
    assert quality.frechet_distance(a, 3 * a) == pytest.approx(
        4 * spread + 4 * float(a.mean(0).square().sum()), rel=1e-3
    )
    with pytest.raises(SpecError, match="use more"):
        quality.frechet_distance(a[:3], a)
    assert quality.psnr_db(a, a) == math.inf
    assert quality.psnr_db(a + 0.2, a) == pytest.approx(20, abs=0.01)
    assert quality.relative_l2(2 * a, a) == pytest.approx(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dit-digits-nano", "dit-digits-moe-nano"])
def test_training_learns_and_repeats(name: str) -> None:
    losses = [train(build_dit(SIZES[name], 0), 12)[1][-1].loss for _ in range(2)]
    assert losses[0] == losses[1] < 1.75
