"""Collectives as the messages of a ring: what one member sends to the next and receives from the one before.

Rings are what NCCL and gloo use for large tensors (Patarasuk and Yuan, 2009). Small ones may take a tree there, with
fewer rounds.
"""

from typing import NamedTuple


class RingRound(NamedTuple):
    """One round of one member; None where it does not send, or not receive, in it. Sending comes first."""

    sends_to: int | None
    receives_from: int | None
    """Positions in the ring."""
    message_bytes: int


def ring_rounds(collective: str, position: int, members: int, size: int, root: int = 0) -> list[RingRound]:
    """Return the rounds of the member at `position`.

    `size` is in bytes: of the whole tensor for all_reduce, reduce_scatter and broadcast, of a member's own part for
    all_gather. Parts are rounded up to whole bytes. KeyError for any other collective.
    """
    after, before = (position + 1) % members, (position - 1) % members
    part = max(1, -(-size // members))
    if collective == "broadcast":
        distance = (position - root) % members
        first = [RingRound(None, before, max(1, size))] * (distance > 0)
        return first + [RingRound(after, None, max(1, size))] * (distance < members - 1)
    count, message = {
        "all_reduce": (2 * (members - 1), part),
        "reduce_scatter": (members - 1, part),
        "all_gather": (members - 1, max(1, size)),
    }[collective]
    return [RingRound(after, before, message)] * count
