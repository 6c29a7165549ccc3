"""Data parallel training of a network of 4,000 parameters, or of digits, in one process: what tests of it share."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from testbed.jobs.actions import EndStep, Node
from testbed.jobs.decision import Decision
from testbed.jobs.kind import Setting
from testbed.jobs.loop import NodeLane
from testbed.jobs.pipeline import Ended
from testbed.nodes import arrivals, worker
from testbed.nodes.arrivals import Rounds, Server
from testbed.nodes.learners import learner_of
from testbed.nodes.worker import Evaluated, Worker
from testbed.nodes.worker_node import WorkerNode
from testbed.profiles import load_profile
from testbed.records import StepRecord
from testbed.spec import (
    Cell,
    CodecCost,
    DataParallelSpec,
    Exchange,
    ImagesSpec,
    OptimiserSpec,
    Paced,
    PipelineSpec,
    Recipe,
    TextSpec,
    TrainingSpec,
)
from testbed.training.alone import train_together
from testbed.training.kinds import Measure
from testbed.training.workers import ReplicasTraining

INPUTS, INNER, CLASSES, EXAMPLES = 16, 64, 40, 4
EXCHANGES: list[Exchange] = ["all-to-all", "star", "all-gather", "all-reduce"]
SPARSE = "ef(topk(0.05, values=fp32))"
FORWARD_NS, BACKWARD_NS, UPDATE_NS = 10_000_000, 20_000_000, 1_000_000
INSTANT = Paced(forward_ns=(1,), backward_ns=(1,), update_ns=0, source="stated")


class Examples(NamedTuple):
    inputs: Tensor
    targets: Tensor
    samples: tuple[int, ...] = ()


class Data:
    """Batches as the pipelines' data gives them: each part is the same, however many workers read them."""

    def train(self, batch: int, part: int, parts: int) -> Examples:
        draw = torch.Generator().manual_seed(1000 * batch + part)
        return Examples(
            torch.randn(EXAMPLES, INPUTS, generator=draw), torch.randint(CLASSES, (EXAMPLES,), generator=draw)
        )

    def validation(self, batch: int, part: int, parts: int) -> Examples:
        return self.train(500 + batch, part, parts)


class Net(nn.Module):
    """A model as the pipelines know it: of the small network, or of another one."""

    def __init__(self, layers: nn.Module | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.layers = layers or nn.Sequential(nn.Linear(INPUTS, INNER), nn.Tanh(), nn.Linear(INNER, CLASSES))

    def draw(self, step: int, part: int) -> None:
        """Draw nothing."""

    def by_token(self) -> list[nn.Parameter]:
        """No embeddings."""
        return []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)


class Learner:
    """What `learners.TextLearner` is for a text."""

    tables = ()

    def __init__(self, parts: Sequence[int], number: int) -> None:
        self.net, self.data = Net(), Data()
        self.parts, self._first, self._all = parts[number], sum(parts[:number]), sum(parts)
        self.parameters = list(self.net.parameters())

    def loss(self, batch: int, part: int) -> Tensor:
        chosen = self.data.train(batch, self._first + part, self._all)
        return self.net.loss(self.net(chosen.inputs), chosen.targets)

    def evaluate(self) -> Evaluated:
        with torch.no_grad():
            chosen = self.data.validation(0, 0, 1)
            return Evaluated(self.net.loss(self.net(chosen.inputs), chosen.targets).item())


TEXT = TextSpec(family="gpt2", model="gpt2-nano", text="none", sequence_length=2, batch_size=16, validation_batches=1)
"""Nobody reads it: the small network has data of its own."""
DIGITS = ImagesSpec(model="digits-cnn", images="digits", alpha=0.3, batch_size=16)


def learner_for(recipe: Recipe, number: int, kind: type[Learner] = Learner) -> worker.Learner:
    """What a worker learns: the small network, or the recipe's images."""
    assert recipe.data is not None
    if isinstance(recipe.workload, ImagesSpec):
        return learner_of(recipe, number, vocabulary=10, tokens="")
    return kind(recipe.data.parts, number)


def a_recipe(
    exchange: Exchange = "all-to-all",
    codec: str = "fp32",
    *,
    workers: int = 4,
    steps: int = 6,
    sgd: bool = False,
    microbatches: int = 1,
    evaluate_every: int = 0,
    answer: str = "fp32",
    workload: TextSpec | ImagesSpec = TEXT,
    **data: Any,
) -> Recipe:
    optimiser = {
        "learning_rate": 0.05,
        "weight_decay": 0.0,
        "beta1": 0.0 if sgd else 0.9,
        "beta2": 0.0 if sgd else 0.95,
    }
    return Recipe(
        codec=codec,
        workload=workload,
        pipeline=PipelineSpec(stages=1, microbatches=microbatches, schedule="gpipe", in_flight=1),
        data=DataParallelSpec(
            workers=workers,
            exchange=exchange,
            answer=answer if exchange == "star" else None,
            **{"staleness": 0, "local_steps": 1, **data},
        ),
        optimiser=OptimiserSpec(algorithm="sgd" if sgd else "adamw", clip_norm=1e6 if sgd else 0.5, **optimiser),
        training=TrainingSpec(steps=steps, warmup_steps=0, seed=3, evaluate_every=evaluate_every),
    )


def cell_of(recipe: Recipe, **changes: Any) -> Cell:
    """Return a played cell of a recipe."""
    asked = {name: getattr(recipe, name) for name in Recipe.model_fields if name != "schema_version"}
    played = {
        "profiles": (load_profile("link(10Mbit, 30ms, buffer=60s)"),),
        "topology": "star",
        "engine": "netem",
        "compute": Paced(forward_ns=(FORWARD_NS,), backward_ns=(BACKWARD_NS,), update_ns=UPDATE_NS, source="stated"),
        "timing": "played",
        "clock": "virtual",
        "codec_cost": "zero",
    }
    return Cell(**asked, **{**played, **changes})


def live_cell(recipe: Recipe, *, compute: Paced = INSTANT, codec_cost: CodecCost = "zero") -> Cell:
    """Return a live cell of a recipe."""
    return cell_of(recipe, compute=compute, timing="live", clock="real", codec_cost=codec_cost)


class SmallTraining(ReplicasTraining):
    """A recipe's, of workers that learn with the small network, or the recipe's images; by worker, its class."""

    def __init__(
        self,
        recipe: Recipe,
        decisions: Sequence[Decision] = (),
        kinds: Mapping[int, type[Learner]] = MappingProxyType({}),
    ) -> None:
        super().__init__(Setting(recipe, 10, ""), decisions)
        # At once, because they share a seed.
        numbers = range(self.data.workers)
        self.learners = [learner_for(recipe, number, kinds.get(number, Learner)) for number in numbers]
        self.workers: list[Worker] = []

    def learner(self, number: int) -> worker.Learner:
        return self.learners[number]

    def node(self, place: int, loaded: worker.Learner | None, measure: Measure | None = None) -> Node:
        node = super().node(place, loaded, measure)
        if isinstance(node, WorkerNode):
            self.workers.append(node.replica)
        return node

    def weights(self, number: int) -> list[Tensor]:
        return [parameter.detach() for parameter in self.learners[number].parameters]


class Trained(NamedTuple):
    workers: list[Worker]
    records: list[list[StepRecord]]
    """By node."""
    ended: Ended

    @property
    def losses(self) -> list[float | None]:
        return [record.loss for record in self.records[-1]]

    def weights(self, worker: int = 0) -> list[Tensor]:
        return [parameter.detach() for parameter in self.workers[worker].parameters]


class Watching:
    """Calls something with all workers whenever one of them has ended a step; observes a run."""

    def __init__(self, workers: list[Worker], watch: Callable[[list[Worker]], None]) -> None:
        self._workers, self._watch = workers, watch

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        if isinstance(action, EndStep):
            self._watch(self._workers)


def trained(
    recipe: Recipe, decisions: Sequence[Decision] = (), watch: Callable[[list[Worker]], None] = lambda workers: None
) -> Trained:
    outputs = [io.StringIO() for _ in range(recipe.nodes)]
    training = SmallTraining(recipe, decisions)
    ended = train_together(training, outputs, observers=[Watching(training.workers, watch)]).ended
    records = [[StepRecord.model_validate_json(line) for line in output.getvalue().splitlines()] for output in outputs]
    return Trained(training.workers, records, ended)


def asynchronous_nodes(recipe: Recipe) -> tuple[Server, list[Rounds]]:
    """What the places of a job with arrivals have."""
    told, numbers = arrivals.training_of(recipe), range(recipe.nodes - 1)
    server = Server(told, learner_for(recipe, 0), [recipe.codec] * len(numbers))
    return server, [Rounds(told, number, learner_for(recipe, number), recipe.codec) for number in numbers]


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
