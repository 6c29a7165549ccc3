"""All stages in one process: the numbers and the bytes of a run over links, to the last bit."""

from __future__ import annotations

import io
import itertools
import json
import math
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from testbed.codecs.catalogue import table as codecs
from testbed.codecs.contract import Codec, Context, MessageKey, Payload
from testbed.codecs.make import make
from testbed.errors import SpecError, StageError, TransportError
from testbed.jobs.kind import Setting
from testbed.records import Floors, StepRecord, TrainingRecord
from testbed.results import read_json
from testbed.runtime.control_plane import Ended, EvaluationDone, StepDone
from testbed.spec import Cell, TextSpec, recipe_of
from testbed.sweep import trainings
from testbed.training import alone
from testbed.training.alone import AloneJob, train_alone, train_together
from testbed.training.stages import PipelineTraining
from testbed.workloads.build_stage import build_stage
from testbed.workloads.floor import bigram_floor, unigram_floor
from testbed.workloads.stage_model import StageModel
from tests.nodes.test_stage import TOKENS, ToyTraining, a_cell, train

pytestmark = pytest.mark.usefixtures("one_thread", "tiny_models")
CODECS = [
    *(row.example_text for row in codecs.CODECS.values() if not row.measures),
    "ef(lowrank(2))",
    "fwd=aqsgd(int4), bwd=int8",
    "bottleneck(4, maxout, inner=bf16)",
    "0: int8; 1: delta-int8",
]


@pytest.fixture(autouse=True)
def _drawing_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, forward = threading.RLock(), StageModel.forward

    def drawing_alone(model: StageModel, inputs: Tensor) -> Tensor:
        with lock:
            return forward(model, inputs)

    # The stages that are connected by sockets are processes elsewhere; here they share torch's generator.
    monkeypatch.setattr(StageModel, "forward", drawing_alone)


class Trained(NamedTuple):
    """What must not depend on how the stages are connected."""

    numbers: list[list[tuple[Any, ...]]]
    """By stage and record."""
    payloads: dict[tuple[Any, ...], tuple[int, int]]
    """Size and checksum of every payload, by boundary, direction and message key."""
    parameters: list[Tensor]
    ended: list[Ended | None]
    told: list[tuple[Any, ...]]


class Noting:
    """A codec whose payloads are noted."""

    def __init__(self, inner: Codec, context: Context, notes: dict[tuple[Any, ...], tuple[int, int]]) -> None:
        self.inner, self._context, self._notes = inner, context, notes

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        payload = self.inner.encode(tensor, key)
        self._notes[(self._context.boundary, self._context.direction, key)] = len(payload), zlib.crc32(payload)
        return payload

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        return self.inner.decode(payload, key)


def a_tiny_cell(
    stages: int, codec: str = "fp32", *, family: str = "gpt2", dropout: float = 0.0, **changes: Any
) -> Cell:
    pipeline = {
        name: changes.pop(name) for name in ("schedule", "in_flight", "recompute", "accumulation") if name in changes
    }
    cell = a_cell(stages, **{"steps": 4, **changes})
    pipeline |= {"microbatches": 4 // pipeline.get("accumulation", 1)}
    workload = {"model": f"{family}-tiny", "family": family, "dropout": dropout}
    return cell.model_copy(
        update={
            "codec": codec,
            "workload": cell.workload.model_copy(update=workload),
            "pipeline": cell.pipeline.model_copy(update=pipeline),
        }
    )


def model_of(cell: Cell) -> Callable[[int, int], Any]:
    return lambda stage, stages: build_stage(cell.workload, stage=stage, stages=stages, seed=5, vocabulary=TOKENS)


def numbers(records: list[StepRecord]) -> list[tuple[Any, ...]]:
    return [
        (
            *(record.step, record.phase, record.warmup, record.loss, record.gradient_norm, record.learning_rate),
            record.tokens,
            [(action.kind, action.microbatch) for action in record.actions],
            [
                (sent.direction, sent.microbatch, sent.raw_bytes, sent.payload_bytes, sent.choice)
                for sent in record.sent
            ],
            [(received.direction, received.microbatch, received.payload_bytes) for received in record.received],
        )
        for record in records
    ]


def told_of(messages: list[StepDone | EvaluationDone]) -> list[tuple[Any, ...]]:
    return [(type(message).__name__, message.step, message.loss) for message in messages]


def noting(codec: str, notes: dict[tuple[Any, ...], tuple[int, int]]) -> Callable[[Context], Codec]:
    return lambda context: Noting(make(codec, context), context, notes)


def over_loopback(cell: Cell) -> Trained:
    notes: dict[tuple[Any, ...], tuple[int, int]] = {}
    found = train(cell, noting(cell.codec, notes), model=model_of(cell))
    assert found.errors == [None] * cell.pipeline.stages
    records = [numbers(stage) for stage in found.records]
    return Trained(records, notes, found.parameters, found.ended, told_of(found.told))


def in_memory(cell: Cell) -> tuple[Trained, list[list[StepRecord]]]:
    notes: dict[tuple[Any, ...], tuple[int, int]] = {}
    outputs = [io.StringIO() for _ in range(cell.pipeline.stages)]
    told: list[StepDone | EvaluationDone] = []
    toy = toy_of(cell, noting(cell.codec, notes))
    ended = train_together(toy, outputs, report=told.append).ended
    records = [[StepRecord.model_validate_json(line) for line in output.getvalue().splitlines()] for output in outputs]
    numbered = [numbers(stage) for stage in records]
    return Trained(numbered, notes, toy.parameters, [ended] * len(outputs), told_of(told)), records


def toy_of(cell: Cell, make: Callable[[Context], Codec], kind: type[ToyTraining] = ToyTraining) -> ToyTraining:
    return kind(Setting(recipe_of(cell), TOKENS, ""), make, model=model_of(cell))


def check_same(cell: Cell) -> Trained:
    expected, (found, records) = over_loopback(cell), in_memory(cell)
    assert found.numbers == expected.numbers
    assert found.payloads == expected.payloads
    assert len(found.payloads) == sum(
        len(record.sent) for stage in records for record in stage if record.phase != "uncompressed"
    )
    assert all(torch.equal(a, b) for a, b in zip(found.parameters, expected.parameters, strict=True))
    assert (found.ended, found.told) == (expected.ended, expected.told)
    return found


# ------------------------------------------------------------------ the law
@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_has_the_numbers_and_bytes_of_a_run_over_links_and_evaluations_do_not_touch_it(codec: str) -> None:
    found = check_same(a_tiny_cell(3, codec))
    alone, _ = in_memory(a_tiny_cell(3, codec, evaluate_every=0))
    assert all(torch.equal(a, b) for a, b in zip(found.parameters, alone.parameters, strict=True))
    losses = [record[3] for record in found.numbers[-1]]
    assert all(loss is not None and math.isfinite(loss) for loss in losses)
    sent = {(stage, way) for stage, records in enumerate(found.numbers) for record in records for way, *_ in record[8]}
    assert sent == {(0, "forward"), (1, "forward"), (1, "backward"), (2, "backward")}


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_cut_and_schedule(stages: int, schedule: str) -> None:
    check_same(a_tiny_cell(stages, "delta-int8", schedule=schedule))


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"recompute": True},
        {"accumulation": 2},
        {"accumulation": 2, "recompute": True, "schedule": "gpipe"},
        {"family": "llama"},
        {"family": "llama", "dropout": 0.2, "recompute": True},
        {"dropout": 0.2},
        {"evaluate_uncompressed": True},
        {"evaluate_every": 1, "target_loss": 100.0},
    ],
    ids=str,
)
def test_everything_else_that_a_recipe_says(changes: dict[str, Any]) -> None:
    for codec in ("delta-int8", "bottleneck(4)"):
        ended = check_same(a_tiny_cell(3, codec, **changes)).ended
        assert ended == ["target" if "target_loss" in changes else "steps"] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec",
    [pytest.param(codec, marks=[] if number % 9 == 0 else pytest.mark.slow) for number, codec in enumerate(CODECS)],
)
def test_schedule_and_depth_change_no_number_and_no_byte(codec: str) -> None:
    """What `sweep.trainings` relies on: each codec sees its messages in one order under every schedule."""
    of = {
        (schedule, in_flight): in_memory(a_tiny_cell(3, codec, schedule=schedule, in_flight=in_flight))[0]
        for schedule, in_flight in (("gpipe", 1), ("1f1b", 2), ("1f1b", 3), ("1f1b", 4))
    }
    first, *others = of.values()
    orders = [[list(record[7]) for record in trained.numbers[0]] for trained in of.values()]
    assert orders[0] != orders[1], "they go through different schedules"
    for other in others:
        assert other.payloads == first.payloads
        assert _sorted(other.numbers) == _sorted(first.numbers)
        assert all(torch.equal(a, b) for a, b in zip(other.parameters, first.parameters, strict=True))
        assert other.told == first.told


def _sorted(numbers: list[list[tuple[Any, ...]]]) -> list[list[tuple[Any, ...]]]:
    return [
        [tuple(sorted(part) if isinstance(part, list) else part for part in record) for record in stage]
        for stage in numbers
    ]


# ------------------------------------------------------------------ how
def test_one_stage_acts_at_any_moment_and_times_are_in_order() -> None:
    _, records = in_memory(a_tiny_cell(3, "int8"))
    spans = []
    for stage in records:
        for record in stage:
            assert record.counters is None
            assert record.sockets == ()
            for action in record.actions:
                times = [action.asked_ns, action.input_ns, action.decoded_ns, action.computed_ns, action.encoded_ns]
                assert times == sorted(times)
                spans.append((action.input_ns, action.encoded_ns))
    spans.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


class Breaks:
    """The identity until step 2, where the stage that decodes fails."""

    def __init__(self, context: Context) -> None:
        self._codec = make("fp32", context)

    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return self._codec.encode(tensor, key)

    def decode(self, payload: Payload, key: MessageKey) -> Tensor:
        if key.step == 2:
            raise ValueError("this codec is broken")
        return self._codec.decode(payload, key)


class Huge(Breaks):
    def encode(self, tensor: Tensor, key: MessageKey) -> Payload:
        return bytes(10_000_000)


class Bounded(ToyTraining):
    most_bytes = PipelineTraining.most_bytes


@pytest.mark.parametrize(
    ("codec", "error", "says"),
    [
        (Breaks, StageError, "stage 1: ValueError: this codec is broken"),
        (Huge, TransportError, "10000000 bytes; this job accepts"),
        (partial(make, "adaptive(50)"), SpecError, r'stage 0: .*timing = "live"'),
    ],
)
def test_a_stage_that_fails_ends_all_and_is_named(codec: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        train_together(toy_of(a_tiny_cell(3), codec, Bounded), [io.StringIO() for _ in range(3)])


# ------------------------------------------------------------------ the folder
@pytest.fixture
def job(tmp_path: Path) -> AloneJob:
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.random.default_rng(0).integers(TOKENS, size=20_000).astype(np.uint16))
    recipe = recipe_of(a_tiny_cell(2, "int8"))
    return AloneJob(recipe=recipe, vocabulary=TOKENS, tokens=str(tokens), folder=str(tmp_path / "trained" / "one"))


def test_both_floors_are_recorded_and_computed_after_the_peak_memory_was_read(
    job: AloneJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def noted(name: str) -> Any:
        does = getattr(alone, name)

        def noting(*given: Any) -> Any:
            order.append(name)
            return does(*given)

        return noting

    for name in ("peak_memory", "floors_of"):
        monkeypatch.setattr(alone, name, noted(name))
    record = train_alone(job, lambda message: None)
    assert order == ["peak_memory", "floors_of"]
    tokens, spec = np.load(job.tokens), job.recipe.workload
    assert isinstance(spec, TextSpec)
    floors = Floors(unigram_floor(tokens, spec, TOKENS), bigram_floor(tokens, spec, TOKENS))
    assert (record.unigram_floor, record.bigram_floor) == floors == trainings.floors_of(Path(job.folder))


def test_a_folder_is_whole_or_not_there(job: AloneJob) -> None:
    folder, seen = Path(job.folder), []
    record = train_alone(job, lambda message: seen.append(folder.exists()))
    assert not any(seen)
    assert read_json(folder / "training.json", TrainingRecord) == record
    assert record.recipe == job.recipe
    assert record.ended == "steps"
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "steps-0.jsonl",
        "steps-1.jsonl",
        "training.json",
    ]
    first = (folder / "steps-1.jsonl").read_text()

    def stop(message: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, StageError)):
        train_alone(job, stop)
    assert [path.name for path in folder.parent.iterdir()] == ["one"], "what was there stays, and no draft"
    train_alone(job, lambda message: None)
    losses = [
        [json.loads(line)["loss"] for line in text.splitlines()]
        for text in (first, (folder / "steps-1.jsonl").read_text())
    ]
    assert losses[0] == losses[1]


PRINTS = """
from testbed.frozen import Frozen
from testbed.training.alone import obey

class Asked(Frozen):
    number: int

def does(asked):
    print("a codec of the user's speaks")
    return asked

obey(Asked, does, "Answers")
"""


@pytest.mark.slow
def test_what_a_user_s_codec_prints_is_no_part_of_the_answer(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"number":7}')
    done = subprocess.run(
        [sys.executable, "-c", PRINTS, tmp_path / "job.json"], capture_output=True, text=True, check=True
    )
    assert done.stdout == '{"number":7}\n'
    assert done.stderr == "a codec of the user's speaks\n"
