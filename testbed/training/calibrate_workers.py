"""Time the computation of recipes' workers, and the codecs of their messages (`training.calibrate`).

One of all workers with equal batches is timed. It applies its own messages, so codecs see gradients of a real training
and build up state accordingly. Message numbers start beyond any warm-up. A codec of given tensors has the same duration
in all recipes. Splitting tensors into parts and summing them is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from testbed.jobs.actions import Decode, Encode, Encoded, Key, Message, Program, Work
from testbed.jobs.loop import Loop
from testbed.nodes.bucket import Bucket
from testbed.nodes.fragments import in_turn, message_shapes
from testbed.nodes.learners import learner_of
from testbed.nodes.pace import as_stated
from testbed.nodes.worker import Worker
from testbed.records import Duration, MessageCosts, WorkerMaths
from testbed.training.calibrate import Arm, Samples, judge
from testbed.training.timing import Timed, TimedNode, TimedRecipe

_FIRST_MESSAGE = 1 << 20


class ReplicaQuantity(NamedTuple):
    """A timed quantity."""

    what: str
    """local step, close or update; encode or decode."""
    of: int | str
    """Number of a batch's parts that the worker reads, or the codec's text."""
    fragment: int = 0
    """Fragment of the message."""


class _WorkerNode:
    """A worker that applies its own messages, and both ends of these, by fragment and codec."""

    def __init__(self, subject: TimedRecipe, number: int) -> None:
        learner = learner_of(subject.recipe, number, vocabulary=subject.vocabulary, tokens=subject.tokens)
        self.replica = Worker.of(subject.recipe, number, learner)
        self.ends: Sequence[Mapping[str, Sequence[Bucket]]] = ()
        self.lengths: Sequence[int] = ()
        """Values of a part in a ring all-reduce, by fragment; (): messages are whole."""

    def work(self, what: str, key: Key, value: Any) -> Any:
        match what:
            case "begin":
                return self.replica.begin()
            case "local step":
                return self.replica.local_step(key.step)
            case "close":
                return self.replica.close(key.step).tensors
            case "receive":
                return self.replica.receive([tensor.clone() for tensor in value])
            case "update":
                return self.replica.apply_until(key.step + 1)
        assert what == "cut", what
        if not self.lengths:
            return value
        # The first part stands for all of them.
        return [torch.cat([tensor.reshape(-1) for tensor in value])[: in_turn(self.lengths, key.step)]]

    def encode(self, key: Key, value: Any) -> Encoded:
        return Encoded(in_turn(self.ends, key.step)[key.what][0].encode(value, _FIRST_MESSAGE + key.step))

    def decode(self, messages: Sequence[Message]) -> Sequence[Any]:
        return [self._decode(message.key, message.payload) for message in messages]

    def _decode(self, key: Key, payload: Any) -> Any:
        return in_turn(self.ends, key.step)[key.what][1].decode(payload, _FIRST_MESSAGE + key.step)


def _program(step: int, codecs: Iterable[str]) -> Program:
    """Run a step, and encode and decode its result with each codec."""
    yield Work("begin", Key("begin", step))
    yield Work("local step", Key("local step", step))
    value = yield Work("close", Key("close", step))
    yield Work("receive", Key("receive", step), value)
    yield Work("update", Key("update", step))
    value = yield Work("cut", Key("cut", step), value)
    for text in codecs:
        yield Decode(((yield Encode(Key(text, step), value)),))


class WorkersArm(Arm):
    """Workers that read different shares of a batch."""

    def __init__(self, subject: TimedRecipe) -> None:
        super().__init__(subject)
        recipe, data = subject.recipe, subject.recipe.data
        assert data is not None
        self._texts = [*as_stated(recipe).codecs, *([] if data.answer is None else [data.answer])]
        self._parts = data.parts
        nodes = {part: _WorkerNode(subject, self._parts.index(part)) for part in dict.fromkeys(self._parts)}
        self._nodes = {part: TimedNode(node) for part, node in nodes.items()}
        first = nodes[self._parts[0]]
        shapes = message_shapes(data, [tuple(each.shape) for each in first.replica.parameters])
        if data.aligned is not None:  # sketches and rows, as two fragments
            shapes = [[part] for part in shapes[0][:: data.workers]]
        self._ends = first.ends = [
            {
                text: [Bucket(senders[0], text, seed=0, sender=0) for _ in range(2)]
                for text in dict.fromkeys(self._texts)
            }
            for senders in shapes
        ]
        if data.exchange == "all-reduce":
            first.lengths = [senders[0][0][0] for senders in shapes]
        self.steps_a_turn = max(self.steps_a_turn, len(shapes))

    def run(self, first: int, *, counts: bool, pool: Samples) -> None:
        """Make the steps up to `steps`; `counts`: keep their samples."""
        for step in range(first, self.steps):
            codecs = [in_turn(self._ends, step), *({} for _ in range(len(self._nodes) - 1))]
            Loop([_program(step, each) for each in codecs], [*self._nodes.values()]).run()
            for part, node in self._nodes.items():
                if counts:
                    self._keep(pool, part, step % len(self._ends), node.samples)
                node.samples.clear()

    def _keep(self, pool: Samples, part: int, fragment: int, taken: Mapping[tuple[str, str], list[int]]) -> None:
        (begin_ns,), (close_ns,) = taken["work", "begin"], taken["work", "close"]
        pool[ReplicaQuantity("close", part)].append(begin_ns + close_ns)
        for (does, what), times in taken.items():
            if does != "work":
                pool[ReplicaQuantity(does, what, fragment)] += times
            elif what in ("local step", "update"):
                pool[ReplicaQuantity(what, part)] += times

    def asked(self, pool: Samples) -> Iterator[Duration]:
        """Yield the durations required of all subjects with this one's maths."""
        for quantity, measured in self._durations(pool).items():
            if isinstance(quantity.of, str) or not self.subject.maths_known:
                yield measured

    def timed(self, pool: Samples) -> Timed:
        """Return codec durations for the messages of each sender."""
        measured, fragments = self._durations(pool), range(len(self._ends))

        def of(what: str, text: str) -> tuple[Duration, ...]:
            return tuple(measured[ReplicaQuantity(what, text, fragment)] for fragment in fragments)

        codecs = [MessageCosts(encode=of("encode", text), decode=of("decode", text)) for text in self._texts]
        return Timed(name=self.subject.name, maths=None, codecs=tuple(codecs))

    def maths(self, pool: Samples) -> tuple[WorkerMaths, ...]:
        """Return the maths durations of each worker."""
        measured = self._durations(pool)
        return tuple(
            WorkerMaths(
                **{what: measured[ReplicaQuantity(what.replace("_", " "), part)] for what in WorkerMaths.model_fields}
            )
            for part in self._parts
        )

    def _durations(self, pool: Samples) -> dict[ReplicaQuantity, Duration]:
        """Return all durations known so far, including those of other codecs with the same maths."""
        times = {quantity: len(self._parts) if quantity.what == "decode" else 1 for quantity in pool}
        return judge(pool, times, [[quantity for quantity in pool if quantity.of == part] for part in self._parts])
