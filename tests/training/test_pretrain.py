"""A model of ours that has learned: however often its training is stopped, the same weights, which every stage begins
with.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from testbed.errors import CapabilityError, SpecError, UnknownNameError
from testbed.runtime.control_plane import EvaluationDone, StepDone
from testbed.spec import PipelineSpec, TextSpec
from testbed.sweep import plan
from testbed.training import pretrain
from testbed.training.alone import AloneJob, train_alone
from testbed.training.pretrain import LEARNED, Pretraining
from testbed.workloads import checkpoints, models
from testbed.workloads.build_stage import build_stage
from testbed.workloads.prepare import prepare_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "gpt2-nano-trained"
STEPS = 6


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A short text, and a short training on it, in a cache of its own."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"Line {number} of the text, {number**3} in all.\n" for number in range(3000)), "utf8")
    recipe = LEARNED[NAME]
    changes = {
        "workload": recipe.workload.model_copy(
            update={"text": str(path), "sequence_length": 16, "batch_size": 2, "validation_batches": 2}
        ),
        "training": recipe.training.model_copy(update={"steps": STEPS, "evaluate_every": 2}),
    }
    monkeypatch.setitem(LEARNED, NAME, recipe.model_copy(update=changes))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


class _Killed(BaseException):
    """Stands for what ends a process."""


@pytest.mark.slow
def test_a_training_that_was_killed_goes_on_to_the_same_bytes(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pretrain.pretrain(NAME)
    curve = (whole / "curve.csv").read_text().splitlines()
    assert len(curve) == 1 + STEPS // 2

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    monkeypatch.setattr(pretrain, "_KEEP_EVERY_S", 0.0)
    done: list[int] = []

    def kill(training: Pretraining, ahead_s: float) -> None:
        done.append(training.step)
        if len(done) in (2, 5):  # before that step is kept, so it is done again
            raise _Killed

    for _ in range(2):
        with pytest.raises(_Killed):
            pretrain.pretrain(NAME, kill)
    resumed = pretrain.pretrain(NAME, kill)
    assert done == [1, 2, 2, 3, 4, 4, 5, 6]
    for name in ("model.safetensors", "curve.csv", "config.json", "tokenizer.json", checkpoints.SEAL):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes(), name
    assert sorted(path.name for path in resumed.parent.iterdir()) == [NAME, f"{NAME}.lock"]
    pretrain.pretrain(NAME, lambda training, ahead_s: pytest.fail("it was trained again"))


def _losses(workload: TextSpec, stages: int, folder: Path, tokens: str) -> list[tuple[str, float | None]]:
    recipe = LEARNED[NAME]
    pipeline = PipelineSpec(stages=stages, microbatches=2, schedule="1f1b", in_flight=stages)
    changes = {"workload": workload, "pipeline": pipeline, "training": recipe.training.model_copy(update={"steps": 2})}
    heard: list[StepDone | EvaluationDone] = []
    job = AloneJob(recipe=recipe.model_copy(update=changes), vocabulary=4096, tokens=tokens, folder=str(folder))
    train_alone(job, heard.append)
    return [(type(message).__name__, message.loss) for message in heard if message.loss is not None]


@pytest.mark.slow
def test_every_stage_begins_with_the_weights_that_were_learned(text: Path, tmp_path: Path) -> None:
    pretrain.pretrain(NAME)
    fresh = LEARNED[NAME].workload
    learned = fresh.model_copy(update={"model": NAME, "weights": checkpoints.weights_digest(NAME)})
    tokens = str(prepare_tokens(str(text), NAME, tmp_path / "cache" / "testbed").path)
    losses = [_losses(learned, stages, tmp_path / f"run-{stages}", tokens) for stages in (1, 2, 3)]
    assert len(losses[0]) >= 3
    assert losses[0] == losses[1] == losses[2]  # bit for bit
    random = _losses(fresh, 2, tmp_path / "random", tokens)
    assert losses[0][0][1] < random[0][1]  # type: ignore[operator]


def test_weights_are_part_of_a_cell_and_altered_ones_are_refused(text: Path) -> None:
    folder = pretrain.pretrain(NAME)
    experiment = plan.load_experiment("default")

    def cell_with(model: str, **more: str) -> TextSpec:
        sets = {"workload.model": model, **{f"workload.{name}": value for name, value in more.items()}}
        changes = [f"{name}={json.dumps(value)}" for name, value in {**sets, "workload.sequence_length": 16}.items()]
        return plan.cells(experiment, "relay", overrides=changes)[0].workload

    digest = checkpoints.weights_digest(NAME)
    assert cell_with(NAME).weights == digest
    assert cell_with(NAME, weights=str(digest)).weights == digest
    named = cell_with("gpt2-nano")
    assert named.weights is None
    assert "weights" not in named.model_dump_json()  # so that cells from before there was such a field keep their ids
    with pytest.raises(SpecError, match="needs weights with SHA-256 abc"):
        cell_with(NAME, weights="abc")
    with pytest.raises(SpecError, match="a named size has none"):
        cell_with("gpt2-nano", weights="abc")

    planned = cell_with(NAME)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(SpecError, match=rf"was altered.*python -m testbed\.training\.pretrain {NAME}"):
        cell_with(NAME)
    with pytest.raises(SpecError, match="was altered"):
        build_stage(planned, stage=0, stages=1, seed=0, vocabulary=4096)
    checkpoints.seal(folder)  # as another checkpoint it may be used, in another cell
    with pytest.raises(SpecError, match="needs weights with SHA-256"):
        build_stage(planned, stage=0, stages=1, seed=0, vocabulary=4096)
    assert cell_with(NAME).weights not in (None, digest)


def test_what_cannot_be_trained(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'gpt2-mini-trained'"):
        pretrain.pretrain("gpt2-mini-learned")
    monkeypatch.setattr(pretrain, "available_memory", lambda: 1000)
    with pytest.raises(CapabilityError, match=r"needs .* of memory, but only 1 kB are free"):
        pretrain.pretrain(NAME)
    assert pretrain.main([NAME]) == 2
    assert "of memory" in capsys.readouterr().err


def test_each_is_named_with_the_command_that_makes_it() -> None:
    made = {name: command for name, command in models.MADE.items() if command.startswith("testbed.training.pretrain")}
    assert made == {name: f"testbed.training.pretrain {name}" for name in LEARNED}


@pytest.mark.slow
def test_the_small_one_has_learned_more_than_how_frequent_words_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokens = np.load(prepare_tokens("bundled", "gpt2-nano", tmp_path / "testbed").path)
    shares = np.bincount(tokens) / len(tokens)
    unigram = -float((shares[shares > 0] * np.log(shares[shares > 0])).sum())
    assert unigram == pytest.approx(6.62, abs=0.01)
    curve = (pretrain.pretrain(NAME) / "curve.csv").read_text().splitlines()
    assert float(curve[-1].split(",")[2]) < unigram - 0.1
