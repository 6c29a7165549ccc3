"""Expert parallelism: without a lag nothing changes, whatever the workers; lags and skips change what they say."""

from __future__ import annotations

import functools

import pytest
import torch
from test_diffusion import all_tokens_at_once, lively

from testbed.diffusion import quality
from testbed.diffusion.dit import SIZES, TOKENS, TOP, Dit, start
from testbed.diffusion.experts import BLOCK, ExpertProgram, ExpertSchedule, expert_trace, sample_experts
from testbed.diffusion.node import Sampled
from testbed.errors import SpecError
from testbed.metrics.links import Pipes
from testbed.profiles import load_profile
from testbed.trace.check import check_trace
from testbed.trace.simulate import ideal_step_ns

STEPS, IMAGES = 5, 4 * BLOCK
SYNCHRONOUS, INTERWEAVED, DISPLACED = (ExpertSchedule(lag) for lag in range(3))
DICE = ExpertSchedule(1, "deep", "low")


@functools.cache
def model() -> Dit:
    return lively(SIZES["dit-digits-moe-nano"])


@functools.cache
def sampled(schedule: ExpertSchedule, workers: int = 2, codec: str = "fp32") -> Sampled:
    return sample_experts(model(), *start(IMAGES, 0), STEPS, schedule, workers=workers, codec=codec)


def test_without_a_lag_no_number_of_workers_changes_a_bit_of_the_unsplit_model() -> None:
    one = sampled(SYNCHRONOUS, 1)
    assert not one.frame_bytes
    assert all(torch.equal(sampled(SYNCHRONOUS, workers).images, one.images) for workers in (2, 3, 4))
    torch.testing.assert_close(all_tokens_at_once(model(), IMAGES, STEPS), one.images, rtol=1e-4, atol=1e-5)


def test_schedules_order_as_their_staleness() -> None:
    errors = [
        quality.relative_l2(sampled(schedule).images, sampled(SYNCHRONOUS).images)
        for schedule in (SYNCHRONOUS, ExpertSchedule(1, "deep"), INTERWEAVED, DISPLACED)
    ]
    assert errors == sorted(errors)
    assert errors[0] == 0 < errors[1]


def test_bytes_are_those_of_the_rows_that_cross() -> None:
    width, layers = model().size.width, model().size.layers
    every, some = (
        sum(sampled(schedule).frame_bytes.values()) for schedule in (INTERWEAVED, ExpertSchedule(1, skip="low"))
    )
    # A slot crosses with probability 1/2, once each way, if experts are used alike; they are not quite.
    expected = STEPS * layers * IMAGES * TOKENS * TOP * 2 * 4 * width / 2
    assert every == pytest.approx(expected, rel=0.3)
    assert some < 0.9 * every  # of 5 steps the second and the fourth send half


def test_all_schedules_make_traces_that_end_and_lags_hide_messages() -> None:
    links = Pipes("star", [load_profile("link(1Gbit, 100us)")], 2)
    took = {}
    for schedule in (SYNCHRONOUS, INTERWEAVED, DISPLACED, DICE):
        program = ExpertProgram(schedule, 2, model().size.layers, STEPS)
        trace = expert_trace(program, 10**7, 10**7, sampled(schedule).frame_bytes, requests=2)
        check_trace(trace, "made here")
        took[schedule] = ideal_step_ns(trace, links, 2)
    assert all(took[schedule] < took[SYNCHRONOUS] for schedule in (INTERWEAVED, DISPLACED, DICE))


def test_images_come_in_blocks() -> None:
    with pytest.raises(SpecError, match=f"blocks of {BLOCK}"):
        sample_experts(model(), *start(BLOCK + 1, 0), 1, SYNCHRONOUS)
    with pytest.raises(SpecError, match="5 workers and 4 experts"):
        sample_experts(model(), *start(8 * BLOCK, 0), 1, SYNCHRONOUS, workers=5)
