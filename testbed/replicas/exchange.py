"""How workers' messages become the aggregate that each of them has: the weighted sum of what was decoded.

In a star the server sums, in the order of the workers, and what the workers apply is decoded from its answer. Where
every worker has all messages (all-to-all, all-gather) each sums for itself, in the same order. In a ring that reduces,
part p of the tensors is summed on its way round from worker p, so the order is p, p + 1, ...; it is encoded anew at
every hop, which leaves only codecs that are rounding and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from testbed.codecs.contract import Payload
from testbed.replicas.bucket import Bucket
from testbed.replicas.fragments import fragment_shapes, in_turn, ring_parts
from testbed.spec import Recipe

Tensors = list[Tensor]


class Frame(NamedTuple):
    """One message of one node to another."""

    sender: int
    receiver: int
    raw_bytes: int
    payload_bytes: int


class Exchanged(NamedTuple):
    """What came of one step's messages."""

    aggregates: list[Tensors]
    """By worker; no two share memory."""
    frames: list[Frame]
    """Of each sender in the order of sending."""


class Exchange(Protocol):
    """How one step's messages are exchanged."""

    def step(self, step: int, tensors: Sequence[Tensors]) -> Exchanged:
        """Exchange what the workers computed in a step. CodecError as it comes."""
        ...

    def change(self, codecs: Sequence[str]) -> None:
        """Go on with other codecs, one per worker."""
        ...


def make_exchange(recipe: Recipe, shapes: Sequence[Sequence[int]], codecs: Sequence[str]) -> Exchange:
    """Make a recipe's exchange of tensors of these shapes, which begins with these codecs, one per worker."""
    data = recipe.data
    assert data is not None
    if data.streaming is not None:
        whole = recipe.model_copy(update={"data": data.model_copy(update={"streaming": None})})
        return _Turns([make_exchange(whole, part, codecs) for part in fragment_shapes(shapes, data.fragments)])
    weights = data.weights
    if data.exchange == "all-reduce":
        return _Ring(shapes, codecs, weights, recipe.training.seed)
    if data.exchange == "star":
        assert data.answer is not None
        return _Star(shapes, codecs, weights, recipe.training.seed, data.answer)
    return _Everyone(shapes, codecs, weights, recipe.training.seed, relayed=data.exchange == "all-gather")


class _Turns:
    """Exchanges of one fragment each, in turn."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._exchanges = exchanges

    def step(self, step: int, tensors: Sequence[Tensors]) -> Exchanged:
        return in_turn(self._exchanges, step).step(step, tensors)

    def change(self, codecs: Sequence[str]) -> None:
        for exchange in self._exchanges:
            exchange.change(codecs)


class _Ends:
    """One end of every worker's messages."""

    def __init__(self, shapes: Sequence[Sequence[int]], codecs: Sequence[str], seed: int) -> None:
        self.buckets = [Bucket(shapes, codec, seed=seed, sender=sender) for sender, codec in enumerate(codecs)]

    def change(self, codecs: Sequence[str]) -> None:
        """Go on with other codecs, one per worker."""
        for bucket, codec in zip(self.buckets, codecs, strict=True):
            bucket.change(codec)


class _Senders(_Ends):
    """The workers' own."""

    def encode(self, tensors: Sequence[Tensors], step: int) -> list[bytes]:
        return [bucket.encode(own, step) for bucket, own in zip(self.buckets, tensors, strict=True)]


class Sums(_Ends):
    """A node that has all workers' messages: decodes and sums them."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], codecs: Sequence[str], weights: Sequence[float], seed: int
    ) -> None:
        super().__init__(shapes, codecs, seed)
        self._weights = weights

    def of(self, payloads: Sequence[Payload], step: int) -> Tensors:
        """Return the weighted sum, which begins with the first worker's tensors."""
        total: Tensors = []
        for bucket, payload, weight in zip(self.buckets, payloads, self._weights, strict=True):
            decoded = [value.mul_(weight) for value in bucket.decode(payload, step)]
            total = [before.add_(value) for before, value in zip(total, decoded, strict=True)] if total else decoded
        return total


class _Star:
    def __init__(
        self, shapes: Sequence[Sequence[int]], codecs: Sequence[str], weights: Sequence[float], seed: int, answer: str
    ) -> None:
        self._senders, self._server = _Senders(shapes, codecs, seed), Sums(shapes, codecs, weights, seed)
        ends = [Bucket(shapes, answer, seed=seed, sender=len(weights)) for _ in range(1 + len(weights))]
        self._answer, self._answered = ends[0], ends[1:]

    def step(self, step: int, tensors: Sequence[Tensors]) -> Exchanged:
        payloads, server = self._senders.encode(tensors, step), len(tensors)
        answer = self._answer.encode(self._server.of(payloads, step), step)
        raw = self._answer.raw_bytes
        up = [Frame(worker, server, raw, len(payload)) for worker, payload in enumerate(payloads)]
        down = [Frame(server, worker, raw, len(answer)) for worker in range(server)]
        return Exchanged([end.decode(answer, step) for end in self._answered], up + down)

    def change(self, codecs: Sequence[str]) -> None:
        self._senders.change(codecs)
        self._server.change(codecs)


class _Everyone:
    """Every worker has all messages, straight from their senders, or relayed round a ring."""

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        codecs: Sequence[str],
        weights: Sequence[float],
        seed: int,
        *,
        relayed: bool,
    ) -> None:
        self._senders, self._relayed = _Senders(shapes, codecs, seed), relayed
        self._sums = [Sums(shapes, codecs, weights, seed) for _ in weights]

    def step(self, step: int, tensors: Sequence[Tensors]) -> Exchanged:
        payloads, workers = self._senders.encode(tensors, step), len(tensors)
        frames = []
        for worker in range(workers):
            for further in range(1, workers):
                receiver, origin = (worker + further) % workers, worker
                if self._relayed:
                    receiver, origin = (worker + 1) % workers, (worker + 1 - further) % workers
                frames.append(Frame(worker, receiver, self._senders.buckets[0].raw_bytes, len(payloads[origin])))
        return Exchanged([sums.of(payloads, step) for sums in self._sums], frames)

    def change(self, codecs: Sequence[str]) -> None:
        self._senders.change(codecs)
        for sums in self._sums:
            sums.change(codecs)


class RingParts:
    """The parts of a worker's tensors that go round a ring, one per worker, as even as can be; and their codecs."""

    def __init__(self, shapes: Sequence[Sequence[int]], codec: str, workers: int, seed: int) -> None:
        self._shapes = [tuple(shape) for shape in shapes]
        self._lengths = ring_parts(self._shapes, workers)
        self.buckets = [Bucket([(length,)], codec, seed=seed, sender=part) for part, length in enumerate(self._lengths)]

    def cut(self, tensors: Tensors, weight: float) -> tuple[Tensor, ...]:
        """Return a worker's parts, weighted."""
        return torch.split(torch.cat([value.reshape(-1) for value in tensors]).mul_(weight), self._lengths)

    def encode(self, part: int, value: Tensor, step: int) -> bytes:
        """Return the message of a part."""
        return self.buckets[part].encode([value], step)

    def decode(self, part: int, payload: Payload, step: int) -> Tensor:
        """Return a part from its message, a new tensor."""
        return self.buckets[part].decode(payload, step)[0]

    def shaped(self, parts: Sequence[Tensor]) -> Tensors:
        """Return the tensors that all parts together are."""
        flat = torch.split(torch.cat(list(parts)), [torch.Size(shape).numel() for shape in self._shapes])
        return [value.view(shape).clone() for value, shape in zip(flat, self._shapes, strict=True)]


class _Ring:
    """A ring all-reduce (Patarasuk and Yuan 2009): parts are summed in n - 1 rounds and passed on in n - 1 more."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], codecs: Sequence[str], weights: Sequence[float], seed: int
    ) -> None:
        self._weights, self._parts = weights, RingParts(shapes, codecs[0], len(weights), seed)

    def step(self, step: int, tensors: Sequence[Tensors]) -> Exchanged:
        workers, parts = len(tensors), self._parts
        own = [parts.cut(values, weight) for values, weight in zip(tensors, self._weights, strict=True)]
        rounds: list[dict[int, Frame]] = [{} for _ in range(2 * (workers - 1))]
        passed: list[list[Tensor]] = [[] for _ in tensors]
        for part, bucket in enumerate(parts.buckets):

            def send(number: int, payload: bytes, part: int = part, bucket: Bucket = bucket) -> None:
                sender = (part + number) % workers
                rounds[number][sender] = Frame(sender, (sender + 1) % workers, bucket.raw_bytes, len(payload))

            total = own[part][part]
            for number in range(workers - 1):
                payload = parts.encode(part, total, step)
                send(number, payload)
                total = parts.decode(part, payload, step).add_(own[(part + number + 1) % workers][part])
            payload = parts.encode(part, total, step)
            for number in range(workers - 1, 2 * (workers - 1)):
                send(number, payload)
            for each in passed:
                each.append(parts.decode(part, payload, step))
        frames = [sent[worker] for worker in range(workers) for sent in rounds]
        return Exchanged([parts.shaped(each) for each in passed], frames)

    def change(self, codecs: Sequence[str]) -> None:
        for bucket in self._parts.buckets:
            bucket.change(codecs[0])
