"""A calibration that somebody else made is checked before anything is trained, not believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import UserError
from testbed.jobs.actions import Key, Work
from testbed.records import Calibration, MessageCosts, PlaceCosts, ReplicaCosts, StageCosts, WorkerMaths
from testbed.replay.cells import _cost
from testbed.spec import Cell, DataParallelSpec, Recipe, StreamingSpec, recipe_of
from testbed.sweep import calibrations, playing, trainings
from testbed.sweep.environment import Means
from testbed.sweep.progress import SweepProgress
from testbed.terminal import Terminal
from tests.commands import run_testbed
from tests.synthetic import cell, lasting, stage_costs

STAGE = stage_costs(forward_ns=5, backward_ns=5, clip_ns=1, update_ns=1, codec_ns=1)
WORKER = WorkerMaths(local_step=lasting(5), close=lasting(5), update=lasting(5))


def _pipeline(stages: int = 3) -> tuple[Recipe, list[StageCosts]]:
    """Costs as a calibration makes them: only of messages that there are."""
    first = STAGE.model_copy(update={"encode": {"forward": lasting(1)}, "decode": {"backward": lasting(1)}})
    last = STAGE.model_copy(update={"encode": {"backward": lasting(1)}, "decode": {"forward": lasting(1)}})
    return recipe_of(cell(stages=stages)), [first, *[STAGE] * (stages - 2), last]


def _calibration(recipe: Recipe, **costs: Any) -> Calibration:
    kind, value = next(iter(costs.items()))
    return Calibration.model_validate({"taken_at": "", "machine": {}, "recipes": {}, kind: {recipe.id: value}})


def test_one_that_fits_is_taken() -> None:
    recipe, costs = _pipeline()
    calibrations.check_given(_calibration(recipe, recipes=costs), [recipe])


def _without(costs: list[StageCosts]) -> Iterator[list[StageCosts]]:
    yield costs[:-1]
    yield [*costs, costs[-1]]
    yield []
    for stage, cost in enumerate(costs):
        for side in ("encode", "decode"):
            for way in getattr(cost, side):
                left = {key: value for key, value in getattr(cost, side).items() if key != way}
                yield [*costs[:stage], cost.model_copy(update={side: left}), *costs[stage + 1 :]]


def test_each_missing_stage_or_message_is_refused() -> None:
    recipe, costs = _pipeline()
    wrong = list(_without(costs))
    assert len(wrong) == 3 + 2 + 4 + 2
    for each in wrong:
        with pytest.raises(UserError, match="does not fit recipe"):
            calibrations.check_given(_calibration(recipe, recipes=each), [recipe])


def test_each_missing_worker_sender_or_fragment_is_refused() -> None:
    data = DataParallelSpec(
        workers=3,
        exchange="star",
        answer="fp32",
        staleness=(0,),
        local_steps=(2,),
        outer={"learning_rate": 0.7, "momentum": 0.9, "nesterov": True},  # type: ignore[arg-type]
        streaming=StreamingSpec(fragments=2),
    )
    recipe = recipe_of(cell(stages=1)).model_copy(update={"data": data})
    two = (lasting(1), lasting(1))
    sender = MessageCosts(encode=two, decode=two)
    right = ReplicaCosts(workers=(WORKER,) * 3, messages=(sender,) * 4)  # three workers and the server
    calibrations.check_given(_calibration(recipe, replicas=right), [recipe])
    for workers, senders, short in ((2, 4, sender), (3, 3, sender), (3, 4, MessageCosts(encode=two, decode=two[:1]))):
        wrong = ReplicaCosts(workers=(WORKER,) * workers, messages=(*[sender] * (senders - 1), short))
        with pytest.raises(UserError, match="does not fit recipe"):
            calibrations.check_given(_calibration(recipe, replicas=wrong), [recipe])
    with pytest.raises(UserError, match="does not fit recipe"):
        calibrations.check_given(_calibration(recipe, recipes=[]), [recipe])


def test_it_is_checked_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = cell(stages=3).model_copy(update={"timing": "played", "codec_cost": "host"})
    _, costs = _pipeline()
    monkeypatch.setattr(trainings, "train_missing", lambda *_, **__: pytest.fail("trained"))
    means = Means("netem", "", "virtual", "")._replace(calibration=_calibration(recipe_of(what), recipes=costs[:-1]))
    with pytest.raises(UserError, match="does not fit recipe"):
        playing.play_cells([what], tmp_path, means, SweepProgress(Terminal(), [what]))


@pytest.mark.slow
@pytest.mark.parametrize("ns", [0, -5, 10**30, 10**15 + 1])
def test_a_duration_that_no_action_has_is_refused(ns: int, tmp_path: Path) -> None:
    recipe, costs = _pipeline()
    text = _calibration(recipe, recipes=costs).model_dump_json().replace('"ns":5,', f'"ns":{ns},')
    (tmp_path / "theirs.json").write_text(text, encoding="utf8")
    done = run_testbed("sweep", "default", "--calibration", "theirs.json", folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "theirs.json is not a Calibration record" in done.stderr
    assert not (tmp_path / "results").exists()


def test_work_of_a_job_that_was_not_timed_is_named() -> None:
    what: Cell = cell(stages=2)
    costs = [PlaceCosts(work={"forward": lasting(5)}, encode={}, decode={})] * 2
    cost = _cost(what, costs)
    assert cost(0, Work("forward", Key("forward", 0))) == 5
    with pytest.raises(UserError, match=r"no duration of 'prefill' at stage 0"):
        cost(0, Work("prefill", Key("prefill", 0)))
