"""Time what workers of recipes compute, and what codecs do with their messages: `python -m testbed.replicas.calibrate
JOB.json`.

As `pipeline.calibrate` does it, with the same stopwatch: all recipes in one process, in turns, by the time for which
the thread had the processor, until the fastest half of every duration's samples agrees. Of workers that read as much
one is timed. It applies what it sends itself, so codecs see gradients of a training, and what they remember grows as it
does there.
Messages have numbers above those of any warm-up. The same codec of the same tensors takes as long in all recipes.
Cutting tensors into parts and adding them up are not counted.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from testbed.jobs.actions import Decode, Encode, Encoded, Key, Message, Program, Work
from testbed.jobs.loop import Loop
from testbed.pipeline import calibrate
from testbed.pipeline.calibration import (
    CalibrationDone,
    CalibrationJob,
    CalibrationRound,
    Subject,
    TimedMessages,
    TimedNode,
    duration,
    is_steady,
)
from testbed.records import Duration, MessageCosts, WorkerMaths
from testbed.replicas.bucket import Bucket
from testbed.replicas.decision import as_stated
from testbed.replicas.fragments import in_turn, message_shapes
from testbed.replicas.learners import learner_of
from testbed.replicas.worker import Worker
from testbed.spec import DataParallelSpec

_LEAST_STEPS_A_TURN = 2
_FIRST_MESSAGE = 1 << 20


class Quantity(NamedTuple):
    """What is timed."""

    what: str
    """local step, close or update; encode or decode."""
    of: int | str
    """Parts of a batch that the worker reads, or the codec's text."""
    fragment: int = 0
    """Of a message."""


Samples = dict[Quantity, list[int]]


class _WorkerNode:
    """A worker that applies what it sends itself, and both ends of its messages, by fragment and codec."""

    def __init__(self, subject: Subject, number: int) -> None:
        learner = learner_of(subject.recipe, number, vocabulary=subject.vocabulary, tokens=subject.tokens)
        self.replica = Worker.of(subject.recipe, number, learner)
        self.ends: Sequence[Mapping[str, Sequence[Bucket]]] = ()
        self.lengths: Sequence[int] = ()
        """By fragment: values of the part that goes round a ring that reduces; (): messages are whole."""

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
        # The first part goes round for all of them.
        return [torch.cat([tensor.reshape(-1) for tensor in value])[: in_turn(self.lengths, key.step)]]

    def encode(self, key: Key, value: Any) -> Encoded:
        return Encoded(in_turn(self.ends, key.step)[key.what][0].encode(value, _FIRST_MESSAGE + key.step))

    def decode(self, messages: Sequence[Message]) -> Sequence[Any]:
        return [self._decode(message.key, message.payload) for message in messages]

    def _decode(self, key: Key, payload: Any) -> Any:
        return in_turn(self.ends, key.step)[key.what][1].decode(payload, _FIRST_MESSAGE + key.step)


def _program(step: int, codecs: Iterable[str]) -> Program:
    """Make a step, and messages of what came of it with each of the codecs."""
    yield Work("begin", Key("begin", step))
    yield Work("local step", Key("local step", step))
    value = yield Work("close", Key("close", step))
    yield Work("receive", Key("receive", step), value)
    yield Work("update", Key("update", step))
    value = yield Work("cut", Key("cut", step), value)
    for text in codecs:
        yield Decode(((yield Encode(Key(text, step), value)),))


class _Arm:
    """One subject that stands ready to train."""

    def __init__(self, subject: Subject, samples: Samples) -> None:
        """`samples`: of all subjects with the same maths, whose messages are of the same tensors."""
        self.subject, self._samples = subject, samples
        recipe, data = subject.recipe, _data(subject)
        self.texts = [*as_stated(recipe).codecs, *([] if data.answer is None else [data.answer])]
        self.parts = data.parts
        nodes = [_WorkerNode(subject, self.parts.index(kind)) for kind in dict.fromkeys(self.parts)]
        self._nodes = [TimedNode(node) for node in nodes]
        shapes = message_shapes(data, [tuple(each.shape) for each in nodes[0].replica.parameters])
        self._ends = nodes[0].ends = [
            {text: [Bucket(senders[0], text, seed=0, sender=0) for _ in range(2)] for text in dict.fromkeys(self.texts)}
            for senders in shapes
        ]
        if data.exchange == "all-reduce":
            nodes[0].lengths = [senders[0][0][0] for senders in shapes]
        self._turns = max(_LEAST_STEPS_A_TURN, data.fragments)
        self._step = 0

    def take_turn(self, *, counts: bool) -> None:
        """Make a few steps; `counts`: keep their samples."""
        for step in range(self._step, self._step + self._turns):
            codecs = [in_turn(self._ends, step), *({} for _ in self._nodes[1:])]
            Loop([_program(step, each) for each in codecs], self._nodes).run()
            for kind, node in zip(dict.fromkeys(self.parts), self._nodes, strict=True):
                if counts:
                    self._keep(kind, step % len(self._ends), node.samples)
                node.samples.clear()
        self._step += self._turns

    def _keep(self, kind: int, fragment: int, taken: Mapping[tuple[str, str], list[int]]) -> None:
        (begin_ns,), (close_ns,) = taken["work", "begin"], taken["work", "close"]
        self._samples[Quantity("close", kind)].append(begin_ns + close_ns)
        for (does, what), times in taken.items():
            if does != "work":
                self._samples[Quantity(does, what, fragment)] += times
            elif what in ("local step", "update"):
                self._samples[Quantity(what, kind)] += times

    def durations(self) -> dict[Quantity, Duration]:
        """Return what is known by now of everything that is timed, other codecs with the same maths included."""
        typical = {quantity: duration(taken, per_step=0, step_ns=1).ns for quantity, taken in self._samples.items()}
        # A worker's work: no step is shorter.
        step_ns = max(sum(ns for quantity, ns in typical.items() if quantity.of == kind) for kind in self.parts)
        times = {"decode": len(self.parts)}
        return {
            quantity: duration(taken, per_step=times.get(quantity.what, 1), step_ns=step_ns)
            for quantity, taken in self._samples.items()
        }

    def asked(self) -> Iterator[Duration]:
        """Yield the durations that are wanted of all subjects with this one's maths."""
        for quantity, found in self.durations().items():
            if isinstance(quantity.of, str) or not self.subject.maths_known:
                yield found

    def workers(self) -> tuple[WorkerMaths, ...]:
        """Return what each worker computes."""
        found = self.durations()
        return tuple(
            WorkerMaths(
                local_step=found[Quantity("local step", kind)],
                close=found[Quantity("close", kind)],
                update=found[Quantity("update", kind)],
            )
            for kind in self.parts
        )

    def messages(self) -> TimedMessages:
        """Return what codecs do with the messages of each sender."""
        found, fragments = self.durations(), range(len(self._ends))

        def of(what: str, text: str) -> tuple[Duration, ...]:
            return tuple(found[Quantity(what, text, fragment)] for fragment in fragments)

        each = [MessageCosts(encode=of("encode", text), decode=of("decode", text)) for text in self.texts]
        return TimedMessages(name=self.subject.name, messages=tuple(each))


def run(job: CalibrationJob) -> Iterator[CalibrationRound | CalibrationDone]:
    """Time all subjects of a job; says how it goes after each round, and at the end what was found."""
    began, rounds = time.monotonic(), 0
    pools: dict[str, Samples] = defaultdict(lambda: defaultdict(list))
    timed: list[TimedMessages] = []
    shared: dict[str, tuple[WorkerMaths, ...]] = {}
    subjects = sum(map(len, job.groups))
    for group in job.groups:
        arms = [_Arm(subject, pools[subject.maths]) for subject in group]
        deadline = time.monotonic() + job.budget_s * len(group) / subjects
        gc.collect()
        gc.freeze()
        for number in itertools.count():
            for arm in arms:
                arm.take_turn(counts=number > 0)  # memory is set aside in the first one, and codecs begin to remember
            rounds += 1
            if not number:
                continue
            found = [one for arm in {arm.subject.maths: arm for arm in arms}.values() for one in arm.asked()]
            steady = sum(map(is_steady, found))
            yield CalibrationRound(steady=steady, durations=len(found), seconds=time.monotonic() - began)
            if steady == len(found) or time.monotonic() > deadline:
                break
        timed += [arm.messages() for arm in arms]
        shared |= {arm.subject.maths: arm.workers() for arm in arms if not arm.subject.maths_known}
        del arms
    yield CalibrationDone(subjects=tuple(timed), maths=dict(shared), seconds=time.monotonic() - began, rounds=rounds)


def _data(subject: Subject) -> DataParallelSpec:
    assert subject.recipe.data is not None
    return subject.recipe.data


def main() -> None:
    """Time what the file says; print each round, and then the answer, as a line of JSON."""
    calibrate.main(run)


if __name__ == "__main__":
    main()
