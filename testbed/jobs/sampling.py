"""Sampling images with several workers: each does what a list says, which is a pure function of the program.

What one message holds is a part: encoded once, however often it is sent, and passed on as it came. What has come is
decoded when next something is computed, all at once: a part may be on its way to the next worker meanwhile. A request
is a step; it begins when all workers have ended the one before.
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
    velocity: the last norm and product; update: an Euler step of the pixels. With experts, own: a layer up to the
    router; experts: what tokens that came become; mix: the rest of the layer, and behind the last one the Euler step.
    """

    task: str
    step: int
    """The denoising step."""
    layer: int
    tokens: tuple[int, int]
    """The first token, and the one behind the last."""


class SendPart(NamedTuple):
    """Hand a part over."""

    part: Any
    peer: int


class ReceivePart(NamedTuple):
    """Wait for a part, and use it from now on."""

    part: Any
    peer: int


Action = Compute | SendPart | ReceivePart
Actions = Sequence[Action]


def sent_parts(workers: Sequence[Actions]) -> list[tuple[int, Any]]:
    """Return every message that crosses a link in a request: its sender and what it holds; a part as often as it is
    sent.
    """
    return [(worker, a.part) for worker, actions in enumerate(workers) for a in actions if isinstance(a, SendPart)]


def numbers_of(workers: Sequence[Actions]) -> dict[Any, int]:
    """Return a number for each part that is sent, the same at every worker."""
    return {part: number for number, part in enumerate(dict.fromkeys(part for _, part in sent_parts(workers)))}


@dataclass(frozen=True)
class SamplingJob:
    """Workers that sample so many batches of images, one after the other."""

    workers: Sequence[Actions]
    requests: int

    @property
    def places(self) -> Sequence[str]:
        """The names of the workers."""
        return tuple(f"worker {worker}" for worker in range(len(self.workers)))

    @cached_property
    def numbers(self) -> Mapping[Any, int]:
        """A number for each part, which is that of its message's key."""
        return numbers_of(self.workers)

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return what a worker does, from that request on. The key of work has the number of its action."""
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
