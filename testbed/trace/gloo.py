"""The messages that gloo sends for a collective of torch.distributed: sender, receiver, bytes and order.

Every message is a rendezvous: the sender announces it (48 bytes), the receiver reports that it is ready (48 bytes
back), and only then does the sender send the message, behind 48 bytes of its own. Both announcements are sent when the
operation is posted, so a hop costs a round trip unless its receiver has already posted it.

Sources: gloo's allreduce.cc, reduce.cc, allgather.cc, broadcast.cc, barrier.cc, alltoall.cc, gather.cc, scatter.cc and
transport/tcp/pair.cc, and torch's ProcessGroupGloo.cpp; tests/torch counts the bytes of each on real sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from testbed.errors import SpecError

PREAMBLE_BYTES: Final = 48
"""Bytes of an announcement, and of the preamble of every message."""
_SEGMENT_BYTES: Final = 1 << 20
"""The longest segment of a ring (gloo's kMaxSegmentSize)."""
_MOST_BYTES: Final = 1 << 36
"""Largest size of a collective; a larger one would have too many segments to list."""
SEND, POST, AWAIT_SENT, AWAIT_RECEIVED = range(4)


class GlooCall(NamedTuple):
    """One call of a collective: begin to send, be ready to receive, or wait for the oldest of either with that peer."""

    kind: int
    peer: int
    """By group rank."""
    size: int = 0
    """Bytes, without preamble."""


Calls = Iterator[GlooCall]


def calls(operation: Mapping[str, Any], position: int, members: int) -> list[GlooCall]:
    """Return a rank's calls for an operation (a line of testbed.torch.observed), in order.

    `position` is its rank in the group. SpecError for an operation whose size does not determine its messages.
    """
    if operation.get("sparse"):
        raise SpecError("cannot record a sparse all-reduce: each rank's message sizes depend on the other ranks")
    maker = _MAKERS.get(what := operation["what"])
    if maker is None:
        raise SpecError(f"gloo has no {what!r}; known are {', '.join(_MAKERS)}")
    parts = operation["sizes"] if operation["call"] in _ONE_BY_ONE and "sizes" in operation else [operation["bytes"]]
    if not 0 <= min(parts, default=0) <= max(parts, default=0) <= _MOST_BYTES:
        raise SpecError(f"the {what} of {max(parts)} bytes cannot be played; collectives have 0 to {_MOST_BYTES} bytes")
    return [call for part in parts for call in maker(position, members, part, operation)] if members > 1 else []


def wire_bytes(made: Sequence[GlooCall]) -> dict[int, int]:
    """Return the bytes of TCP payload that these calls send to each peer, by group rank."""
    sent: dict[int, int] = {}
    for call in made:
        if call.kind in (SEND, POST):
            size = call.size + 2 * PREAMBLE_BYTES if call.kind == SEND else PREAMBLE_BYTES
            sent[call.peer] = sent.get(call.peer, 0) + size
    return sent


def _all_reduce(position: int, members: int, size: int, operation: Mapping[str, Any]) -> Calls:
    if size == 0:
        return
    item = operation["item"]
    longest = item * max(1, _SEGMENT_BYTES // item)
    segments = _up(max(-(-size // longest), 2 * members), members)
    segment = _up(-(-size // segments), item)
    yield from _ring(position, members, size, segments, segment, first=1, tail=0)
    if operation["what"] == "all_reduce" or operation.get("backend") != "nccl":  # gloo's reduce-scatter is whole
        yield from _ring(position, members, size, segments, segment, first=0, tail=0)


def _reduce(position: int, members: int, size: int, operation: Mapping[str, Any]) -> Calls:
    if size == 0:
        return
    item = operation["item"]
    segment = _up(min(-(-size // (2 * members)), item * max(1, _SEGMENT_BYTES // item)), item)
    segments = _up(max(-(-size // segment), 2 * members), members)
    yield from _ring(position, members, size, segments, segment, first=1, tail=segments // members - 2)
    part, root = segments // members * segment, operation["root"]
    if position != root:
        yield from _exchange([(root, _within(part, size - position * part))], [])
    else:
        yield from _exchange([], [(peer, _within(part, size - peer * part)) for peer in range(members) if peer != root])


def _ring(position: int, members: int, size: int, segments: int, segment: int, *, first: int, tail: int) -> Calls:
    """Send to the previous rank, receive from the next one, two segments at a time. `first`: the part sent first,
    relative to the rank's own. `tail`: number of segments in addition to all parts but one (gloo's reduce has some).
    """
    after, before = (position + 1) % members, (position - 1) % members
    each = segments // members
    count = segments - each + tail

    def length(part: int, number: int) -> int:
        return _within(segment, size - (part * each + number) * segment % (segments * segment))

    for number in range(count + 2):
        if number >= 2:
            if length(position + first + 1, number - 2):
                yield GlooCall(AWAIT_RECEIVED, after)
            if length(position + first, number - 2):
                yield GlooCall(AWAIT_SENT, before)
        if number < count:
            if received := length(position + first + 1, number):
                yield GlooCall(POST, after, received)
            if sent := length(position + first, number):
                yield GlooCall(SEND, before, sent)


def _all_gather(position: int, members: int, size: int, operation: Mapping[str, Any]) -> Calls:
    if size == 0:
        return
    after, before = (position + 1) % members, (position - 1) % members
    halves = (size // 2, size - size // 2)
    for number in range(2 * (members - 1)):
        if number >= 2:
            yield from (GlooCall(AWAIT_SENT, after), GlooCall(AWAIT_RECEIVED, before))
        yield GlooCall(SEND, after, halves[number % 2])
        yield GlooCall(POST, before, halves[number % 2])
    for _ in range(2):
        yield from (GlooCall(AWAIT_SENT, after), GlooCall(AWAIT_RECEIVED, before))


def _broadcast(position: int, members: int, size: int, operation: Mapping[str, Any]) -> Calls:
    root, sent = operation["root"], []
    own, rounds = (position - root) % members, (members - 1).bit_length()
    for number in range(rounds):
        other = own ^ 1 << number
        if own >> (number + 1) or other >= members:
            continue
        peer = (other + root) % members
        if own & 1 << number:
            yield from (GlooCall(POST, peer, size), GlooCall(AWAIT_RECEIVED, peer))
        else:
            sent.append(peer)
            yield GlooCall(SEND, peer, size)
    yield from (GlooCall(AWAIT_SENT, peer) for peer in sent)


def _barrier(position: int, members: int, size: int, operation: Mapping[str, Any]) -> Calls:
    distance = 1
    while distance < members:
        after, before = (position + distance) % members, (position - distance) % members
        yield from (GlooCall(POST, before), GlooCall(SEND, after))
        yield from (GlooCall(AWAIT_RECEIVED, before), GlooCall(AWAIT_SENT, after))
        distance *= 2


def _monitored_barrier(position: int, members: int, size: int, operation: Mapping[str, Any]) -> Calls:
    rank_bytes = 4
    if position:
        yield from _exchange([(0, rank_bytes)], [(0, rank_bytes)])
    else:
        others = [(peer, rank_bytes) for peer in range(1, members)]
        yield from (*_exchange([], others), *_exchange(others, []))


def _all_to_all(position: int, members: int, size: int, operation: Mapping[str, Any]) -> Calls:
    even = [size // members] * members
    given, taken = operation.get("splits") or (even, even)
    made = []
    for distance in range(1, members):
        to, back = (position + distance) % members, (position - distance) % members
        yield from (GlooCall(SEND, to, given[to]), GlooCall(POST, back, taken[back]))
        made += [GlooCall(AWAIT_SENT, to), GlooCall(AWAIT_RECEIVED, back)]
    yield from made


def _gather(position: int, members: int, size: int, operation: Mapping[str, Any]) -> Calls:
    root = operation["root"]
    others = [(peer, size) for peer in range(members) if peer != root]
    yield from _exchange([], others) if position == root else _exchange([(root, size)], [])


def _scatter(position: int, members: int, size: int, operation: Mapping[str, Any]) -> Calls:
    root = operation["root"]
    others = [(peer, size) for peer in range(members) if peer != root]
    yield from _exchange(others, []) if position == root else _exchange([], [(root, size)])


def _exchange(sent: Sequence[tuple[int, int]], received: Sequence[tuple[int, int]]) -> Calls:
    """Post all non-empty messages, then wait for all of them."""
    for kind, sides in ((SEND, sent), (POST, received)):
        yield from (GlooCall(kind, peer, size) for peer, size in sides if size)
    for kind, sides in ((AWAIT_SENT, sent), (AWAIT_RECEIVED, received)):
        yield from (GlooCall(kind, peer) for peer, size in sides if size)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _within(most: int, left: int) -> int:
    return max(0, min(most, left))


_ONE_BY_ONE: Final = ("reduce_scatter", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
"""Methods that perform one operation per tensor."""
_MAKERS: Final[dict[str, Callable[[int, int, int, Mapping[str, Any]], Calls]]] = {
    "all_reduce": _all_reduce, "reduce_scatter": _all_reduce, "reduce": _reduce, "all_gather": _all_gather,
    "broadcast": _broadcast, "barrier": _barrier, "monitored_barrier": _monitored_barrier,
    "all_to_all": _all_to_all, "gather": _gather, "scatter": _scatter,
}  # fmt: skip
OPERATIONS: Final = tuple(_MAKERS)
