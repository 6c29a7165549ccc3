"""A worker as a node of `jobs.sampling`, in one process (here) or over links (`over_links`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from testbed.codecs.contract import Payload
from testbed.jobs.actions import Encoded, Key, Message
from testbed.jobs.loop import Loop
from testbed.jobs.sampling import Compute, SamplingJob
from testbed.runtime.frame import HEADER_BYTES


class Sampled(NamedTuple):
    """The result of a request."""

    images: Tensor
    """(B, 64), -1 to 1."""
    frame_bytes: dict[Any, int]
    """Size of each message, a `Part` or a `Crossing`: payload and frame header."""


class SamplingNode(ABC):
    """A worker's state of a request. `part` is a message of its program: a `Part` or a `Crossing`."""

    def __init__(self, job: SamplingJob, place: int) -> None:
        self._actions, self._parts = job.workers[place], list(job.numbers)
        self.frame_bytes: dict[Any, int] = {}
        """Size of each message encoded here."""

    @abstractmethod
    def compute(self, action: Compute) -> None:
        """Compute."""

    @abstractmethod
    def payload(self, part: Any) -> bytes:
        """Encode a part for sending."""

    @abstractmethod
    def receive(self, part: Any, payload: Payload) -> None:
        """Decode a part, and use it from now on. CodecError for an invalid payload."""

    def work(self, what: str, key: Key, value: None) -> None:
        """Do the action whose number is in the key."""
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
        """Decode and use messages."""
        for message in messages:
            self.receive(self._parts[message.key.part], message.payload)  # type: ignore[arg-type]
        return [None] * len(messages)


def run_together(job: SamplingJob, workers: Sequence[SamplingNode]) -> dict[Any, int]:
    """Sample with all workers in this process; returns the size of each message, including its frame header."""
    Loop([job.program(place) for place in range(len(workers))], workers).run()
    return {part: size for worker in workers for part, size in worker.frame_bytes.items()}
