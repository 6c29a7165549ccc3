"""Traces from stated durations and sizes, without a model: a pipeline, for `predict` and tests; a transfer; rounds."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from testbed.jobs.actions import Action, Decode, Encode, EndStep, Key, Program, Receive, Send, Sizes, Work
from testbed.jobs.data_parallel import MESSAGES as OF_WORKERS
from testbed.jobs.data_parallel import DataParallelJob
from testbed.jobs.pipeline import MATHS, MESSAGES, PipelineJob
from testbed.jobs.schedule import all_actions
from testbed.spec import ScheduleName
from testbed.trace.format import Trace
from testbed.trace.tracing import Colocation, TracedJob

LABELS = ("forward", "backward", "encode", "decode", "update", "activation", "gradient", "barrier")
WAYS = {what: way for kinds in (MESSAGES, MATHS) for way, what in enumerate((kinds["F"], kinds["B"]))}
"""0 for activations and the forward pass, 1 for gradients and the backward pass."""
Both = int | tuple[int, int]
"""One number for both activations and gradients, or one for each."""


def pipeline_trace(
    *,
    stages: int,
    microbatches: int,
    steps: int,
    message_bytes: Both,
    forward_ns: int | Sequence[int],
    backward_ns: int | Sequence[int],
    encode_ns: Both = 0,
    decode_ns: Both = 0,
    update_ns: int | Sequence[int] = 0,
    schedule: ScheduleName = "1f1b",
    in_flight: int | None = None,
    blocking: bool = False,
) -> Trace:
    """Return the trace of synchronous pipeline training; each step ends with an event that all stages signal and wait
    for, and the update.

    `forward_ns`, `backward_ns`, `update_ns`: one for all stages, or one per stage. `in_flight`: see `schedule.depth`;
    None: the number of stages. `blocking`: a stage continues only when its neighbour has received the whole message, as
    in a program that does not overlap sends with compute; otherwise it continues at once.
    """
    works = {
        what: _each(value, stages)
        for what, value in (("forward", forward_ns), ("backward", backward_ns), ("update", update_ns))
    }
    sizes = _each(message_bytes, 2)
    orders = all_actions(schedule, stages=stages, microbatches=microbatches, in_flight=in_flight or stages)
    encode, decode = _each(encode_ns, 2), _each(decode_ns, 2)

    def cost(stage: int, action: Action) -> int | None:
        match action:
            case Work(what):
                return works[what][stage] if what in works else None
            case Encode(key):
                return encode[WAYS[key.what]]
            case Decode(messages):
                return decode[WAYS[messages[0].key.what]]
        return None

    nodes = [Sizes(lambda key: sizes[WAYS[key.what]])] * stages
    job = PipelineJob(orders, steps, blocking)
    return TracedJob(job, nodes, cost, LABELS, {"maker": "synthetic pipeline"}).trace()


@dataclass(frozen=True)
class Transfer:
    """A sender sends messages to a receiver, one after the other."""

    messages: int
    places: Sequence[str] = ("sender", "receiver")

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return the program of the sender or the receiver, for one step."""
        for key in (Key("message", 0, number) for number in range(self.messages)):
            if place == 0:
                yield Send((yield Encode(key)), 1)
            else:
                yield Decode(((yield Receive(key, 0)),))
        yield EndStep(0)


def transfer_trace(messages: Iterable[tuple[int, int, int]]) -> Trace:
    """Return the trace of one step in which a sender encodes and sends messages, and a receiver decodes them, in order.
    Each is (encode in ns, bytes, decode in ns). Encoding overlaps with transfers.
    """
    numbers = list(messages)

    def cost(place: int, action: Action) -> int | None:
        match action:
            case Encode(key):
                return numbers[key.part][0]
            case Decode((message,)):
                return numbers[message.key.part][2]
        return None

    nodes = [Sizes(lambda key: numbers[key.part][1])] * 2
    labels = ("encode", "message", "decode")
    job = Transfer(len(numbers))
    sites = Colocation.apart(job.places, ("send", "receive"))
    return TracedJob(job, nodes, cost, labels, {"maker": "transfer"}, sites).trace()


def rounds_trace(sent: Sequence[Sequence[int]], local_ns: int, answer_bytes: int) -> Trace:
    """Return the trace of synchronous federated rounds over a star: each client computes for `local_ns` and sends its
    message, whose bytes `sent` states by round and client; the server, once it has all, answers each client.
    """
    clients = len(sent[0])

    def size(node: int, key: Key) -> int:
        return answer_bytes if node == clients else sent[key.step][node]

    def cost(node: int, action: Action) -> int | None:
        return local_ns if isinstance(action, Work) and action.what == "local step" else None

    job = DataParallelJob(clients, "star", [0] * clients, [1] * clients, len(sent))
    nodes = [Sizes(functools.partial(size, node)) for node in range(clients + 1)]
    return TracedJob(job, nodes, cost, ("local step", *OF_WORKERS), {"maker": "federated rounds"}).trace()


def _each(value: int | Sequence[int], count: int) -> Sequence[int]:
    values = [value] * count if isinstance(value, int) else list(value)
    assert len(values) == count, f"{len(values)} numbers for {count}"
    return values
