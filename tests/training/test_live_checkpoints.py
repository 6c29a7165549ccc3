"""A live training that resumes a checkpoint has the losses and the weights of an undisturbed one, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from testbed.codecs.kept_state import digest_of
from testbed.codecs.make import make
from testbed.errors import ResultsError, SpecError, TransportError
from testbed.jobs.kind import Setting
from testbed.nodes.boundary import Boundary
from testbed.nodes.bucket import Bucket
from testbed.results import checkpoint_steps, newest_checkpoint
from testbed.spec import Cell, Measured, recipe_of
from testbed.training.checkpoints import PlaceCheckpoints
from testbed.training.kinds import KindTraining, Training
from tests.jobs.recording import job_recipe
from tests.jobs.test_context import recipe as context_recipe
from tests.nodes.test_stage import TOKENS
from tests.over_loopback import nodes_of, run_places
from tests.small_replicas import EXCHANGES, SmallTraining, a_recipe, live_cell
from tests.training.test_alone import a_tiny_cell, toy_of
from tests.training.test_checkpoints import MEMORIES, ORDERS, PIPELINE_CODECS, Silent, tokens

pytestmark = pytest.mark.usefixtures("one_thread", "tiny_models")
EVERY, STEPS = 2, 6
__all__ = ["tokens"]


class Kind(NamedTuple):
    """A live cell, and what makes its training."""

    cell: Cell
    make: Callable[[], Training]
    told: Mapping[str, Any] = MappingProxyType({})
    """What its jobs are told."""


class Outcome(NamedTuple):
    """What must not depend on an interruption."""

    losses: dict[tuple[int, str, int], float | None]
    """By place, phase and step."""
    weights: dict[int, str]
    """SHA-256, by place."""


def run(kind: Kind, folder: Path | None = None, resumes_at: int = 0) -> Outcome:
    """Run all places over loopback, with checkpoints in a folder."""
    training = kind.make()
    nodes, built = nodes_of(training), list(map(training.load, range(kind.cell.nodes)))  # models share torch's seed
    training.load = lambda place: built[place]  # type: ignore[method-assign]
    kept = {} if folder is None else {"checkpoints": str(folder), "checkpoint_every": EVERY, "resumes_at": resumes_at}
    ran = run_places(kind.cell, lambda setting: training, told=kept, **kind.told)
    for error in sorted(filter(None, ran.errors), key=lambda error: isinstance(error, TransportError)):
        raise error
    losses = {
        (place, record.phase, record.step): record.loss
        for place, records in enumerate(ran.records)
        for record in records
    }
    weights = {place: digest_of(each.weights()) for place, each in nodes.items() if hasattr(each, "weights")}
    return Outcome(losses, weights)


def check(kind: Kind, folder: Path) -> None:
    """Resume both checkpoints that are kept."""
    folder.mkdir(exist_ok=True)
    undisturbed = run(kind)
    assert run(kind, folder) == undisturbed, "a pause changes something"
    assert checkpoint_steps(folder) == [2, 4]
    assert newest_checkpoint(folder, recipe_of(kind.cell)) == 4
    for step in (4, 2):
        found = run(kind, folder, step)
        expected = {of: loss for of, loss in undisturbed.losses.items() if of[2] >= step}
        assert found.losses == {of: loss for of, loss in expected.items() if of in found.losses}
        assert {of[2] for of in found.losses if of[1] == "train"} == set(range(step, STEPS))
        assert found.weights == undisturbed.weights, f"resumed at {step}"


def pipeline(codec: str, stages: int = 3, **changes: Any) -> Kind:
    cell = a_tiny_cell(stages, codec, **{"steps": STEPS, "evaluate_every": 3, **changes})
    return Kind(cell, lambda: toy_of(cell, partial(make, codec)), {"vocabulary": TOKENS})


def replicas(exchange: Any, codec: str, **changes: Any) -> Kind:
    asked = {"workers": 3, "shares": (2, 1, 1), "steps": STEPS, "evaluate_every": 3}
    recipe = a_recipe(exchange, codec, **(asked | changes))
    return Kind(live_cell(recipe), lambda: SmallTraining(recipe))


@pytest.mark.slow
@pytest.mark.parametrize("codec", PIPELINE_CODECS)
def test_a_live_pipeline_with_every_codec(codec: str, tmp_path: Path) -> None:
    check(pipeline(codec), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "order", "codec"),
    [
        (exchange, order, codec)
        for exchange in EXCHANGES
        for order in ORDERS
        for codec in MEMORIES
        if exchange != "all-reduce"
    ]
    + [("all-reduce", order, "bf16") for order in ORDERS],
)
def test_live_workers_with_every_exchange_and_order(exchange: str, order: str, codec: str, tmp_path: Path) -> None:
    check(replicas(exchange, codec, **ORDERS[order]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("table", ["context", "decode"])
def test_live_jobs_of_a_table(table: str, tokens: str, tmp_path: Path) -> None:
    recipe = context_recipe(codec="delta-int8", weights="ef(int4)")
    if table == "decode":
        asked = {"kind": "decode", "stages": 2, "prompt": 4, "tokens": 3}
        recipe = job_recipe(asked, "delta-int8", steps=STEPS, sequence_length=24, batch_size=2, validation_batches=2)
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"steps": STEPS})})
    cell = live_cell(recipe, compute=Measured(), codec_cost="host")  # type: ignore[arg-type]
    check(Kind(cell, lambda: KindTraining(Setting(recipe, 4096, tokens)), {"tokens": tokens}), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pipeline("delta-int8"), *(replicas("star", codec) for codec in MEMORIES)], ids=lambda kind: kind.cell.codec
)
def test_without_the_codecs_memory_a_live_training_would_differ(
    kind: Kind, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The control: these tests notice a state that is missing."""
    undisturbed = run(kind, tmp_path)
    monkeypatch.setattr(Boundary, "keeps", ())
    monkeypatch.setattr(Bucket, "load", lambda bucket, state: None)
    assert run(kind, tmp_path, 4).weights != undisturbed.weights


def test_a_checkpoint_that_does_not_fit_is_named(tmp_path: Path) -> None:
    kind = pipeline("delta-int8", 2)
    run(kind, tmp_path)
    shutil.copy(tmp_path / "checkpoint-4" / "node-0.json", tmp_path / "checkpoint-4" / "node-1.json")
    with pytest.raises(ResultsError, match=r"cannot resume from .*checkpoint-4"):
        run(kind, tmp_path, 4)
    assert newest_checkpoint(tmp_path, recipe_of(kind.cell)) == 2


def test_places_that_do_not_pause_before_the_same_step_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    due = PlaceCheckpoints.due
    monkeypatch.setattr(PlaceCheckpoints, "due", lambda kept, step: due(kept, step + kept._job.place % 2))
    with pytest.raises(SpecError, match=r"place \d pauses before step \d, others before \d"):
        run(replicas("all-to-all", "ef(int1)", staleness=2), tmp_path)


def test_a_node_that_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    kind = pipeline("fp32", 2)
    with pytest.raises(SpecError, match=r"Silent in a checkpoint.*remove training\.checkpoint_every"):
        run(kind._replace(make=lambda: toy_of(kind.cell, Silent)), tmp_path)
    assert not checkpoint_steps(tmp_path)
