"""A worker as a node of `jobs.sampling`: the same in one process, here, and over links (`live`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from testbed.codecs.contract import Payload
from testbed.jobs.actions import Encoded, Key, Message
from testbed.jobs.loop import Loop
from testbed.jobs.sampling import Compute, SamplingJob
from testbed.pipeline.frame import HEADER_BYTES


class Sampled(NamedTuple):
    """What came of a request."""

    images: Tensor
    """(B, 64), -1 to 1."""
    frame_bytes: dict[Any, int]
    """Of each message, a `Part` or a `Crossing`: its payload and a frame's header."""


class SamplingNode(ABC):
    """What one worker holds of a request. `part` is a message of its program: a `Part`, or a `Crossing`."""

    def __init__(self, job: SamplingJob, place: int) -> None:
        self._actions, self._parts = job.workers[place], list(job.numbers)
        self.frame_bytes: dict[Any, int] = {}
        """Of each message that was encoded here."""

    @abstractmethod
    def compute(self, action: Compute) -> None:
        """Compute."""

    @abstractmethod
    def payload(self, part: Any) -> bytes:
        """Encode a part that is to be sent."""

    @abstractmethod
    def receive(self, part: Any, payload: Payload) -> None:
        """Decode a part, and use it from now on. CodecError for a payload that cannot be used."""

    def work(self, what: str, key: Key, value: None) -> None:
        """Do the action that the key has the number of."""
        action = self._actions[key.part]
        assert isinstance(action, Compute)
        self.compute(action)

    def encode(self, key: Key, value: None) -> Encoded:
        """Return the payload of a message."""
        part = self._parts[key.part]
        payload = self.payload(part)
        self.frame_bytes[part] = len(payload) + HEADER_BYTES
        return Encoded(payload)

    def decode(self, messages: Sequence[Message]) -> Sequence[None]:
        """Use what messages hold."""
        for message in messages:
            self.receive(self._parts[message.key.part], message.payload)  # type: ignore[arg-type]
        return [None] * len(messages)


def run_together(job: SamplingJob, workers: Sequence[SamplingNode]) -> dict[Any, int]:
    """Have all workers sample in this process; returns how long each message is, its frame's header included."""
    Loop([job.program(place) for place in range(len(workers))], workers).run()
    return {part: size for worker in workers for part, size in worker.frame_bytes.items()}
