"""Coded exchanges among the ranks of a process group, with the codecs of data parallel cells (`nodes.bucket`).

Payloads cannot be added, so sums are computed from decoded values:

all-gather  each rank encodes its tensors once and receives all payloads; it sums in the order of the ranks
parts       each rank encodes a part of its tensors for each owner of a part; the owner sums in the order of the ranks
            and encodes the sum, which all ranks receive. Among n ranks this sends 2/n of an all-gather's payload bytes,
            and rounds twice

A rank also decodes its own payload, so all ranks have the same sum, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from testbed.codecs.catalogue.codec_spec import CodecSpec, parse_codec
from testbed.codecs.contract import Payload
from testbed.codecs.wrap import States
from testbed.errors import CodecError, SpecError
from testbed.message_key import Direction
from testbed.nodes.bucket import Bucket, Tensors, weighted_sum

Exchange = Literal["auto", "all-gather", "parts"]
Shape = Sequence[int]
CODED: Final = (torch.float32, torch.bfloat16, torch.float16)
"""Types of tensors that are coded, as fp32. Others are not coded."""


def parse_exchanged(text: str) -> CodecSpec:
    """Parse a codec. SpecError or UnknownNameError for an invalid text, and for codecs that need more than tensors."""
    spec = parse_codec(text)
    for part in spec.parts():
        if part.row.hook or part.row.pairs or part.row.measures:
            raise SpecError(
                f"codec {text!r}: {part.name} goes by activations, by the model or by what a link carries, and an "
                "exchange of tensors shows it none of them; take another, for example ef(topk(0.01))"
            )
    return spec


def sums_by_parts(text: str, ranks: int, exchange: Exchange = "auto") -> bool:
    """Decide how a sum is computed. "auto": by parts if that sends less and the codec sends every value, because a
    sparse codec keeps other values of a sum than of its terms. SpecError as from `parse_exchanged`.
    """
    dense = all(part.row.backward.startswith("testbed.codecs.dense.") for part in parse_exchanged(text).parts())
    return exchange == "parts" or (exchange == "auto" and dense and ranks > 2)


class Among(NamedTuple):
    """This rank, and the number of ranks; all have the same seed."""

    rank: int
    ranks: int
    seed: int = 0

    def first(self, number: int) -> int:
        """Return the first sender number of an exchange; parallel exchanges have different ones."""
        return number * self.ranks * (self.ranks + 1)


class CodedGather:
    """All ranks receive the tensors of every rank."""

    def __init__(
        self,
        shapes: Sequence[Sequence[Shape]],
        text: str,
        among: Among,
        senders: Sequence[int],
        direction: Direction = "backward",
    ) -> None:
        """`shapes` and `senders`, by rank; codecs draw by the sender's number."""

        def bucket(rank: int) -> Bucket:
            return Bucket(shapes[rank], text, seed=among.seed, sender=senders[rank], direction=direction)

        self._own, self._senders = bucket(among.rank), [bucket(rank) for rank in range(among.ranks)]
        self._rank, self.memory = among.rank, joint_memory(self._own, *self._senders)

    def start(
        self, group: dist.ProcessGroup, tensors: Tensors, step: int, numbers: Sequence[int] | None = None
    ) -> Future[list[Tensors]]:
        """Send fp32 tensors; the future holds those of each rank. Waits for the lengths of payloads if they vary."""
        payload = buffer_of(self._own.encode(tensors, step, numbers))
        lengths = known_lengths([bucket.payload_bytes(numbers) for bucket in self._senders])
        if lengths is None:
            every = [torch.empty(1, dtype=torch.int64) for _ in self._senders]
            group.allgather([every], [torch.tensor([len(payload)])]).wait()
            lengths = [int(length) for length in every]
        check_length(payload, lengths[self._rank])
        received = [torch.empty(max(lengths), dtype=torch.uint8) for _ in lengths]
        padded = torch.nn.functional.pad(payload, (0, max(lengths) - len(payload)))
        work = group.allgather([received], [padded])

        def decode(_: object) -> list[Tensors]:
            return [
                bucket.decode(each[:length].numpy().data, step, numbers)
                for bucket, each, length in zip(self._senders, received, lengths, strict=True)
            ]

        return work.get_future().then(decode)


class CodedScatter:
    """Each rank receives its part of every rank's tensor."""

    def __init__(self, parts: Sequence[Sequence[Shape]], text: str, among: Among, number: int = 0) -> None:
        """`parts`: shapes by owner. Owner p's part works like a star: codecs draw by p * (ranks + 1) + rank."""

        def bucket(owner: int, rank: int) -> Bucket:
            sender = among.first(number) + owner * (among.ranks + 1) + rank
            return Bucket(parts[owner], text, seed=among.seed, sender=sender)

        ranks = range(among.ranks)
        self._own = [bucket(owner, among.rank) for owner in ranks]
        self._senders = [bucket(among.rank, rank) for rank in ranks]
        self._rank, self.memory = among.rank, joint_memory(*self._own, *self._senders)

    def sum(
        self,
        group: dist.ProcessGroup,
        parts: Sequence[Tensors],
        weights: Sequence[float],
        step: int,
        numbers: Sequence[int] | None = None,
    ) -> Tensors:
        """Send each owner its part, fp32; return the weighted sum of this rank's own."""
        payloads = [buffer_of(own.encode(part, step, numbers)) for own, part in zip(self._own, parts, strict=True)]
        sent = [len(payload) for payload in payloads]
        known = known_lengths([own.payload_bytes(numbers) for own in self._own])
        if known is None:
            lengths = torch.empty(len(parts), dtype=torch.int64)
            group.alltoall_base(lengths, torch.tensor(sent), [], []).wait()
        else:
            for payload, length in zip(payloads, known, strict=True):
                check_length(payload, length)
            lengths = torch.full((len(parts),), known[self._rank])
        received = torch.empty(int(lengths.sum()), dtype=torch.uint8)
        group.alltoall_base(received, torch.cat(payloads), lengths.tolist(), sent).wait()
        messages = torch.split(received, lengths.tolist())
        values = [
            sender.decode(message.numpy().data, step, numbers)
            for sender, message in zip(self._senders, messages, strict=True)
        ]
        return weighted_sum(values, weights)


class CodedSum:
    """All ranks receive the weighted sum of every rank's tensors."""

    def __init__(
        self, shapes: Sequence[Shape], text: str, among: Among, number: int = 0, exchange: Exchange = "auto"
    ) -> None:
        """Codecs draw as in a cell with an all-gather exchange; by parts, as in a star for each part, whose server has
        the same codec. `number` differs between parallel sums. SpecError as from `parse_exchanged`.
        """
        self._scatter: CodedScatter | None = None
        ranks = among.ranks
        if sums_by_parts(text, ranks, exchange):
            split = [torch.empty(tuple(shape) or (1,), device="meta").tensor_split(ranks) for shape in shapes]
            parts = [[tuple(part.shape) for part in each] for each in zip(*split, strict=True)]
            self._scatter = CodedScatter(parts, text, among, number)
            servers = [among.first(number) + owner * (ranks + 1) + ranks for owner in range(ranks)]
            self._gather = CodedGather(parts, text, among, servers)
            self.memory = joint_memory(self._scatter, self._gather)
        else:
            senders = [number * ranks + rank for rank in range(ranks)]
            self._gather = CodedGather([shapes] * ranks, text, among, senders)
            self.memory = self._gather.memory

    def start(
        self,
        group: dist.ProcessGroup,
        tensors: Tensors,
        weights: Sequence[float],
        step: int,
        numbers: Sequence[int] | None = None,
    ) -> Future[Tensors]:
        """Send fp32 tensors; the future holds the sum. By parts, this waits for the rank's own part. `numbers`: which
        tensors these are, if not all.
        """
        if self._scatter is None:
            gathered = self._gather.start(group, tensors, step, numbers)
            return gathered.then(lambda future: weighted_sum(future.value(), weights))
        split = [(tensor if tensor.dim() else tensor.view(1)).tensor_split(len(weights)) for tensor in tensors]
        own = self._scatter.sum(group, [[*parts] for parts in zip(*split, strict=True)], weights, step, numbers)

        def joined(future: Future[list[Tensors]]) -> Tensors:
            parts = zip(*future.value(), strict=True)
            return [torch.cat(each).view_as(tensor) for each, tensor in zip(parts, tensors, strict=True)]

        return self._gather.start(group, own, step, numbers).then(joined)


def joint_memory(*parts: Bucket | CodedGather | CodedScatter) -> States:
    """Return the states of several exchanges as one."""
    return States({str(number): part.memory for number, part in enumerate(parts)})


def buffer_of(payload: Payload) -> Tensor:
    """Return a payload as a tensor of bytes."""
    return (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8) if len(payload) else torch.empty(0, dtype=torch.uint8)
    )


def known_lengths(lengths: Sequence[int | None]) -> list[int] | None:
    """Return the lengths of all payloads, or None if only its sender knows one. All ranks get the same result."""
    known = [length for length in lengths if length is not None]
    return known if len(known) == len(lengths) else None


def check_length(payload: Tensor, length: int) -> None:
    """Raise CodecError if a payload does not have the length that the receiver expects."""
    if len(payload) != length:
        raise CodecError(f"a payload has {len(payload)} bytes, and its codec said that it has {length}")
