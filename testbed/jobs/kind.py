"""Kinds of jobs other than pipelines and data parallel training, configured by an experiment's `job` table.

A kind is a class with the fields of its table, the names of its places, their program and their nodes. Shipped kinds
are rows of `KINDS`; a user's kind is named 'package.module:Class'. docs/jobs.md shows one from end to end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from testbed import paths
from testbed.errors import ResultsError, SpecError, UnknownNameError
from testbed.frozen import validated
from testbed.jobs.actions import Encoded, Key, Message, Node, Program
from testbed.jobs.recorder import Named as Named
from testbed.jobs.recorder import Said as Said
from testbed.records import FRAME_HEADER_BYTES, StepRecord
from testbed.spec import Cell, Parallelism, Recipe

KINDS: Final[Mapping[str, str]] = {
    "context": "testbed.jobs.context:ContextParallel",
    "decode": "testbed.jobs.decode:Decoding",
}
"""The shipped kinds, each with the path of its class."""


class Setting(NamedTuple):
    """The run that a node is made for."""

    recipe: Recipe
    """Codec, workload, optimiser, number of steps and seed."""
    vocabulary: int
    """Vocabulary size of the tokenizer; for images, the number of classes."""
    tokens: str
    """Path of the prepared text, a .npy of token ids."""


class JobKind(Parallelism):
    """A kind of job. Its fields are those of the `job` table; a subclass adds its own."""

    kind: str
    unit: ClassVar[str] = "node"
    counts: ClassVar[str] = "part"
    computes: ClassVar[Sequence[str]] = ("forward", "backward", "local")

    @abstractmethod
    def program(self, place: int, first_step: int = 0) -> Program:
        """Return the program of a place: it runs steps until `EndStep` says to stop."""

    @abstractmethod
    def node(self, place: int, setting: Setting) -> Node:
        """Make the node of a place; this method may import torch.

        A node may have a method `said(step, phase) -> Said`; the last place's loss is the run's.
        """

    @property
    def more_codecs(self) -> Sequence[str]:
        """Codecs that its table states, besides the cell's."""
        return ()

    @property
    def in_short(self) -> tuple[str, str]:
        """Return a summary of places and order of work, for a table of cells."""
        return f"{len(self.places)} {self.unit}s", self.kind

    @property
    def played(self) -> JobKind:
        """The job as it is timed and played, without work that only serves records, such as evaluations."""
        return self

    def named(self, key: Key) -> Named:
        """Return the name of a message in records. The messages that a place encodes in a step have distinct names."""
        return Named("backward" if key.what == "gradient" else "forward", key.part)


class RecordedNode:
    """A node without maths: it replays the message sizes and decisions of a recorded run."""

    def __init__(self, name: str, records: Sequence[StepRecord], named: Callable[[Key], Named]) -> None:
        """`records` are the place's training steps; `named` gives the names of messages in them."""
        self._name, self._named, self._records = name, named, records
        self._sent = [{(one.direction, one.microbatch): one for one in each.sent} for each in records]
        self._decided = [{(one.what, one.part, one.origin): one.value for one in each.decided} for each in records]

    def work(self, what: str, key: Key, value: None) -> int | None:
        """Return the recorded decision, or None."""
        return self._decided[key.step].get((what, key.part, key.origin))

    def encode(self, key: Key, value: None) -> Encoded:
        """Return a placeholder as long as the recorded message without its note. ResultsError where the records have
        none.
        """
        named = self._named(key)
        if (sent := self._sent[key.step].get((named.direction, named.number))) is None:
            raise ResultsError(
                f"{self._name}: the records have no {named.direction} message {named.number} ({key.what}) in step "
                f"{self._records[key.step].step}; remove the folder of the training or run, and run the command again"
            )
        return Encoded(range(sent.payload_bytes + FRAME_HEADER_BYTES))

    def decode(self, messages: Sequence[Message]) -> Sequence[None]:
        """Return no values."""
        return [None] * len(messages)


def kind_of(of: Cell | Recipe) -> JobKind:
    """Return the job of a cell or recipe that has a `job` table."""
    assert isinstance(of.job, JobKind)
    return of.job


def job_of_table(table: Mapping[str, Any]) -> JobKind:
    """Return the job that a table describes. SpecError for an invalid table or an unknown kind."""
    kind = table.get("kind")
    if not isinstance(kind, str):
        raise SpecError(f"job.kind must be one of {', '.join(KINDS)}, or package.module:Class; found {kind!r}")
    return validated(_load(kind), table, "job")


def _load(kind: str) -> type[JobKind]:
    """Return the class of a kind. A user-defined kind runs the user's code, so it is refused under sudo."""
    module, _, attribute = KINDS.get(kind, kind).partition(":")
    if not attribute:
        raise UnknownNameError("kind of job", kind, KINDS)
    try:
        kind_class = getattr(paths.import_named(module), attribute)
    except (ImportError, AttributeError) as error:
        raise SpecError(
            f"job.kind: cannot import {kind}: {error}; run in the folder of its module, or set PYTHONPATH"
        ) from None
    if not (isinstance(kind_class, type) and issubclass(kind_class, JobKind)):
        raise SpecError(f"job.kind: {kind} must be a subclass of testbed.jobs.kind.JobKind")
    return kind_class
