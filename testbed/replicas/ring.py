"""A worker's place in a ring: it sends to the worker after it, and hears the one before it, while it computes on.

A thread goes round with one step's messages after the other (`exchange` says which part goes when). Adding up a part
and encoding it anew has no pace: on the real clock it takes what it takes here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from torch import Tensor

from testbed.codecs.contract import Payload
from testbed.replicas.bucket import Bucket
from testbed.replicas.decision import as_stated
from testbed.replicas.exchange import RingParts, Sums, Tensors
from testbed.replicas.fragments import in_turn
from testbed.replicas.node import ReplicaNode, key_of

PassOn = Callable[[int, Payload, int], Payload]
"""Does a round: its number, what is sent on and how many bytes that is as fp32; returns what comes from before."""


class Came(NamedTuple):
    """A step's aggregate, or what it is made of."""

    arrived_ns: int
    """When the last of it was there."""
    aggregate: Callable[[], Tensors]


class _Collective(Protocol):
    """What a worker sends in which round."""

    rounds: int
    """Of a step."""

    def pack(self, step: int, tensors: Tensors) -> None:
        """Make of a step's tensors what goes round. CodecError as it comes."""
        ...

    def go_round(self, step: int, pass_on: PassOn) -> Callable[[], Tensors]:
        """Do a step's rounds; returns what makes its aggregate. CodecError, and what `pass_on` raises."""
        ...


class _Gather:
    """Every worker's message goes round as it is, and each worker sums."""

    def __init__(self, node: ReplicaNode, shapes: Sequence[Sequence[int]]) -> None:
        data, number, seed = node.job.data, node.job.stage, node.job.training.seed
        codecs = as_stated(node.job.recipe).codecs
        self._number, self._workers, self.rounds = number, data.workers, data.workers - 1
        self._bucket = Bucket(shapes, codecs[number], seed=seed, sender=number)
        self._sums = Sums(shapes, codecs, data.weights, seed)
        self._own: dict[int, bytes] = {}

    def pack(self, step: int, tensors: Tensors) -> None:
        self._own[step] = self._bucket.encode(tensors, step)

    def go_round(self, step: int, pass_on: PassOn) -> Callable[[], Tensors]:
        payloads: dict[int, Payload] = {self._number: self._own.pop(step)}
        for number in range(self.rounds):
            goes, comes = ((self._number - number - back) % self._workers for back in (0, 1))
            payloads[comes] = pass_on(number, payloads[goes], self._bucket.raw_bytes)
        return lambda: self._sums.of([payloads[worker] for worker in range(self._workers)], step)


class _Reduce:
    """Parts are summed on their way round, and the sums go round once more."""

    def __init__(self, node: ReplicaNode, shapes: Sequence[Sequence[int]]) -> None:
        data, self._number = node.job.data, node.job.stage
        self._workers, self._weight = data.workers, data.weights[self._number]
        self.rounds = 2 * (data.workers - 1)
        self._parts = RingParts(shapes, as_stated(node.job.recipe).codecs[0], data.workers, node.job.training.seed)
        self._own: dict[int, tuple[Tensor, ...]] = {}

    def pack(self, step: int, tensors: Tensors) -> None:
        self._own[step] = self._parts.cut(tensors, self._weight)

    def go_round(self, step: int, pass_on: PassOn) -> Callable[[], Tensors]:
        parts, own, half = self._parts, self._own.pop(step), self.rounds // 2
        goes, total, sums = self._number, own[self._number], dict[int, Payload]()
        for number in range(self.rounds):
            comes, raw_bytes = (goes - 1) % self._workers, parts.buckets[goes].raw_bytes
            if number < half:
                payload = pass_on(number, parts.encode(goes, total, step), raw_bytes)
                total = parts.decode(comes, payload, step).add_(own[comes])
            else:
                if number == half:
                    sums[goes] = parts.encode(goes, total, step)
                sums[comes] = pass_on(number, sums[goes], raw_bytes)
            goes = comes
        return lambda: parts.shaped([parts.decode(part, sums[part], step) for part in range(self._workers)])


class Ring:
    """One worker's rounds."""

    def __init__(self, node: ReplicaNode, fragments: Sequence[Sequence[Sequence[int]]]) -> None:
        """`fragments`: the shapes of each one's tensors."""
        data, number = node.job.data, node.job.stage
        kind = _Reduce if data.exchange == "all-reduce" else _Gather
        self._node = node
        self._does: list[_Collective] = [kind(node, shapes) for shapes in fragments]
        self._rounds = node.rounds = self._does[0].rounds
        self._after, self._before = (number + 1) % data.workers, (number - 1) % data.workers
        self._given: SimpleQueue[tuple[int, int] | None] = SimpleQueue()
        self._came: SimpleQueue[Came | Exception] = SimpleQueue()
        threading.Thread(target=self._run, name=f"{node.job.name}'s ring", daemon=True).start()

    def pack(self, step: int, tensors: Tensors) -> None:
        """Make of a step's tensors what goes round. CodecError as it comes."""
        in_turn(self._does, step).pack(step, tensors)

    def give(self, step: int) -> None:
        """Let a step's messages go round, when those of the steps before have."""
        self._given.put((step, self._node.line.at_ns))

    def have(self, step: int) -> Came:
        """Wait until a step's messages have gone round. TransportError, CodecError as they come."""
        came = self._came.get()
        if isinstance(came, Exception):
            raise came
        self._node.used += [(self._before, number) for number in self._numbers(step)]
        return came

    def numbers(self, step: int) -> list[tuple[int, int]]:
        """Return which messages are sent for a step: peers and numbers."""
        return [(self._after, number) for number in self._numbers(step)]

    def close(self) -> None:
        """End the thread: at once, or when what it waits for comes or the connections are closed."""
        self._given.put(None)

    def _numbers(self, step: int) -> range:
        return range(step * self._rounds, (step + 1) * self._rounds)

    def _run(self) -> None:
        try:
            while (given := self._given.get()) is not None:
                self._came.put(self._go_round(*given))
        except Exception as error:
            self._came.put(error)

    def _go_round(self, step: int, made_ns: int) -> Came:
        node, numbers = self._node, self._numbers(step)

        def pass_on(number: int, payload: Payload, raw_bytes: int) -> Payload:
            nonlocal made_ns
            node.send(self._after, numbers[number], payload, raw_bytes, made_ns)
            arrival = node.connections[self._before].take(key_of(numbers[number]), node.job.limits.message_s)
            made_ns = arrival.last_byte_ns
            return arrival.payload

        aggregate = in_turn(self._does, step).go_round(step, pass_on)
        return Came(made_ns, aggregate)
