"""Stages in threads over loopback, with a toy model: every cut, schedule and depth trains the same, bit for bit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from testbed.codecs.contract import Codec, Context, MessageKey
from testbed.codecs.make import make as make_codec
from testbed.errors import StageError, TransportError
from testbed.jobs.kind import Setting
from testbed.nodes.optimise import learning_rate
from testbed.profiles import load_profile
from testbed.records import StepRecord
from testbed.runtime.control_plane import Ended, EvaluationDone, StepDone
from testbed.runtime.frame import HEADER_BYTES
from testbed.spec import Cell, Measured, OptimiserSpec, Paced, PipelineSpec, TextSpec, TrainingSpec, recipe_of
from testbed.training.stages import PipelineTraining
from tests.over_loopback import run_places

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, WIDTH, LENGTH, BATCH, MICROBATCHES = 17, 8, 5, 8, 4


def a_cell(stages: int, schedule: str = "1f1b", in_flight: int = 3, **training: Any) -> Cell:
    return Cell(
        codec="fp32",
        profiles=(load_profile("datacenter"),),
        topology="star",
        engine="relay",
        compute=Measured(),
        workload=TextSpec(
            family="gpt2", model="toy", text="none", sequence_length=LENGTH, batch_size=BATCH, validation_batches=2
        ),
        pipeline=PipelineSpec(stages=stages, microbatches=MICROBATCHES, schedule=schedule, in_flight=in_flight),
        optimiser=OptimiserSpec(learning_rate=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, clip_norm=0.3),
        training=TrainingSpec(**{"steps": 6, "warmup_steps": 1, "seed": 5, "evaluate_every": 2, **training}),
    )


def piped(cell: Cell, **changes: Any) -> Cell:
    return cell.model_copy(update={"pipeline": cell.pipeline.model_copy(update=changes)})


class Toy(nn.Module):
    """Six residual layers; every stage builds them all from one seed and keeps its own."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            embed, head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
            layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
        self.embed = embed if stage == 0 else None
        self.layers = nn.ModuleList(layers[stage * 6 // stages : (stage + 1) * 6 // stages])
        self.head = head if stage == stages - 1 else None
        self.drawn: list[tuple[bool, int, int]] = []

    def by_token(self) -> list[nn.Parameter]:
        return [parameter for part in (self.embed, self.head) if part is not None for parameter in part.parameters()]

    def draw(self, step: int, microbatch: int) -> None:
        self.drawn.append((torch.is_grad_enabled(), step, microbatch))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs) if self.embed is not None else inputs
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden) if self.head is not None else hidden

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ToyBatch(NamedTuple):
    inputs: Tensor
    targets: Tensor
    samples: tuple[int, ...]


class ToyData:
    def train(self, step: int, microbatch: int, microbatches: int) -> ToyBatch:
        draw = torch.Generator().manual_seed(1000 * step + microbatch)
        text = torch.randint(TOKENS, (BATCH // microbatches, LENGTH + 1), generator=draw)
        return ToyBatch(text[:, :-1], text[:, 1:], tuple(range(BATCH // microbatches)))

    def validation(self, index: int, microbatch: int, microbatches: int) -> ToyBatch:
        return self.train(10_000 + index, microbatch, microbatches)


class Plain:
    """The identity as a codec; its tensors lie in the payload's memory, wherever that begins."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def encode(self, tensor: Tensor, key: MessageKey) -> bytes:
        return tensor.contiguous().numpy().tobytes()

    def decode(self, payload: Any, key: MessageKey) -> Tensor:
        return torch.frombuffer(bytearray(payload), dtype=torch.float32).view(len(key.samples), LENGTH, WIDTH)


class Result(NamedTuple):
    records: list[list[StepRecord]]
    told: list[StepDone | EvaluationDone]
    parameters: list[Tensor]
    errors: list[BaseException | None]
    ended: list[Ended | None]
    models: list[Any]

    def losses(self, phase: str = "train") -> list[float | None]:
        return [r.loss for r in self.records[-1] if r.phase == phase]


class ToyTraining(PipelineTraining):
    """Stages of a toy, or of what `model` makes of a stage, of how many."""

    most_bytes = 1 << 20

    def __init__(
        self,
        setting: Setting,
        make: Callable[[Context], Codec] = Plain,
        data: Callable[[int], Any] = lambda stage: ToyData(),
        model: Callable[[int, int], Any] = Toy,
    ) -> None:
        super().__init__(setting)
        stages = setting.recipe.pipeline.stages
        self.models = [model(stage, stages) for stage in range(stages)]
        self._make, self._data = make, data

    def model(self, place: int) -> Any:
        return self.models[place]

    def data(self, place: int) -> Any:
        return self._data(place)

    def codec(self, context: Context) -> Codec:
        return self._make(context)

    @property
    def parameters(self) -> list[Tensor]:
        return [p for model in self.models for p in model.parameters()]


def train(cell: Cell, *of: Any, asked: Callable[[int], bool] = lambda stage: False, **named: Any) -> Result:
    """Run every stage of a cell in a thread, connected over loopback; the rest as for `ToyTraining`."""
    toy = ToyTraining(Setting(recipe_of(cell), TOKENS, ""), *of, **named)
    ran = run_places(cell, lambda setting: toy, asked=asked)
    return Result(ran.records, ran.told, toy.parameters, ran.errors, ran.ended, toy.models)


# ------------------------------------------------------------------ the maths
@pytest.mark.parametrize(
    ("stages", "schedule", "in_flight", "changes"),
    [
        (1, "gpipe", 1, {"recompute": True}),
        (2, "gpipe", 1, {}),
        (3, "gpipe", 1, {}),
        (2, "1f1b", 2, {}),
        (3, "1f1b", 1, {}),
        (3, "1f1b", 3, {}),
        (3, "1f1b", 3, {"recompute": True}),
        (3, "1f1b", 9, {}),
        (6, "1f1b", 6, {}),
        (3, "gpipe", 3, {"microbatches": 2, "accumulation": 2}),
        (3, "1f1b", 3, {"microbatches": 2, "accumulation": 2}),
        (3, "1f1b", 3, {"microbatches": 1, "accumulation": 4}),
    ],
)
def test_cut_schedule_depth_recomputation_and_accumulation_do_not_touch_the_numbers(
    stages: int, schedule: str, in_flight: int, changes: dict[str, Any]
) -> None:
    whole, cut = train(a_cell(1)), train(piped(a_cell(stages, schedule, in_flight), **changes))
    assert cut.errors == [None] * stages
    assert cut.losses() == whole.losses()
    assert cut.losses("evaluation") == whole.losses("evaluation")
    norms = [r.gradient_norm or 0 for r in whole.records[0]]
    assert [r.gradient_norm or 0 for r in cut.records[0]] == norms
    assert max(norms) > a_cell(1).optimiser.clip_norm, "gradients are clipped"
    for found, expected in zip(cut.parameters, whole.parameters, strict=True):
        assert torch.equal(found, expected)
    assert len(trained(cut, stages - 1, 0).actions) == 2 * MICROBATCHES


def test_random_draws_are_keyed_before_every_training_forward_and_never_in_an_evaluation() -> None:
    """What is computed again is computed with a graph then, and without one at first."""
    for recompute in (False, True):
        for model in train(piped(a_cell(2, steps=2), recompute=recompute)).models:
            keys = [list(key) for key in itertools.product(range(2), range(MICROBATCHES))]
            with_graph, without = ([key for graph, *key in model.drawn if graph == wanted] for wanted in (True, False))
            assert sorted(with_graph) == keys
            assert sorted(without) == (keys if recompute else [])


def test_the_learning_rate_is_recorded_and_applied() -> None:
    cell = a_cell(2)
    spec = cell.optimiser.model_copy(update={"learning_rate_warmup": 2, "learning_rate_decay": "cosine"})
    changed = train(cell.model_copy(update={"optimiser": spec}))
    for records in changed.records:
        rates = [record.learning_rate for record in records if record.phase == "train"]
        assert rates == [learning_rate(spec, step, 6) for step in range(6)]
        assert all(record.learning_rate is None for record in records if record.phase != "train")
    constant = train(cell)
    assert changed.losses()[0] == constant.losses()[0]
    assert changed.losses()[1:] != constant.losses()[1:]


# ------------------------------------------------------------------ the records
class Coarse(Plain):
    """A codec that loses much, and is told of every message key."""

    seen: ClassVar[set[str]] = set()

    def encode(self, tensor: Tensor, key: MessageKey) -> bytes:
        self.seen.add(key.phase)
        return super().encode(tensor.round(decimals=0), key)

    def decode(self, payload: Any, key: MessageKey) -> Tensor:
        self.seen.add(key.phase)
        return super().decode(payload, key)


def test_an_evaluation_without_the_codec_is_one_and_leaves_the_training_alone() -> None:
    both, once = (train(a_cell(3, steps=4, evaluate_uncompressed=asked), Coarse) for asked in (True, False))
    expected = [("train", 0), ("train", 1), ("evaluation", 2), ("uncompressed", 2)]
    expected += [("train", 2), ("train", 3), ("evaluation", 4), ("uncompressed", 4)]
    assert [[(r.phase, r.step) for r in records] for records in both.records] == [expected] * 3
    assert Coarse.seen == {"train", "evaluation"}
    assert both.losses() == once.losses()
    assert both.losses("evaluation") == once.losses("evaluation")
    assert both.losses("uncompressed") != both.losses("evaluation")
    plain = train(a_cell(3, steps=4, evaluate_uncompressed=True))
    assert plain.losses("uncompressed") == plain.losses("evaluation")
    told = [(m.phase, m.step) for m in both.told if isinstance(m, EvaluationDone)]
    assert told == [("evaluation", 2), ("uncompressed", 2), ("evaluation", 4), ("uncompressed", 4)]


# ------------------------------------------------------------------ why training ends
def phases_of(result: Result) -> list[list[tuple[str, int]]]:
    return [[(record.phase, record.step) for record in records] for records in result.records]


def test_a_budget_ends_training_and_is_followed_by_an_evaluation() -> None:
    result = train(a_cell(3, steps=100_000, evaluate_every=0, budget_s=0.2))
    assert result.ended == ["budget"] * 3
    one, two, three = phases_of(result)
    steps = len(one) - 1
    assert one == two == three == [*(("train", step) for step in range(steps)), ("evaluation", steps)]
    lines = [max(trained(result, stage, step).optimiser_start_ns or 0 for stage in range(3)) for step in range(steps)]
    begin = max(records[0].start_ns for records in result.records)
    assert lines[-1] - begin >= 0.2e9 - 5e6, "the first step begins a moment before the first record"
    assert steps < 2 or lines[-2] - begin < 0.2e9


@pytest.mark.slow
@pytest.mark.parametrize("dilation", [1, 3])
def test_a_budget_is_in_the_emulated_device_s_time(dilation: int) -> None:
    """A step takes 30 ms of it or, where this machine is busy, longer; evaluations are left out."""
    compute = Paced(forward_ns=(2_500_000,), backward_ns=(5_000_000,), update_ns=0, source="stated", dilation=dilation)
    cell = a_cell(1, steps=1000, evaluate_every=1, budget_s=0.29)
    result = train(cell.model_copy(update={"compute": compute}))
    taken_ns = [record.end_ns - record.start_ns for record in result.records[0] if record.phase == "train"]
    assert result.ended == ["budget"]
    assert 1 <= len(taken_ns) <= 10
    # What an update or an evaluation took too long is made up for by the next steps.
    assert result.records[0][-1].end_ns - result.records[0][0].start_ns >= 0.8 * 0.29e9 * dilation


@pytest.mark.parametrize("told", [0, 1, 2])
def test_one_stage_that_is_asked_to_finish_is_enough(told: int) -> None:
    count = itertools.count()
    result = train(a_cell(3, steps=100_000, evaluate_every=0), asked=lambda stage: stage == told and next(count) == 3)
    assert result.ended == ["asked"] * 3
    assert phases_of(result) == [[("train", step) for step in range(4)]] * 3


def test_records_hold_together() -> None:
    stages = 3
    result = train(a_cell(stages))
    raw = BATCH // MICROBATCHES * LENGTH * WIDTH * 4
    for stage, records in enumerate(result.records):
        boundaries = (stage > 0) + (stage < stages - 1)
        for record in records:
            training = record.phase == "train"
            count = MICROBATCHES * (1 if training else 2)
            assert record.warmup == (training and record.step == 0)
            assert record.tokens == count * (BATCH // MICROBATCHES) * LENGTH
            assert (record.loss is None) == (stage < stages - 1)
            assert len(record.actions) == count * (2 if training else 1)
            assert len(record.sockets) == boundaries
            for action in record.actions:
                times = (action.asked_ns, action.input_ns, action.decoded_ns, action.computed_ns, action.encoded_ns)
                assert list(times) == sorted(times)
            flat = [(a.asked_ns, a.encoded_ns) for a in record.actions]
            assert all(one[1] <= two[0] for one, two in itertools.pairwise(flat))
            assert record.start_ns <= flat[0][0] <= flat[-1][1] <= record.end_ns
            if training:
                assert record.optimiser_start_ns is not None
                assert record.synchronised_ns is not None
                assert flat[-1][1] <= record.optimiser_start_ns <= record.synchronised_ns <= record.end_ns
            assert len(record.sent) == (count * boundaries if training else count * (stage < stages - 1))
            assert all(
                f.raw_bytes == f.payload_bytes == raw and f.frame_bytes == raw + HEADER_BYTES for f in record.sent
            )
    for step in range(6):
        sent = {(s, f.direction, f.microbatch): f for s in range(stages) for f in trained(result, s, step).sent}
        received = {(s, f.direction, f.microbatch): f for s in range(stages) for f in trained(result, s, step).received}
        assert len(sent) == len(received) == 2 * (stages - 1) * MICROBATCHES
        for (stage, direction, microbatch), frame in received.items():
            origin = sent[stage - 1 if direction == "forward" else stage + 1, direction, microbatch]
            assert frame.payload_bytes == origin.payload_bytes
            assert origin.first_byte_ns == frame.first_byte_ns


def trained(result: Result, stage: int, step: int) -> StepRecord:
    return next(r for r in result.records[stage] if r.phase == "train" and r.step == step)


def test_a_codec_s_two_ends_get_the_same_context_and_keys() -> None:
    seen: dict[tuple[int, str, str], list[MessageKey]] = {}

    class Spy(Plain):
        def encode(self, tensor: Tensor, key: MessageKey) -> bytes:
            seen.setdefault((self.context.boundary, self.context.direction, "out"), []).append(key)
            return super().encode(tensor, key)

        def decode(self, payload: Any, key: MessageKey) -> Tensor:
            seen.setdefault((self.context.boundary, self.context.direction, "in"), []).append(key)
            return super().decode(payload, key)

    train(a_cell(3), Spy)
    assert sorted(seen) == sorted(itertools.product((0, 1), ("backward", "forward"), ("in", "out")))
    for boundary, direction in itertools.product((0, 1), ("forward", "backward")):
        assert seen[boundary, direction, "in"] == seen[boundary, direction, "out"]


def test_to_a_codec_each_validation_batch_is_a_step_of_its_own() -> None:
    """So that what it remembers of a micro-batch is as old there as it is in training."""
    seen: list[MessageKey] = []

    class Spy(Plain):
        def encode(self, tensor: Tensor, key: MessageKey) -> bytes:
            if key.phase == "evaluation":
                seen.append(key)
            return super().encode(tensor, key)

    cell = a_cell(2, steps=4, evaluate_every=2)
    result = train(cell, Spy)
    parts = cell.pipeline.microbatches
    batches = len(seen) // (2 * parts)
    assert batches == cell.workload.validation_batches
    assert [(key.step, key.microbatch) for key in seen] == list(itertools.product(range(2 * batches), range(parts)))
    assert seen[0].samples == seen[batches * parts].samples
    for record in (one for one in result.records[0] if one.phase == "evaluation"):
        assert [sent.microbatch for sent in record.sent] == list(range(batches * parts))


def test_boundaries_and_directions_have_the_codecs_that_the_text_gives_them() -> None:
    text = "0: fwd=bf16, bwd=int8; rest: fp32"
    found = train(a_cell(3), partial(make_codec, text))
    assert found.errors == [None] * 3
    rows, header = BATCH // MICROBATCHES * LENGTH, 4 + 4 * 3
    sizes = {(0, "forward"): 2 * rows * WIDTH, (0, "backward"): rows * (4 + WIDTH)}
    for stage, records in enumerate(found.records):
        for sent in itertools.chain.from_iterable(record.sent for record in records):
            boundary = stage - (sent.direction == "backward")
            assert sent.payload_bytes == header + sizes.get((boundary, sent.direction), 4 * rows * WIDTH)
    whole = train(a_cell(3), partial(make_codec, "fp32"))
    assert found.losses()[0] != whole.losses()[0]


def test_what_an_adaptive_codec_took_is_recorded() -> None:
    found = train(a_cell(3), partial(make_codec, "zstd(adaptive(100000))"))
    frames = [frame for records in found.records for record in records for frame in record.sent]
    # of links that take no time the mildest is enough
    assert {frame.choice for frame in frames} == {"mild"}
    plain = train(a_cell(3, steps=2), partial(make_codec, "int8"))
    assert {frame.choice for records in plain.records for record in records for frame in record.sent} == {None}


# ------------------------------------------------------------------ failures
class Broken(ToyData):
    def train(self, step: int, microbatch: int, microbatches: int) -> ToyBatch:
        if step == 2:
            raise StageError("told to fail at step 2")
        return super().train(step, microbatch, microbatches)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_when_one_stage_fails_the_others_are_told_by_their_connections(broken: int) -> None:
    result = train(a_cell(3), data=lambda stage: Broken() if stage == broken else ToyData())
    assert str(result.errors[broken]) == "told to fail at step 2"
    others = [error for stage, error in enumerate(result.errors) if stage != broken]
    assert all(isinstance(error, TransportError) for error in others), others
    assert [len([r for r in records if r.phase == "train"]) for records in result.records] == [2, 2, 2]


@pytest.mark.parametrize(
    ("value", "direction", "named"),
    [
        ("nan", "forward", "the loss is nan at train step 3, micro-batch 0: .* lower optimiser.learning_rate"),
        ("inf", "backward", "the gradient norm is .* at train step 3: .* lower optimiser.learning_rate"),
    ],
)
def test_what_is_no_number_names_the_step(value: str, direction: str, named: str) -> None:
    """A loss stops the last stage, and a gradient's norm, which all know, every one."""

    class Poison(Plain):
        def decode(self, payload: Any, key: MessageKey) -> Tensor:
            tensor = super().decode(payload, key)
            return tensor * float(value) if key.step == 3 and self.context.direction == direction else tensor

    result = train(a_cell(2, evaluate_every=0), Poison)
    for error in result.errors if direction == "backward" else result.errors[1:]:
        assert isinstance(error, StageError)
        assert re.search(named, str(error))
