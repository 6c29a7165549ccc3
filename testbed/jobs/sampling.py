"""Sampling images with several workers: each follows a list of actions, a pure function of the program.

A part is the content of one message: encoded once, however often it is sent, and forwarded unchanged. Received parts
are decoded together before the next computation, so a part may already be on its way to the next worker. A request is a
step; it begins when all workers have ended the previous one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from testbed.jobs import actions
from testbed.jobs.actions import Decode, Encode, EndStep, Key, Meet, Message, Program, Work


class Compute(NamedTuple):
    """begin: pixels to hidden states; project: a layer's queries, keys and values; attend: the rest of the layer;
    velocity: the final norm and projection; update: an Euler step of the pixels. With experts, own: a layer up to the
    router; experts: outputs for received tokens; mix: the rest of the layer, and after the last layer the Euler step.
    """

    task: str
    step: int
    """The denoising step."""
    layer: int
    tokens: tuple[int, int]
    """The first token, and one past the last."""


class SendPart(NamedTuple):
    """Send a part."""

    part: Any
    peer: int


class ReceivePart(NamedTuple):
    """Receive a part, and use it from now on."""

    part: Any
    peer: int


Action = Compute | SendPart | ReceivePart
Actions = Sequence[Action]


def sent_parts(workers: Sequence[Actions]) -> list[tuple[int, Any]]:
    """Return the sender and the part of every message of a request, repeated as often as it is sent."""
    return [(worker, a.part) for worker, actions in enumerate(workers) for a in actions if isinstance(a, SendPart)]


def numbers_of(workers: Sequence[Actions]) -> dict[Any, int]:
    """Number the parts that are sent, identically at every worker."""
    return {part: number for number, part in enumerate(dict.fromkeys(part for _, part in sent_parts(workers)))}


@dataclass(frozen=True)
class SamplingJob:
    """Workers that sample batches of images, one after another."""

    workers: Sequence[Actions]
    requests: int

    @property
    def places(self) -> Sequence[str]:
        """The names of the workers."""
        return tuple(f"worker {worker}" for worker in range(len(self.workers)))

    @cached_property
    def numbers(self) -> Mapping[Any, int]:
        """The number of each part, used in its message's key."""
        return numbers_of(self.workers)

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return the program of a worker, from that request on. A work item's key holds the number of its action."""
        for request in range(first_step, self.requests):
            known, came, values = dict[Any, Message](), list[Message](), None
            for number, action in enumerate(self.workers[place]):
                if isinstance(action, Compute):
                    if came:
                        values, came = (yield Decode(tuple(came))), []
                    values = yield Work(action.task, Key(action.task, request, number), values)
                    continue
                part, peer = action
                key = Key(type(part).__name__.lower(), request, self.numbers[part])
                if isinstance(action, ReceivePart):
                    known[part] = yield actions.Receive(key, peer)
                    came.append(known[part])
                    continue
                if part not in known:
                    known[part] = yield Encode(key)
                yield actions.Send(known[part], peer)
            if came:
                yield Decode(tuple(came))
            yield Meet()
            yield EndStep(request)
