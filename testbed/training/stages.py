"""Pipeline training: the stages of a recipe, in one process or over links. `jobs.pipeline` has their program,
`nodes.stage.StageNode` their computation, encoding and decoding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from testbed.codecs.contract import Codec, Context
from testbed.codecs.make import make
from testbed.codecs.wire.header import DevicePayload
from testbed.errors import SpecError, StageError, TestbedError, TransportError, UserError
from testbed.jobs.actions import Encoded, Key, Message, Node
from testbed.jobs.kind import Setting
from testbed.jobs.pipeline import MESSAGES, training_job
from testbed.jobs.recorder import Named
from testbed.message_key import Side
from testbed.nodes.boundary import Boundary
from testbed.nodes.stage import StageNode, microbatches, number_in_record
from testbed.runtime.ending import Stops
from testbed.runtime.gather import Gather
from testbed.runtime.place_job import PlaceJob
from testbed.runtime.wiring import largest_payload
from testbed.spec import Paced, text_of
from testbed.training.kinds import Measure, Training, durations_of, explain_memory
from testbed.workloads import models
from testbed.workloads.build_stage import build_stage
from testbed.workloads.data import Data
from testbed.workloads.stage_model import StageModel

_FRAMES = 2
"""Maximum unsent or unread frames, in steps."""


class PipelineTraining(Training):
    """The training of a pipeline of stages."""

    names = tuple(MESSAGES.values())

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        recipe = setting.recipe
        self.job = training_job(recipe.pipeline, recipe.training, text_of(recipe).validation_batches)

    def model(self, place: int) -> StageModel:
        """Build a stage's layers."""
        recipe = self.recipe
        model = build_stage(
            text_of(recipe),
            stage=place,
            stages=recipe.pipeline.stages,
            seed=recipe.training.seed,
            vocabulary=self.setting.vocabulary,
            layers=recipe.pipeline.layers,
        )
        return model.to(self.device)

    def data(self, place: int) -> Data:
        """Open a stage's data. SpecError for data too small for the workload."""
        data = Data(np.load(self.setting.tokens, mmap_mode="r"), text_of(self.recipe), self.recipe.training.seed)
        data.device = self.device
        return data

    def codec(self, context: Context) -> Codec:
        """Make a codec for a boundary."""
        return make(self.recipe.codec, context)

    def load(self, place: int) -> tuple[StageModel, Data]:
        """Build a stage's model, and open its data."""
        return self.model(place), self.data(place)

    def node(self, place: int, loaded: tuple[StageModel, Data], measure: Measure | None = None) -> StageNode:
        """Build a stage's node."""
        model, data = loaded

        def boundary(peer: int) -> Boundary | None:
            if not 0 <= peer < self.recipe.pipeline.stages:
                return None
            return Boundary(
                self.side(place, peer),
                index=min(place, peer),
                seed=self.recipe.training.seed,
                make=self.codec,
                measure=None if measure is None else lambda: measure(peer),
                device=self.device,
            )

        return StageNode(
            self.recipe,
            place,
            model=model,
            data=data,
            upstream=boundary(place - 1),
            downstream=boundary(place + 1),
        )

    def node_alone(self, place: int) -> StageInMemory:
        """Build a stage's node; StageError or SpecError where that fails."""
        return StageInMemory(self, place)

    def named(self, key: Key) -> Named:
        """Return how records name a message."""
        number = number_in_record(self.recipe, key.phase, key.step, key.part)
        return Named("forward" if key.what == MESSAGES["F"] else "backward", number, with_peer=False)

    # ------------------------------------------------------------------ over links
    @property
    def most_bytes(self) -> int:
        """The most bytes that a payload may have."""
        workload = text_of(self.recipe)
        tokens = workload.batch_size // microbatches(self.recipe) * workload.sequence_length
        return largest_payload(tokens, models.hidden_width(workload))

    @property
    def most_frames(self) -> int:
        """How many messages may wait unsent, or untaken, on one connection."""
        return _FRAMES * microbatches(self.recipe)

    def work_ns(self, job: PlaceJob) -> Callable[[str], int]:
        """Return a stage's durations of work."""
        compute, stages = job.compute, self.recipe.pipeline.stages
        assert isinstance(compute, Paced)
        forward, backward = ((ns * stages)[job.place] for ns in (compute.forward_ns, compute.backward_ns))
        return durations_of(compute, forward=forward, backward=backward, update=compute.update_ns)

    def ending(self, job: PlaceJob, gather: Gather, asked: Callable[[], bool]) -> Stops:
        """All stages end after the same step."""
        return Stops(asked, job.budget_s, job.compute.dilation)

    def side(self, place: int, peer: int) -> Side:
        """Return a neighbour's side."""
        return "upstream" if peer < place else "downstream"


class StageInMemory:
    """A stage's node in one process with all others: it copies its messages, and prefixes its errors with its name."""

    keeps = ("_stage",)

    def __init__(self, training: PipelineTraining, place: int) -> None:
        """StageError or SpecError where building the node fails."""
        self._name, self._stage = training.job.places[place], None
        self._most_bytes = training.most_bytes
        with self._named():
            self._stage = training.node(place, training.load(place))
        self.does: Node = self._stage
        """The wrapped node, which a stopwatch may replace."""
        self.said, self.hooks, self.weights = self._stage.said, self._stage.hooks, self._stage.weights

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute."""
        with self._named():
            return self.does.work(what, key, value)

    def encode(self, key: Key, value: Any) -> Encoded:
        """Return a copy of the payload. TransportError for one that is too large, like a connection."""
        with self._named():
            encoded = self.does.encode(key, value)
        assert isinstance(encoded.payload, memoryview | DevicePayload)
        if (size := len(encoded.payload)) > self._most_bytes:
            raise TransportError(
                f"{self._name}: the {key.what} of {key.phase} step {key.step}, micro-batch {key.part} has "
                f"{size} bytes; this job accepts at most {self._most_bytes}"
            )
        if isinstance(encoded.payload, DevicePayload):
            return encoded
        return encoded._replace(payload=memoryview(bytearray(encoded.payload)))

    def decode(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Return the messages' tensors."""
        with self._named():
            return self.does.decode(messages)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Prefix errors with the stage's name; a third-party codec may raise any exception."""
        try:
            yield
        except Exception as error:
            explain_memory(self._name, self._stage, error)
            said = str(error) if isinstance(error, TestbedError) else f"{type(error).__name__}: {error}"
            named = said if said.startswith(self._name) else f"{self._name}: {said}"
            raise (SpecError if isinstance(error, UserError) else StageError)(named) from error
