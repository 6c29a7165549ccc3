"""Durations are measured once, shared by all recipes that do the same, and kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_trainings import Texts, a_recipe

import testbed
from testbed.errors import StageError, TestbedError, UserError
from testbed.records import Calibration, Duration
from testbed.spec import Exchange, OptimiserSpec, Recipe, TextSpec
from testbed.sweep.calibrations import calibrate, hash_of_sources
from testbed.sweep.environment import describe_machine, hold_machine
from testbed.sweep.executor import Task, TaskResult
from testbed.sweep.live_session import Tokens
from testbed.training.timing import duration, is_steady, timed
from tests import small_replicas

SGD = OptimiserSpec(algorithm="sgd", learning_rate=0.1, weight_decay=0.0, beta1=0.0, beta2=0.0, clip_norm=1.0)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=60), st.integers(1, 64), st.integers(1, 10**10))
def test_a_duration_is_the_middle_of_the_fastest_half(samples: list[int], per_step: int, step_ns: int) -> None:
    measured = duration(samples, per_step=per_step, step_ns=step_ns)
    assert min(samples) <= measured.ns <= median(sorted(samples)) + 1
    assert measured == duration(samples[::-1], per_step=per_step, step_ns=step_ns)
    assert measured.samples == len(samples)
    slower = [*samples, *(2 * max(samples) for _ in samples)]
    assert duration(slower, per_step=per_step, step_ns=step_ns).spread == pytest.approx(max(samples) / min(samples) - 1)


def test_what_is_negligible_in_a_step_need_not_agree() -> None:
    samples = [10_000] * 5 + [20_000] * 15
    assert duration(samples, per_step=4, step_ns=10**8).noisy is False
    assert duration(samples, per_step=4, step_ns=10**7).noisy is True
    assert Duration(ns=1, spread=0.011, samples=20).noisy
    assert not is_steady(duration([10_000], per_step=4, step_ns=10**8)), "one sample agrees with itself"


def test_tables_are_sources_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A default of the codecs' table decides what is timed."""
    monkeypatch.setattr(testbed, "__file__", str(tmp_path / "__init__.py"))
    hashes = []
    for name in ("codec.py", "page.md", "rows.toml"):
        (tmp_path / name).touch()
        hashes.append(hash_of_sources(["."]))
    assert hashes[0] == hashes[1] != hashes[2]


def test_what_decides_no_duration_is_not_asked_for() -> None:
    recipe = a_recipe("int8")

    def changed(**fields: dict[str, Any]) -> Recipe:
        """The recipe with other fields in its tables."""
        return recipe.model_copy(
            update={name: getattr(recipe, name).model_copy(update=each) for name, each in fields.items()}
        )

    other = changed(
        training={"steps": 9, "seed": 4, "target_loss": 1.0},
        optimiser={"learning_rate": 0.5, "clip_norm": 2.0},
        pipeline={"schedule": "gpipe", "microbatches": 1, "accumulation": 2, "in_flight": 1},
    )
    assert timed(other) == timed(recipe)
    sgd = recipe.model_copy(update={"optimiser": SGD})
    for one in (
        a_recipe("int4"),
        changed(pipeline={"recompute": True}),
        changed(pipeline={"microbatches": 1}),
        a_recipe("int8", sequence_length=8),
        sgd,
    ):
        assert timed(one) != timed(recipe)
    assert timed(sgd).optimiser.algorithm == "sgd"


def replicas(codec: str = "fp32", exchange: Exchange = "star", **data: Any) -> Recipe:
    text = a_recipe(batch_size=6).workload
    return small_replicas.a_recipe(exchange, codec, workers=2, workload=text, **data)


OUTER = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}


def test_how_far_workers_are_ahead_decides_no_duration() -> None:
    recipe = replicas(outer=OUTER)
    assert timed(replicas(outer=OUTER, staleness=3, local_steps=[4, 2])) == timed(recipe)
    for changed in (
        replicas("int8", outer=OUTER),
        replicas(outer=OUTER, answer="bf16"),
        replicas(exchange="all-gather", outer=OUTER),
        replicas(outer=OUTER, shares=(2, 1)),
        replicas(outer=OUTER, streaming={"fragments": 2}),
    ):
        assert timed(changed) != timed(recipe)


def never(spec: TextSpec) -> Tokens:
    raise AssertionError("everything is kept")


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.usefixtures("_own_cache")
def test_measured_once_shared_and_kept(tmp_path: Path) -> None:
    texts = Texts(tmp_path)
    plain, coded, _ = recipes = [a_recipe(codec) for codec in ("fp32", "int8", "bottleneck(4)")]
    first = calibrate(recipes, prepare=texts, budget_s=1)
    assert texts.asked == 1
    assert list(first.recipes) == [recipe.id for recipe in recipes]
    for stage in range(2):
        one, two, three = (first.recipes[recipe.id][stage] for recipe in recipes)
        for name in ("forward", "backward", "clip", "update"):
            assert getattr(one, name) == getattr(two, name)
        assert three.backward != one.backward, "it changes the model"
        assert one.encode != two.encode
        sent = "forward" if stage == 0 else "backward"
        for costs in (one, two, three):
            assert list(costs.encode) == [sent]
            assert list(costs.decode) == ["backward" if stage == 0 else "forward"]
            assert list(costs.decode_woken) == list(costs.decode)
            assert all(woken.samples >= 8 for woken in costs.decode_woken.values())
            for taken in (costs.forward, costs.backward, costs.clip, costs.update, *costs.encode.values()):
                assert taken.ns > 0
                assert taken.spread_of_step is not None

    alike = coded.model_copy(update={"pipeline": coded.pipeline.model_copy(update={"schedule": "gpipe"})})
    again = calibrate([alike, plain], prepare=never)
    assert again.recipes[alike.id] == first.recipes[coded.id]
    assert again.recipes[plain.id] == first.recipes[plain.id]
    assert again.taken_at == first.taken_at

    more = calibrate([a_recipe("int4")], prepare=texts, budget_s=0.1)
    (joined,) = more.recipes.values()
    assert joined[0].forward == first.recipes[plain.id][0].forward, "its maths was known"

    anew = calibrate([plain], prepare=texts, budget_s=0.1, again=True)
    assert anew.recipes[plain.id] != first.recipes[plain.id]


@pytest.mark.slow
@pytest.mark.usefixtures("_own_cache")
def test_workers_and_their_messages_are_measured_once_shared_and_kept(tmp_path: Path) -> None:
    texts = Texts(tmp_path)
    plain = replicas(outer=OUTER, local_steps=3)
    coded = replicas("1: ef(topk(0.1)); rest: int8", outer=OUTER, answer="int8")
    uneven = replicas("bf16", exchange="all-reduce", shares=(2, 1), outer=OUTER, streaming={"fragments": 2})
    recipes = [plain, coded, uneven]
    measured = calibrate(recipes, prepare=texts, budget_s=0.5).replicas
    assert list(measured) == [recipe.id for recipe in recipes]
    one, two, three = measured.values()
    assert one.workers == two.workers, "codecs, the server's included, have no share in it"
    assert one.workers[0] == one.workers[1], "they read as much"
    assert three.workers[0].local_step != three.workers[1].local_step
    assert one.messages[0] == one.messages[1] == one.messages[2], "of the same tensors with the same codec"
    assert two.messages[0] != two.messages[1]
    assert two.messages[0] == two.messages[2]
    assert [len(sender.encode) for sender in three.messages] == [2, 2]
    for costs in measured.values():
        for sender in costs.messages:
            assert min(each.ns for each in (*sender.encode, *sender.decode)) > 0
        for worker in costs.workers:
            assert worker.local_step.ns > worker.update.ns > 0 <= worker.close.ns
    alike = replicas(outer=OUTER, local_steps=3, staleness=2)
    assert calibrate([alike], prepare=never).replicas == {alike.id: one}
    more = calibrate([replicas("int4", outer=OUTER)], prepare=texts, budget_s=0.1).replicas
    assert next(iter(more.values())).workers == one.workers, "their maths was known"


@pytest.mark.usefixtures("_own_cache")
def test_a_cluster_measures_on_a_machine_that_the_command_does_not_hold(tmp_path: Path) -> None:
    """Often it is a node of the cluster itself, and what measures there waits for its lock."""

    class ThisMachine:
        cores = 1

        def machine(self, before: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
            return describe_machine()

        def execute(self, tasks: Sequence[Task], **options: Any) -> Generator[TaskResult]:
            with hold_machine():
                yield from (TaskResult(task, StageError("it has begun"), "") for task in tasks)

    with pytest.raises(StageError, match="it has begun"):
        calibrate([a_recipe()], prepare=Texts(tmp_path), note=lambda message: None, cluster=ThisMachine())


def test_a_calibration_that_is_given_must_have_all(tmp_path: Path) -> None:
    empty = Calibration(taken_at="2026-01-01T00:00:00+00:00", machine={}, recipes={})
    assert calibrate([], prepare=never, given=empty) == empty
    with pytest.raises(UserError, match=a_recipe().id):
        calibrate([a_recipe()], prepare=never, given=empty)


def test_what_needs_a_network_is_refused() -> None:
    with pytest.raises(UserError, match='timing = "live"'):
        calibrate([a_recipe("adaptive(50)")], prepare=never)


@pytest.mark.slow
@pytest.mark.usefixtures("_own_cache")
def test_what_cannot_be_timed_says_why(tmp_path: Path) -> None:
    recipe: Recipe = a_recipe(sequence_length=128, batch_size=4000)
    with pytest.raises(TestbedError, match=r"cannot calibrate this machine: .*stage 0: a text of"):
        calibrate([recipe], prepare=Texts(tmp_path), budget_s=1)
