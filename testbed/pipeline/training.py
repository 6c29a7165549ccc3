"""What trains by a recipe: the job of its places, what each of them has, and what it needs over links. A class for each
kind of job; whoever trains, times or runs recipes over links (`alone`, `calibrate`, `place`) knows this one only.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from testbed.devices import flops
from testbed.errors import StageError
from testbed.jobs.actions import Job, Key, Node
from testbed.jobs.kind import JobKind, Setting, kind_of
from testbed.jobs.recorder import Named, Recorded, Said
from testbed.message_key import Side
from testbed.pipeline import faults
from testbed.pipeline.carried import Carried
from testbed.pipeline.ending import Announced, Ending
from testbed.pipeline.gather import Gather
from testbed.pipeline.job import PlaceJob
from testbed.pipeline.pacing import Takes
from testbed.spec import DataParallelSpec, Paced, Parallelism, PipelineSpec, Stated

Measure = Callable[[int], Carried]
"""Begins to measure the link to a peer."""


class Training(ABC):
    """A recipe's training, wherever its places are."""

    job: Job
    """As it runs in one process."""
    names: Sequence[str] = ()
    """What messages are called, as a `Connection` has it."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.recipe = setting, setting.recipe

    @abstractmethod
    def load(self, place: int) -> Any:
        """Build what takes long of what a place has: before it is connected, as others wait for it afterwards."""

    @abstractmethod
    def node(self, place: int, loaded: Any, measure: Measure | None = None) -> Node:
        """Make what a place has of what was loaded. `measure`: for codecs that go by their links; UserError if None."""

    def node_alone(self, place: int) -> Node:
        """Make what a place has where all places are in one process."""
        return self.node(place, self.load(place))

    @abstractmethod
    def named(self, key: Key) -> Named:
        """Return how records name a message."""

    def goes_on(self, place: int, step: int) -> bool:
        """Say, in one process, what an `EndStep` returns."""
        return True

    def settle(self, done: Sequence[tuple[Recorded, Said]]) -> Said:
        """Return what the last place's record says of a step or an evaluation, of which all places' are given; the
        others' say no loss.
        """
        return done[-1][1]

    # ------------------------------------------------------------------ over links
    def says_loss(self, place: int) -> bool:
        """Say whether a place's own records bear what it says of its loss."""
        return True

    @property
    @abstractmethod
    def most_bytes(self) -> int:
        """The most bytes that a payload may have."""

    @property
    @abstractmethod
    def most_frames(self) -> int:
        """How many messages may wait unsent, or untaken, on one connection."""

    def job_of(self, job: PlaceJob) -> Job:
        """Return what a place's program is of."""
        return self.job

    @abstractmethod
    def work_ns(self, job: PlaceJob) -> Callable[[str], int]:
        """Return how long a place takes for what, in the lab's nanoseconds, where that is stated."""

    def codec_ns(self, job: PlaceJob) -> Takes:
        """Return how long a place takes to encode and decode where work is paced."""
        codec_ns = None if job.codec_cost == "host" else 0
        return lambda action: codec_ns

    @abstractmethod
    def ending(self, job: PlaceJob, gather: Gather, asked: Callable[[], bool]) -> Ending:
        """Return what decides when a place's program ends."""

    def side(self, place: int, peer: int) -> Side | int:
        """Return what records call a peer."""
        return peer

    def misses_nobody(self, place: int) -> bool:
        """Say whether a place, at its end, does not mind who is lost by then."""
        return False


class KindTraining(Training):
    """The training of a job of a table `job`."""

    job: JobKind
    most_frames = 1 << 16  # how many a step has only its program knows
    _LEAST_BYTES, _MODELS = 1 << 28, 4
    """A payload may have so many bytes, or so many times those of the whole model in fp32."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.job = kind_of(setting.recipe)

    def load(self, place: int) -> Node:
        """Make what a place has."""
        return self.job.node(place, self.setting)

    def node(self, place: int, loaded: Node, measure: Measure | None = None) -> Node:
        """Return what was loaded."""
        return loaded

    def named(self, key: Key) -> Named:
        """Return how records name a message."""
        return self.job.named(key)

    def says_loss(self, place: int) -> bool:
        """The last place says the run's loss, as in one process."""
        return place == len(self.job.places) - 1

    def goes_on(self, place: int, step: int) -> bool:
        """End the programs, which know no last step."""
        return step + 1 < self.recipe.training.steps

    @property
    def most_bytes(self) -> int:
        """The most bytes that a payload may have."""
        return max(self._LEAST_BYTES, self._MODELS * 4 * flops.whole_model(self.recipe.workload))

    def work_ns(self, job: PlaceJob) -> Callable[[str], int]:
        """Return how long a place takes for what. SpecError for work that the cell states no duration of."""
        stated = job.compute
        assert isinstance(stated, Stated)
        return lambda what: stated.takes_ns(what, job.name)

    def ending(self, job: PlaceJob, gather: Gather, asked: Callable[[], bool]) -> Ending:
        """All places end after the same step, if they wait for each other in each step: none is then ahead of another
        by more steps than there are places.
        """
        steps, places = self.recipe.training.steps, len(self.job.places)
        return Announced(asked, gather, decides=job.place == 0, steps=steps, furthest=places)


_TRAININGS: Final[Mapping[type[Parallelism], str]] = {
    PipelineSpec: "testbed.pipeline.stages:PipelineTraining",
    DataParallelSpec: "testbed.replicas.training:ReplicasTraining",
    JobKind: "testbed.pipeline.training:KindTraining",
}
"""By kind of job; by name, because replicas are built on this module."""


def training_of(setting: Setting) -> Training:
    """Return the training of a recipe."""
    training: Training = loaded(_TRAININGS, setting)
    return training


def loaded(of: Mapping[type[Parallelism], str], setting: Any) -> Any:
    """Make an object of the class that is named for the kind of a recipe's job; `setting` has the recipe."""
    name = next(name for kind, name in of.items() if isinstance(setting.recipe.parallelism, kind))
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)(setting)


def durations_of(compute: object, **work: int) -> Callable[[str], int]:
    """Return how long a place takes for what; other work takes no time. `work`: in the world's nanoseconds."""
    assert isinstance(compute, Paced)
    dilated = {what.replace("_", " "): ns * compute.dilation for what, ns in work.items()}
    return lambda what: dilated.get(what, 0)


def set_up_torch() -> None:
    """Have torch use one thread and deterministic kernels. StageError when the environment or torch says otherwise."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "torch threads": torch.get_num_threads()}
    if threads != {"OMP_NUM_THREADS": "1", "torch threads": 1}:
        raise StageError(f"a stage works with one thread: set OMP_NUM_THREADS=1 before it starts; found {threads}")


def explain_memory(name: str, node: Any, error: Exception) -> None:
    """Raise the StageError, with advice, for an exception that means that memory could not be had; no other.

    `node` is None while a place's model is built.
    """
    if faults.is_out_of_memory(error):
        where = "while its model was built" if node is None else getattr(node, "doing", "while it worked")
        raise faults.out_of_memory(name, where, error) from error
