"""Has the workers of a program do their actions, whatever lies between them: all in one process here, or each in one of
its own with connections to the others (`live`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from testbed.diffusion.programs import Message
from testbed.jobs.sampling import Action, Actions, Compute, Receive, Send
from testbed.pipeline.frame import HEADER_BYTES

Payload = bytes | memoryview


class SamplingWorker(Protocol):
    """What one worker holds of a request. `part` is a message of its program: a `Part`, or a `Crossing`."""

    def compute(self, action: Compute) -> None:
        """Compute."""
        ...

    def payload(self, part: Any) -> bytes:
        """Return the payload of a part that is to be sent: the same one each time."""
        ...

    def receive(self, part: Any, payload: Payload) -> None:
        """Decode a part, and use it from now on. CodecError for a payload that cannot be used."""
        ...


class Passing(Protocol):
    """What lies between one worker and all others."""

    def compute(self, worker: SamplingWorker, action: Compute) -> None:
        """Have the worker compute, in the time that this takes."""
        ...

    def send(self, part: Message, peer: int, payload: bytes) -> None:
        """Hand a payload over."""
        ...

    def take(self, part: Message, peer: int) -> Payload | None:
        """Return a peer's payload; None where it is not there and others must go on first."""
        ...


def proceed(worker: SamplingWorker, ahead: deque[Action], exchange: Passing) -> bool:
    """Do a worker's actions, and remove them, up to one whose message is not there. Returns whether any was done."""
    before = len(ahead)
    while ahead:
        action = ahead[0]
        if isinstance(action, Send):
            exchange.send(action.part, action.peer, worker.payload(action.part))
        elif isinstance(action, Receive):
            payload = exchange.take(action.part, action.peer)
            if payload is None:
                break
            worker.receive(action.part, payload)
        else:
            exchange.compute(worker, action)
        ahead.popleft()
    return len(ahead) < before


class _Mail(NamedTuple):
    """One worker's end of what lies between workers of one process."""

    number: int
    waiting: dict[tuple[int, int, Message], bytes]
    """By sender, receiver and part: shared by all."""
    frame_bytes: dict[Any, int]

    def compute(self, worker: SamplingWorker, action: Compute) -> None:
        worker.compute(action)

    def send(self, part: Message, peer: int, payload: bytes) -> None:
        self.waiting[self.number, peer, part] = payload
        self.frame_bytes[part] = len(payload) + HEADER_BYTES

    def take(self, part: Message, peer: int) -> bytes | None:
        return self.waiting.pop((peer, self.number, part), None)


def run_together(workers: Sequence[SamplingWorker], actions: Sequence[Actions]) -> dict[Any, int]:
    """Have all workers do their actions, in this process; returns how long each message is, its frame's header
    included.
    """
    waiting: dict[tuple[int, int, Message], bytes] = {}
    frame_bytes: dict[Any, int] = {}
    mail = [_Mail(number, waiting, frame_bytes) for number in range(len(workers))]
    left = [deque(each) for each in actions]
    while any(left):
        moved = [proceed(*each) for each in zip(workers, left, mail, strict=True)]
        assert any(moved), f"workers wait for each other: {[ahead[0] for ahead in left if ahead]}"
    assert not waiting, f"{len(waiting)} messages were never received"
    return frame_bytes
