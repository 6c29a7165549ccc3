"""Durations that vary: a pipeline under them against a simulation of its own, and what a draw depends on."""

from __future__ import annotations

import functools
import math
import random
from statistics import fmean, pstdev
from typing import Any

import pytest

from testbed.devices import compute_of
from testbed.errors import SpecError, UserError
from testbed.jobs.actions import Action, Decode, Encode, Key, Message, Sizes, Work
from testbed.jobs.draws import drawn
from testbed.jobs.loop import Cost
from testbed.jobs.pipeline import PipelineJob, orders_of
from testbed.records import Duration, StageCosts
from testbed.spec import Calibrated, Paced, PipelineSpec, Slowdown, Spread, Stragglers
from testbed.trace.simulate import replay
from testbed.trace.tracing import TracedJob
from testbed.training.timing import duration
from tests.specs import text_spec

NS = {"forward": 10_000_000, "backward": 20_000_000, "update": 4_000_000}
STAGES, PARTS, STEPS = 4, 6, 3_000
EXPONENTIAL, LOGNORMAL = Spread(kind="exponential", cv=0.5), Spread(cv=0.3)


def paced(**varied: Any) -> Paced:
    (forward, backward, update) = ((NS["forward"],), (NS["backward"],), NS["update"])
    return Paced(forward_ns=forward, backward_ns=backward, update_ns=update, source="test", **varied)


def stated(place: int, action: Action) -> int | None:
    return NS.get(action.what) if isinstance(action, Work) else None


def samples(compute: Paced, count: int = 20_000) -> list[float]:
    cost = drawn(stated, compute)
    took = [cost(0, Work("forward", Key("activation", step))) for step in range(count)]
    return [ns / NS["forward"] for ns in took if ns is not None]


def step_ends(schedule: str, compute: Paced) -> list[int]:
    pipeline = PipelineSpec(stages=STAGES, microbatches=PARTS, schedule=schedule, in_flight=STAGES)  # type: ignore[arg-type]
    job = PipelineJob(orders_of(pipeline), STEPS)
    return list(replay(TracedJob(job, [Sizes(lambda key: 1)] * STAGES, drawn(stated, compute)).trace()))


def simulated_s(schedule: str, draw: Any) -> float:
    """The mean step of a pipeline without links, as a recursion over who waits for whom."""

    def order(stage: int) -> list[tuple[str, int]]:
        ahead = PARTS if schedule == "gpipe" else STAGES - stage
        later = [("B", 0)] + [one for part in range(ahead, PARTS) for one in (("F", part), ("B", part - ahead + 1))]
        rest = [("B", part) for part in range(max(1, PARTS - ahead + 1), PARTS)]
        return [("F", part) for part in range(ahead)] + later + rest

    orders = [order(stage) for stage in range(STAGES)]

    def step(free: list[float]) -> list[float]:
        @functools.cache
        def end(stage: int, number: int) -> float:
            if number < 0:
                return free[stage]
            kind, part = orders[stage][number]
            source = stage - 1 if kind == "F" else stage + 1
            other = end(source, orders[source].index((kind, part))) if 0 <= source < STAGES else 0.0
            return float(max(end(stage, number - 1), other) + draw(NS["forward" if kind == "F" else "backward"]))

        met = max(end(stage, len(orders[stage]) - 1) for stage in range(STAGES))
        return [met + draw(NS["update"]) for _ in range(STAGES)]

    ended = functools.reduce(lambda free, _: step(free), range(STEPS), [0.0] * STAGES)
    return max(ended) / STEPS / 1e9


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("varied", "draw"),
    [
        ({"spread": EXPONENTIAL}, lambda ns, chance: ns * (0.5 + 0.5 * chance.expovariate(1))),
        (
            {"spread": LOGNORMAL},
            lambda ns, chance: ns * chance.lognormvariate(-math.log(1.09) / 2, math.log(1.09) ** 0.5),
        ),
        (
            {"stragglers": Stragglers(share=0.02, factor=5)},
            lambda ns, chance: ns * (5 if chance.random() < 0.02 else 1),
        ),
    ],
)
def test_a_pipeline_pays_the_expected_maximum(schedule: str, varied: Any, draw: Any) -> None:
    """The mean step is that of a simulation which shares no code and no draw, within 1 %, and far from the constant."""
    ours_s = step_ends(schedule, paced(**varied))[-1] / STEPS / 1e9
    chance = random.Random(1)
    assert ours_s == pytest.approx(simulated_s(schedule, lambda ns: draw(ns, chance)), rel=0.01)
    mean = fmean(samples(paced(**varied)))
    assert ours_s > 1.05 * mean * simulated_s(schedule, lambda ns: ns)


@pytest.mark.slow
def test_the_recursion_is_right_where_nothing_is_drawn() -> None:
    for schedule in ("gpipe", "1f1b"):
        expected_s = ((PARTS + STAGES - 1) * (NS["forward"] + NS["backward"]) + NS["update"]) / 1e9
        assert simulated_s(schedule, lambda ns: ns) == pytest.approx(expected_s)
        assert step_ends(schedule, paced())[-1] / STEPS / 1e9 == pytest.approx(expected_s)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_nanoseconds_and_another_seed_others() -> None:
    ours, same, other = (step_ends("1f1b", paced(spread=LOGNORMAL, seed=seed)) for seed in (3, 3, 4))
    assert ours == same
    assert not set(ours) & set(other)


@pytest.mark.parametrize(
    ("spread", "cv"),
    [(LOGNORMAL, 0.3), (EXPONENTIAL, 0.5), (Spread(cv=0.1), 0.1), (Spread(kind="exponential", cv=1), 1)],
)
def test_the_stated_duration_is_the_mean(spread: Spread, cv: float) -> None:
    took = samples(paced(spread=spread))
    assert fmean(took) == pytest.approx(1, abs=4 * cv / len(took) ** 0.5)
    assert pstdev(took) == pytest.approx(cv, rel=0.05)
    assert spread.kind != "exponential" or min(took) >= 1 - cv


def test_stragglers_are_as_many_and_as_slow_as_stated() -> None:
    took = samples(paced(stragglers=Stragglers(share=0.02, factor=5)))
    assert {round(each, 6) for each in took} == {1, 5}
    assert took.count(5.0) / len(took) == pytest.approx(0.02, abs=0.004)


def test_a_hot_node_slows_down_over_its_steps() -> None:
    cost = drawn(stated, paced(slow=Slowdown(factor=2, node=1, after=2, over=3)))
    took = [[cost(node, Work("forward", Key("activation", step))) for step in range(8)] for node in range(2)]
    assert took[0] == [10_000_000] * 8
    assert [ns and ns / 1e7 for ns in took[1]] == [1, 1, 1.25, 1.5, 1.75, 2, 2, 2]


def test_each_action_has_its_own_draw_and_what_has_no_duration_keeps_none() -> None:
    """What crosses a link, and in which order, changes nothing: a draw knows only what it is for."""
    coding: Cost = lambda place, action: 1_000_000  # noqa: E731
    cost, key = drawn(coding, paced(spread=LOGNORMAL)), Key("activation", 0)
    actions = [Work("forward", key), Work("backward", key), Encode(key), Decode((Message(key, b""),))]
    actions += [
        Work("forward", key._replace(step=1)),
        Work("forward", key._replace(part=1)),
        Encode(Key("gradient", 0)),
    ]
    took = {(place, number): cost(place, action) for number, action in enumerate(actions) for place in (0, 1)}
    assert len(set(took.values())) == len(took)
    assert [cost(0, action) for action in reversed(actions)] == [took[0, number] for number in range(len(actions))][
        ::-1
    ]
    assert drawn(stated, paced(spread=LOGNORMAL))(0, Work("start", key)) is None
    assert drawn(stated, paced()) is stated


def test_a_calibrations_own_spread_is_drawn_from() -> None:
    ms = 1_000_000
    plain = duration([8 * ms, 10 * ms, 12 * ms], per_step=1, step_ns=10**9)
    assert plain.quantiles_ns == (8 * ms, 10 * ms, 12 * ms)
    costs = StageCosts(forward=plain, backward=plain, clip=plain, update=plain, encode={}, decode={})
    cost = drawn(stated, Calibrated(spread=Spread(kind="measured")), (costs,))
    took = [cost(0, Work("forward", Key("activation", step))) for step in range(3_000)]
    assert set(took) == {8 * ms, 10 * ms, 12 * ms}
    assert fmean(filter(None, took)) == pytest.approx(NS["forward"], rel=0.01)
    old = StageCosts(**{**dict(costs), "clip": Duration(ns=1, spread=0, samples=12)})
    with pytest.raises(UserError, match="no samples to draw durations from; measure it: --recalibrate"):
        drawn(stated, Calibrated(spread=Spread(kind="measured")), (old,))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"spread": {}}, "spread: kind is 'lognormal'; cv is required"),
        ({"spread": {"cv": 0.3, "knd": 1}}, r"no key 'spread.knd' \(did you mean 'spread.kind'\?\)"),
        ({"spread": {"kind": "exponential", "cv": 2.0}}, "an exponential tail alone has 1"),
        ({"stragglers": {"share": 2, "factor": 5}}, "stragglers.share: .* less than or equal to 1, found 2"),
        ({"mode": "measured", "spread": {"cv": 0.3}}, "mode 'measured' does not accept forward, backward, spread"),
    ],
)
def test_what_cannot_be_drawn_is_refused(asked: Any, says: str) -> None:
    pipeline = PipelineSpec(stages=3, microbatches=4, schedule="1f1b", in_flight=4)
    table = {"mode": "paced", "forward": "1ms", "backward": "2ms", **asked}
    with pytest.raises(SpecError, match=says):
        compute_of(table, text_spec(batch_size=16), pipeline, "some.toml")
