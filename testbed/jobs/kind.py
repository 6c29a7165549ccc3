"""Jobs of other kinds than a pipeline and data parallel training: those of a table `job` in an experiment.

A kind is a class with the fields of its table, the names of its places, their program, and what each of them has. One
of ours is a row of `KINDS`; anybody's is named as 'package.module:Class'. docs/jobs.md shows one from end to end.
"""

from __future__ import annotations

import importlib
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from pydantic import ValidationError

from testbed.errors import ResultsError, SpecError, UnknownNameError
from testbed.frozen import explain
from testbed.jobs.actions import Encoded, Key, Message, Node, Program
from testbed.jobs.recorder import Named as Named
from testbed.jobs.recorder import Said as Said
from testbed.records import FRAME_HEADER_BYTES, StepRecord
from testbed.spec import Cell, Parallelism, Recipe

KINDS: Final[Mapping[str, str]] = {
    "context": "testbed.jobs.context:ContextParallel",
    "decode": "testbed.jobs.decode:Decoding",
}
"""The kinds that are shipped, and where their classes are."""


class Setting(NamedTuple):
    """What a place is made for."""

    recipe: Recipe
    """Codec, workload, optimiser, how many steps, and the seed."""
    vocabulary: int
    """Of the tokenizer; of images, their classes."""
    tokens: str
    """Path of the prepared text, a .npy of token ids."""


class JobKind(Parallelism):
    """A kind of job. Its fields are those of the table; a subclass adds its own."""

    kind: str
    unit: ClassVar[str] = "node"
    counts: ClassVar[str] = "part"
    computes: ClassVar[Sequence[str]] = ("forward", "backward", "local")

    @abstractmethod
    def program(self, place: int, first_step: int = 0) -> Program:
        """Return what a place does: steps until `EndStep` returns that the job does not go on."""

    @abstractmethod
    def node(self, place: int, setting: Setting) -> Node:
        """Make what a place has. Here torch may be imported.

        A node may have a method `said(step, phase) -> Said`; the last place's loss is the run's.
        """

    @property
    def in_short(self) -> tuple[str, str]:
        """Who works, and in which order, for a table of cells."""
        return f"{len(self.places)} {self.unit}s", self.kind

    @property
    def played(self) -> JobKind:
        """The job as it is timed and played: without what it does for its records alone, such as evaluations."""
        return self

    def named(self, key: Key) -> Named:
        """Return how records name a message. Of what a place encodes in a step no two have the same name."""
        return Named("backward" if key.what == "gradient" else "forward", key.part)


class RecordedNode:
    """A place without maths: it makes messages as long as those of a run, and decides what was decided there."""

    def __init__(self, name: str, records: Sequence[StepRecord], named: Callable[[Key], Named]) -> None:
        """`records`: of the place's training steps; `named`: how they call its messages."""
        self._name, self._named, self._records = name, named, records
        self._sent = [{(one.direction, one.microbatch): one for one in each.sent} for each in records]
        self._decided = [{(one.what, one.part, one.origin): one.value for one in each.decided} for each in records]

    def work(self, what: str, key: Key, value: None) -> int | None:
        """Return what was decided; None where nothing was."""
        return self._decided[key.step].get((what, key.part, key.origin))

    def encode(self, key: Key, value: None) -> Encoded:
        """Return something as long as the message was, without its note. ResultsError where there was none."""
        named = self._named(key)
        if (found := self._sent[key.step].get((named.direction, named.number))) is None:
            raise ResultsError(
                f"{self._name}: the records have no {named.direction} message {named.number} ({key.what}) in step "
                f"{self._records[key.step].step}; remove the folder of the training or run, and it is made again"
            )
        return Encoded(range(found.payload_bytes + FRAME_HEADER_BYTES))

    def decode(self, messages: Sequence[Message]) -> Sequence[None]:
        """Return no values."""
        return [None] * len(messages)


def kind_of(of: Cell | Recipe) -> JobKind:
    """Return the job of a cell or recipe that has a table `job`."""
    assert isinstance(of.job, JobKind)
    return of.job


def job_of_table(table: Mapping[str, Any]) -> JobKind:
    """Return the job that a table describes. SpecError for one that does not fit, or an unknown kind."""
    kind = table.get("kind")
    if not isinstance(kind, str):
        raise SpecError(f"job.kind must be one of {', '.join(KINDS)}, or package.module:Class; found {kind!r}")
    found = _load(kind)
    try:
        return found.model_validate(table)
    except ValidationError as error:
        raise explain(error, found, "job") from None


def _load(kind: str) -> type[JobKind]:
    """Return the class of a kind; only a stranger's code is run for it, and never as somebody else."""
    module, _, attribute = KINDS.get(kind, kind).partition(":")
    if not attribute:
        raise UnknownNameError("kind of job", kind, KINDS)
    if kind not in KINDS and "SUDO_UID" in os.environ:
        raise SpecError(
            f"job.kind is {kind}, which is code of yours, and under sudo it would be run as root: leave sudo"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"job.kind: cannot load {kind}: {error}; run where it can be imported, or set PYTHONPATH"
        ) from None
    if not (isinstance(found, type) and issubclass(found, JobKind)):
        raise SpecError(f"job.kind: {kind} is no subclass of testbed.jobs.kind.JobKind")
    return found
