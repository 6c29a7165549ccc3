"""How a model's tensors are divided: into fragments that are exchanged in turn (Streaming DiLoCo, arXiv 2501.18512),
into the parts of a ring that reduces, and into those that a codec encodes and those that go dense. No torch.

The published fragments are some whole layers each. Here they are whole tensors, so that fragments of a model of few
layers, most of which may be its embeddings, are about as large as each other: that is what a link sees of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias, TypeVar

from testbed.errors import SpecError
from testbed.spec import DataParallelSpec

_Item = TypeVar("_Item")
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Of the tensors of a message."""
SMALL: Final = 1024
"""Values below which a tensor goes dense: a codec's header and its error would cost more than it saves."""


def divide_tensors(values: Sequence[int], fragments: int) -> list[tuple[int, ...]]:
    """Divide tensors, of so many values each, into fragments: the largest first, each to what is smallest by then.

    Returns each fragment's tensors, by their numbers in `values`, ascending; each is in one fragment. SpecError where
    there are fewer tensors than fragments.
    """
    if fragments > len(values):
        raise SpecError(
            f"data.streaming.fragments is {fragments}, and the model has {len(values)} tensors; a fragment is one at "
            "least: state fewer"
        )
    parts: list[list[int]] = [[] for _ in range(fragments)]
    for tensor in sorted(range(len(values)), key=lambda number: -values[number]):
        least = min(parts, key=lambda part: (sum(values[number] for number in part), len(part)))
        least.append(tensor)
    return [tuple(sorted(part)) for part in parts]


def in_turn(items: Sequence[_Item], step: int) -> _Item:
    """Return the item, of one per fragment, of the fragment that a step exchanges."""
    return items[step % len(items)]


def fragment_shapes(shapes: Sequence[Sequence[int]], fragments: int) -> list[list[Sequence[int]]]:
    """Return the shapes of each fragment's tensors."""
    parts = divide_tensors([math.prod(shape) for shape in shapes], fragments)
    return [[shapes[tensor] for tensor in part] for part in parts]


def ring_parts(shapes: Sequence[Sequence[int]], workers: int) -> list[int]:
    """Return how many values of some tensors each part of a ring that reduces has, one part per worker."""
    even, more = divmod(sum(map(math.prod, shapes)), workers)
    return [even + (part < more) for part in range(workers)]


def message_shapes(data: DataParallelSpec, shapes: Sequence[Sequence[int]]) -> list[list[Shapes]]:
    """Return the tensors of each message, by fragment and sender: the workers and a star's server; in a ring that
    reduces, of each part.
    """
    fragments = fragment_shapes(shapes, data.fragments)
    if data.exchange == "all-reduce":
        return [[((length,),) for length in ring_parts(part, data.workers)] for part in fragments]
    return [[tuple(tuple(shape) for shape in part)] * len(data.places) for part in fragments]
