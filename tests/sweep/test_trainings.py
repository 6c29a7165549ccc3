"""Recipes are trained once, kept, and the same however many train side by side; their memory is predicted."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testbed import forks
from testbed.errors import StageError, TestbedError, UserError
from testbed.records import StepRecord, TrainingRecord
from testbed.results import read_json
from testbed.spec import OptimiserSpec, PipelineSpec, Recipe, TextSpec, TrainingSpec
from testbed.sweep import executor, trainings
from testbed.sweep.executor import Task, TaskResult
from testbed.sweep.live_session import Tokens
from testbed.sweep.trainings import FOLDER, find_fault, is_trained, load_training, train_missing, untrained
from testbed.training.memory_need import DeviceMemory, predict_memory
from tests import small_replicas
from tests.altered import ALTERATIONS
from tests.small_replicas import DIGITS
from tests.specs import text_spec

pytestmark = pytest.mark.slow  # what they share takes seconds to make

VOCABULARY = 96


def a_recipe(codec: str = "fp32", *, model: str = "gpt2-nano", steps: int = 3, **workload: Any) -> Recipe:
    return Recipe(
        codec=codec,
        workload=text_spec(model, **{"text": "none", "sequence_length": 16, "validation_batches": 2, **workload}),
        pipeline=PipelineSpec(stages=2, microbatches=2, schedule="1f1b", in_flight=2),
        optimiser=OptimiserSpec(learning_rate=0.001, weight_decay=0.1, beta1=0.9, beta2=0.95, clip_norm=1.0),
        training=TrainingSpec(steps=steps, warmup_steps=1, seed=3, evaluate_every=0),
    )


class Heard:
    def __init__(self) -> None:
        self.ended: dict[str, TestbedError | None] = {}

    def note(self, message: str) -> None: ...

    def trained(self, recipe: Recipe, error: TestbedError | None) -> None:
        self.ended[recipe.id] = error


class Texts:
    """Prepares a text, and counts how often."""

    def __init__(self, folder: Path) -> None:
        self.path, self.asked = folder / "tokens.npy", 0
        np.save(self.path, np.random.default_rng(0).integers(VOCABULARY, size=50_000).astype(np.uint16))

    def __call__(self, spec: TextSpec) -> Tokens:
        self.asked += 1
        return Tokens(self.path, VOCABULARY)


def losses(folder: Path) -> list[float | None]:
    return [record.loss for record in load_training(folder)[-1]]


def test_trained_once_kept_and_the_same_however_many_train_at_once(tmp_path: Path) -> None:
    recipes, texts, heard = [a_recipe(codec) for codec in ("fp32", "delta-int8")], Texts(tmp_path), Heard()
    together = train_missing(recipes, tmp_path / "one", prepare=texts, progress=heard, at_once=2)
    assert not together.failures
    assert texts.asked == 1
    assert heard.ended == {recipe.id: None for recipe in recipes}
    home = tmp_path / "one" / FOLDER
    assert sorted(path.name for path in home.iterdir()) == sorted(together.folders), "no job or draft is left"

    apart = train_missing(recipes, tmp_path / "two", prepare=texts, progress=Heard(), at_once=1)
    for name, folder in together.folders.items():
        assert losses(folder) == losses(apart.folders[name])
        assert None not in losses(folder)

    again = Heard()
    assert train_missing(recipes, tmp_path / "one", prepare=texts, progress=again).folders == together.folders
    assert not again.ended


def test_a_training_that_is_killed_costs_itself_and_is_made_again(tmp_path: Path) -> None:
    long, short = a_recipe(steps=100_000), a_recipe("int8")

    class Kills(Heard):
        def trained(self, recipe: Recipe, error: TestbedError | None) -> None:
            super().trained(recipe, error)
            if recipe == short:
                assert any((tmp_path / FOLDER).glob(f".{long.id}.draft/steps-*")), "it has begun"
                server = forks.server()
                (left,) = Path(f"/proc/{server}/task/{server}/children").read_text().split()
                os.kill(int(left), signal.SIGKILL)

    trained = train_missing([long, short], tmp_path, prepare=Texts(tmp_path), progress=Kills(), at_once=2)
    assert list(trained.folders) == [short.id]
    assert isinstance(trained.failures[long.id], StageError)
    assert not is_trained(tmp_path / FOLDER / long.id)
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [short.id]


def test_what_needs_a_network_is_refused_before_anything_starts(tmp_path: Path) -> None:
    def never(spec: TextSpec) -> Tokens:
        raise AssertionError

    with pytest.raises(UserError, match='timing = "live"'):
        train_missing([a_recipe(), a_recipe("adaptive(50)")], tmp_path, prepare=never, progress=Heard())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model", ["gpt2-mini", "llama-mini", DIGITS.model])
def test_predicted_memory_suffices_and_is_not_far_off(tmp_path: Path, model: str) -> None:
    if model == DIGITS.model:
        recipe = small_replicas.a_recipe("star", workload=DIGITS)
    else:
        recipe = a_recipe(model=model, sequence_length=64, batch_size=16, steps=2)
    trained = train_missing([recipe], tmp_path, prepare=Texts(tmp_path), progress=Heard())
    peak = read_json(trained.folders[recipe.id] / "training.json", TrainingRecord).peak_memory_bytes
    assert peak <= predict_memory(recipe) <= 1.5 * peak


def in_schedule(recipe: Recipe, schedule: str, in_flight: int) -> Recipe:
    pipeline = recipe.pipeline.model_copy(update={"schedule": schedule, "in_flight": in_flight, "microbatches": 4})
    return recipe.model_copy(update={"pipeline": pipeline})


def what_was_done(training: Iterable[list[StepRecord]]) -> list[Any]:
    """All but times."""
    return [
        (
            *(record.step, record.phase, record.loss, record.gradient_norm),
            [(action.kind, action.microbatch) for action in record.actions],
            [(frame.direction, frame.microbatch, frame.payload_bytes) for frame in record.sent],
            [(frame.direction, frame.microbatch, frame.payload_bytes) for frame in record.received],
        )
        for stage in training
        for record in stage
    ]


def test_schedules_and_depths_share_a_training_and_keep_their_own_order(tmp_path: Path) -> None:
    orders = [("gpipe", 1), ("1f1b", 2), ("1f1b", 3)]
    recipes, texts, heard = [in_schedule(a_recipe("delta-int8"), *order) for order in orders], Texts(tmp_path), Heard()
    apart = [train_missing([one], tmp_path / one.id, prepare=texts, progress=heard).folders[one.id] for one in recipes]
    assert len(untrained(recipes, tmp_path / "one")) == 1
    together = train_missing(recipes, tmp_path / "one", prepare=texts, progress=heard)
    assert len(set(together.folders.values())) == len(list((tmp_path / "one" / FOLDER).iterdir())) == 1
    assert not untrained(recipes, tmp_path / "one")
    for recipe, own in zip(recipes, apart, strict=True):
        shared = load_training(together.folders[recipe.id], recipe)
        assert what_was_done(shared) == what_was_done(load_training(own))


class Notes(Heard):
    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture(scope="module")
def two_trainings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of two trainings."""
    home = tmp_path_factory.mktemp("trained")
    made = train_missing([a_recipe(), a_recipe("int8")], home, prepare=Texts(home), progress=Heard())
    first, second = made.folders.values()
    return first, second


class Watched(Notes):
    """Counts the trainings that had begun whenever one ended."""

    def __init__(self, home: Path) -> None:
        super().__init__()
        self.home, self.begun = home, list[int]()

    def trained(self, recipe: Recipe, error: TestbedError | None) -> None:
        super().trained(recipe, error)
        self.begun.append(len([*self.home.glob("[!.]*/"), *self.home.glob(".*.draft")]))


@pytest.mark.parametrize("scarce", ["memory", "the device's memory"])
def test_a_training_waits_for_memory_and_learns_the_same(
    tmp_path: Path, two_trainings: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, scarce: str
) -> None:
    """The device's memory is only told: the CPU computes."""
    recipes, on_device = [a_recipe(), a_recipe("int8")], scarce != "memory"
    need = predict_memory(recipes[0])
    if on_device:
        room = DeviceMemory(free_bytes=2 * need, process_bytes=10**9, host_bytes=10**8)
        monkeypatch.setattr(trainings, "device_memory", {"cuda": room}.__getitem__)
        for_gpu = {"training": recipes[0].training.model_copy(update={"device": "cuda"})}
        recipes = [recipe.model_copy(update=for_gpu) for recipe in recipes]
    else:
        monkeypatch.setattr(executor, "available_memory", lambda: 3 * need // 2)

    def on_the_cpu(tasks: list[Task], **options: Any) -> Any:
        for task in tasks:
            assert (task.device_bytes > 10**9, task.memory_bytes > need) == (on_device, on_device)
            job = json.loads((path := Path(task.arguments[0])).read_text())
            job["recipe"]["training"].pop("device", None)
            path.write_text(json.dumps(job))
        return executor.execute(tasks, **options)

    monkeypatch.setattr(trainings, "execute", on_the_cpu)
    watched = Watched(tmp_path / FOLDER)
    made = train_missing(recipes, tmp_path, prepare=Texts(tmp_path), progress=watched, at_once=2)
    assert not made.failures
    assert watched.begun == [1, 2]
    (note,) = watched.notes
    assert f" of {scarce}, but 1 running tasks leave" in note
    for recipe, before in zip(recipes, two_trainings, strict=True):
        assert losses(tmp_path / FOLDER / recipe.id) == losses(before)


def test_what_finds_no_memory_beside_others_is_trained_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes, watched = [a_recipe(), a_recipe("int8")], Watched(tmp_path / FOLDER)
    for_gpu = {"training": recipes[0].training.model_copy(update={"device": "cuda"})}
    recipes = [recipe.model_copy(update=for_gpu) for recipe in recipes]
    room = DeviceMemory(free_bytes=10**12, process_bytes=1, host_bytes=1)
    monkeypatch.setattr(trainings, "device_memory", {"cuda": room}.__getitem__)
    full = StageError("cannot train: out of memory during training (CUDA out of memory)")
    asked: list[tuple[list[str], int]] = []

    def execute(tasks: list[Task], *, at_once: int, **_: Any) -> Any:
        asked.append(([task.name for task in tasks], at_once))
        for task in tasks:
            yield TaskResult(task, full if task.name == recipes[0].id else None, "")

    monkeypatch.setattr(trainings, "execute", execute)
    made = train_missing(recipes, tmp_path, prepare=Texts(tmp_path), progress=watched, at_once=2)
    assert asked == [([recipe.id for recipe in recipes], 2), ([recipes[0].id], 1)]
    assert "trained again after the others, alone" in watched.notes[0]
    assert made.failures == {recipes[0].id: full}
    assert watched.ended == {recipes[1].id: None, recipes[0].id: full}


def test_a_device_says_what_it_has() -> None:
    here = trainings.device_memory("cpu")
    assert here.process_bytes == 0
    assert here.free_bytes > here.host_bytes > 10**7


@pytest.mark.gpu
def test_trainings_side_by_side_on_a_gpu_need_what_is_predicted_and_learn_the_same(tmp_path: Path) -> None:
    of = a_recipe(model="gpt2-mini", sequence_length=64, batch_size=16, steps=5)
    of = of.model_copy(update={"training": of.training.model_copy(update={"device": "cuda"})})
    recipes = [of.model_copy(update={"codec": codec}) for codec in ("fp32", "int8", "topk(0.1)")]
    peaks = list[int]()
    for name, most in (("apart", 1), ("together", 3)):
        watched = Watched(tmp_path / name / FOLDER)
        made = train_missing(recipes, tmp_path / name, prepare=Texts(tmp_path), progress=watched, at_once=most)
        assert not made.failures
        for path in made.folders.values():
            trained_on = read_json(path / "training.json", TrainingRecord).trained_on
            assert trained_on is not None
            peaks.append(trained_on.peak_bytes or 0)
    for recipe in recipes:
        assert losses(tmp_path / "apart" / FOLDER / recipe.id) == losses(tmp_path / "together" / FOLDER / recipe.id)
    assert 0 < max(peaks) <= predict_memory(of)


STEPS = ("steps-0.jsonl", "steps-1.jsonl")
ALTERED = [(name, how, False) for name in (*STEPS, "training.json", "manifest.json") for how in ALTERATIONS]
ALTERED += [(name, how, True) for name in STEPS for how in ("cut at a line", "emptied", "removed", "appended to")]
ALTERED += [("training.json", how, True) for how in ALTERATIONS if how != "a bit flipped"]


@pytest.mark.parametrize(("name", "alteration", "old"), ALTERED)
def test_an_altered_training_is_named_and_not_believed(
    tmp_path: Path, two_trainings: tuple[Path, Path], name: str, alteration: str, old: bool
) -> None:
    """`old`: by an older testbed, without a manifest; a flipped bit or another's records cannot be found there."""
    source, other = two_trainings
    folder = tmp_path / FOLDER / source.name
    shutil.copytree(source, folder)
    if old:
        (folder / "manifest.json").unlink()
        said = json.loads((folder / "training.json").read_text())
        del said["finished_by"]
        (folder / "training.json").write_text(json.dumps(said, indent=1) + "\n")
    recipe = a_recipe()
    assert untrained([recipe], tmp_path) == []
    ALTERATIONS[alteration](folder / name, other / name)
    assert untrained([recipe], tmp_path) == [recipe]
    # Another's manifest names the first file that differs; old records have no name for the file that is too short.
    named = STEPS[0] if (name, alteration) == ("manifest.json", "replaced by another's") else name
    assert ("its records of" if old and name in STEPS else named) in find_fault(folder)


def test_an_altered_training_is_set_aside_and_made_again(tmp_path: Path, two_trainings: tuple[Path, Path]) -> None:
    source, _ = two_trainings
    folder = tmp_path / FOLDER / source.name
    shutil.copytree(source, folder)
    ALTERATIONS["cut at a line"](folder / "steps-1.jsonl", folder)
    cut, heard = (folder / "steps-1.jsonl").read_bytes(), Notes()
    again = train_missing([a_recipe()], tmp_path, prepare=Texts(tmp_path), progress=heard)
    assert losses(again.folders[source.name]) == losses(source)
    (note,) = heard.notes
    assert note.startswith(f"the training {source.name} is set aside as {source.name}.aside: steps-1.jsonl has ")
    assert (folder.with_name(f"{source.name}.aside") / "steps-1.jsonl").read_bytes() == cut
    assert train_missing([a_recipe()], tmp_path, prepare=Texts(tmp_path), progress=heard) == again
    assert len(heard.notes) == len(heard.ended) == 1


def test_what_was_trained_before_serves_other_schedules_but_not_other_numbers(tmp_path: Path) -> None:
    before, texts, heard = in_schedule(a_recipe(), "1f1b", 2), Texts(tmp_path), Heard()
    (home,) = train_missing([before], tmp_path, prepare=texts, progress=heard).folders.values()
    other = in_schedule(a_recipe(), "gpipe", 7)
    assert not untrained([other], tmp_path)
    assert train_missing([other], tmp_path, prepare=texts, progress=heard).folders == {other.id: home}
    assert len(heard.ended) == 1
    stranger = "tests.codecs.strangers:Good"
    for changed in (in_schedule(a_recipe(steps=4), "gpipe", 7), a_recipe(), in_schedule(a_recipe("int8"), "1f1b", 2)):
        assert untrained([changed], tmp_path) == [changed]
    apart = [in_schedule(a_recipe(stranger), *order) for order in (("gpipe", 1), ("1f1b", 2))]
    assert untrained(apart, tmp_path) == apart, "it may look at more than its own messages"
    (unreadable := tmp_path / "older" / FOLDER / before.id).mkdir(parents=True)
    (unreadable / "training.json").write_text("{}")
    assert untrained([other], tmp_path / "older") == [other]
