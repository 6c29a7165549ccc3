"""A recipe's training: the job of its places, their nodes, and their requirements over links. One class per kind of
job; code that trains, times or runs recipes over links (`alone`, `calibrate`, `place`) uses this interface only.
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
from testbed.runtime import failures
from testbed.runtime.carried import Carried
from testbed.runtime.ending import Announced, Ending
from testbed.runtime.gather import Gather
from testbed.runtime.pacing import Takes
from testbed.runtime.place_job import PlaceJob
from testbed.spec import DataParallelSpec, Paced, Parallelism, PipelineSpec, Stated
from testbed.training.accelerator import device_of

Measure = Callable[[int], Carried]
"""Starts to measure the link to a peer."""


class Training(ABC):
    """A recipe's training, in one process or over links. CapabilityError for a device that this machine lacks."""

    job: Job
    """The job as it runs in one process."""
    names: Sequence[str] = ()
    """Names of messages, for `Connection`."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.recipe = setting, setting.recipe
        self.device = device_of(self.recipe)

    @abstractmethod
    def load(self, place: int) -> Any:
        """Build the slow parts of a place's node, before connecting, because peers wait from then on."""

    @abstractmethod
    def node(self, place: int, loaded: Any, measure: Measure | None = None) -> Node:
        """Make a place's node from its loaded parts. `measure`: for codecs that adapt to their links; UserError if such
        a codec gets None.
        """

    def node_alone(self, place: int) -> Node:
        """Make a place's node where all places are in one process."""
        return self.node(place, self.load(place))

    @abstractmethod
    def named(self, key: Key) -> Named:
        """Return the name of a message in records."""

    def goes_on(self, place: int, step: int) -> bool:
        """Return the result of an `EndStep` in one process."""
        return True

    def settle(self, done: Sequence[tuple[Recorded, Said]]) -> Said:
        """Return the last place's part of the record of a step or evaluation, given all places' parts; the others'
        records have no loss.
        """
        return done[-1][1]

    # ------------------------------------------------------------------ over links
    def says_loss(self, place: int) -> bool:
        """Return whether a place's own records contain its loss."""
        return True

    @property
    @abstractmethod
    def most_bytes(self) -> int:
        """Maximum size of a payload, in bytes."""

    @property
    @abstractmethod
    def most_frames(self) -> int:
        """Maximum number of unsent or unread messages on one connection."""

    def job_of(self, job: PlaceJob) -> Job:
        """Return the job of a place's program."""
        return self.job

    @abstractmethod
    def work_ns(self, job: PlaceJob) -> Callable[[str], int]:
        """Return a place's stated durations of work, in the lab's nanoseconds, if any."""

    def codec_ns(self, job: PlaceJob) -> Takes:
        """Return a place's durations of encode and decode in paced runs."""
        codec_ns = None if job.codec_cost == "host" else 0
        return lambda action: codec_ns

    @abstractmethod
    def ending(self, job: PlaceJob, gather: Gather, asked: Callable[[], bool]) -> Ending:
        """Return the rule for the end of a place's program."""

    def side(self, place: int, peer: int) -> Side | int:
        """Return a peer's name in records."""
        return peer

    def misses_nobody(self, place: int) -> bool:
        """Return whether a place, at its end, tolerates lost peers."""
        return False


class KindTraining(Training):
    """The training of a job from a `job` table."""

    job: JobKind
    most_frames = 1 << 16  # only the program knows the number per step
    _LEAST_BYTES, _MODELS = 1 << 28, 4
    """Limits of a payload: this many bytes, or this many times the whole model in fp32."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.job = kind_of(setting.recipe)

    def load(self, place: int) -> Node:
        """Make a place's node."""
        return self.job.node(place, self.setting)

    def node(self, place: int, loaded: Node, measure: Measure | None = None) -> Node:
        """Return the loaded node."""
        return loaded

    def named(self, key: Key) -> Named:
        """Return the name of a message in records."""
        return self.job.named(key)

    def says_loss(self, place: int) -> bool:
        """The last place reports the run's loss, as in one process."""
        return place == len(self.job.places) - 1

    def goes_on(self, place: int, step: int) -> bool:
        """End the programs, which have no last step of their own."""
        return step + 1 < self.recipe.training.steps

    @property
    def most_bytes(self) -> int:
        """Maximum size of a payload, in bytes."""
        return max(self._LEAST_BYTES, self._MODELS * 4 * flops.whole_model(self.recipe.workload))

    def work_ns(self, job: PlaceJob) -> Callable[[str], int]:
        """Return a place's durations of work. SpecError for work without a stated duration."""
        stated = job.compute
        assert isinstance(stated, Stated)
        return lambda what: stated.takes_ns(what, job.name)

    def ending(self, job: PlaceJob, gather: Gather, asked: Callable[[], bool]) -> Ending:
        """All places end after the same step, provided that they wait for each other in each step: the lead of a place
        is then at most the number of places.
        """
        steps, places = self.recipe.training.steps, len(self.job.places)
        return Announced(asked, gather, decides=job.place == 0, steps=steps, furthest=places)


_TRAININGS: Final[Mapping[type[Parallelism], str]] = {
    PipelineSpec: "testbed.training.stages:PipelineTraining",
    DataParallelSpec: "testbed.training.workers:ReplicasTraining",
    JobKind: "testbed.training.kinds:KindTraining",
}
"""Class of each kind of job; as text, because those modules import this one."""


def training_of(setting: Setting) -> Training:
    """Return the training of a recipe."""
    training: Training = loaded(_TRAININGS, setting)
    return training


def loaded(of: Mapping[type[Parallelism], str], setting: Any) -> Any:
    """Instantiate the class that `of` names for the kind of a recipe's job; `setting` has the recipe."""
    name = next(name for kind, name in of.items() if isinstance(setting.recipe.parallelism, kind))
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)(setting)


def durations_of(compute: object, **work: int) -> Callable[[str], int]:
    """Return a place's durations of work; other work takes no time. `work` is in undilated nanoseconds."""
    assert isinstance(compute, Paced)
    dilated = {what.replace("_", " "): ns * compute.dilation for what, ns in work.items()}
    return lambda what: dilated.get(what, 0)


def set_up_torch() -> None:
    """Make torch use one thread and deterministic kernels. StageError when the environment or torch prevents it."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"), "torch threads": torch.get_num_threads()}
    if threads != {"OMP_NUM_THREADS": "1", "torch threads": 1}:
        raise StageError(f"torch uses {threads} threads: set OMP_NUM_THREADS=1 before a stage starts")


def explain_memory(name: str, node: Any, error: Exception) -> None:
    """Raise StageError, with advice, for an exception that means that memory ran out; ignore others.

    `node` is None while a place's model is built.
    """
    if failures.is_out_of_memory(error):
        where = "while building its model" if node is None else getattr(node, "doing", "while working")
        raise failures.out_of_memory(name, where, error) from error
