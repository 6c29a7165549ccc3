"""How a model's tensors are divided: into fragments that are exchanged in turn (Streaming DiLoCo, arXiv 2501.18512),
into the parts of a ring all-reduce, and into tensors that a codec encodes and tensors sent dense. No torch.

Published fragments consist of whole layers. Here they consist of whole tensors, so that even a model of few layers,
dominated by its embeddings, has fragments of similar size, which is what matters to a link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, TypeAlias, TypeVar

from testbed.errors import SpecError
from testbed.spec import AlignedSpec, DataParallelSpec, LowRankSpec

_Item = TypeVar("_Item")
Shapes: TypeAlias = tuple[tuple[int, ...], ...]
"""Shapes of the tensors of a message."""
SMALL: Final = 1024
"""Tensors with fewer values are sent dense: a codec's header and error would cost more than it saves."""


def divide_tensors(values: Sequence[int], fragments: int) -> list[tuple[int, ...]]:
    """Divide tensors, given their numbers of values, into fragments: largest first, each to the smallest so far.

    Returns each fragment's tensors as ascending indices into `values`; each tensor is in one fragment. SpecError for
    fewer tensors than fragments.
    """
    if fragments > len(values):
        raise SpecError(
            f"data.streaming.fragments is {fragments}, but the model has only {len(values)} tensors; "
            f"set at most {len(values)}"
        )
    parts: list[list[int]] = [[] for _ in range(fragments)]
    for tensor in sorted(range(len(values)), key=lambda number: -values[number]):
        least = min(parts, key=lambda part: (sum(values[number] for number in part), len(part)))
        least.append(tensor)
    return [tuple(sorted(part)) for part in parts]


def in_turn(items: Sequence[_Item], step: int) -> _Item:
    """Return the item, out of one per fragment, for the fragment exchanged in a step."""
    return items[step % len(items)]


def fragment_shapes(shapes: Sequence[Sequence[int]], fragments: int) -> list[list[Sequence[int]]]:
    """Return the shapes of each fragment's tensors."""
    parts = divide_tensors([math.prod(shape) for shape in shapes], fragments)
    return [[shapes[tensor] for tensor in part] for part in parts]


def low_rank_shapes(shape: Sequence[int], spec: LowRankSpec) -> list[tuple[int, ...]]:
    """Return the shapes of what is sent of a tensor: its core and a sketch for each basis, or itself alone."""
    sides = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else ()
    sent = [tuple(min(spec.rank, side) for side in sides)]
    sent += [(side, spec.directions) for side in sides if side > spec.rank]
    return sent if sides and sum(map(math.prod, sent)) < math.prod(shape) else [tuple(shape)]


def sent_shapes(shapes: Sequence[Sequence[int]], data: DataParallelSpec) -> Sequence[Sequence[int]]:
    """Return the shapes of the tensors that workers exchange, given those of the model's."""
    if data.low_rank is None:
        return shapes
    each = [low_rank_shapes(shape, data.low_rank) for shape in shapes]
    return [sent[0] for sent in each] + [sketch for sent in each for sketch in sent[1:]]


def ring_parts(shapes: Sequence[Sequence[int]], workers: int) -> list[int]:
    """Return the number of values in each part of a ring all-reduce, one part per worker."""
    even, more = divmod(sum(map(math.prod, shapes)), workers)
    return [even + (part < more) for part in range(workers)]


def aligned_rows(shape: Sequence[int], aligned: AlignedSpec) -> int:
    """Return how many rows of a tensor are sent; 0 if it has no rows, and is sent in full."""
    return max(1, round(aligned.share * shape[0])) if len(shape) > 1 else 0


def aligned_values(shapes: Sequence[Sequence[int]], aligned: AlignedSpec) -> tuple[int, int]:
    """Return the number of values in the sketches of tensors, and in what is sent of them."""
    rows = [aligned_rows(shape, aligned) for shape in shapes]
    sketch = sum(shape[0] * aligned.directions for shape, kept in zip(shapes, rows, strict=True) if kept)
    sent = sum(math.prod((kept, *shape[1:]) if kept else shape) for shape, kept in zip(shapes, rows, strict=True))
    return sketch, sent


def reduced_parts(shapes: Sequence[Sequence[int]], data: DataParallelSpec) -> list[int]:
    """Return the number of values in each part of an all-reduce: of the tensors; or of the sketches, and then of the
    rows that the workers agree on.
    """
    if data.aligned is None:
        return ring_parts(shapes, data.workers)
    return [part for count in aligned_values(shapes, data.aligned) for part in ring_parts([(count,)], data.workers)]


def message_shapes(data: DataParallelSpec, shapes: Sequence[Sequence[int]]) -> list[list[Shapes]]:
    """Return the tensor shapes of each message, by fragment and sender (the workers and a star's server); in a ring
    all-reduce, of each part (`reduced_parts`).
    """
    fragments = fragment_shapes(sent_shapes(shapes, data), data.fragments)
    if data.exchange == "all-reduce":
        return [[((length,),) for length in reduced_parts(part, data)] for part in fragments]
    return [[tuple(tuple(shape) for shape in part)] * len(data.places) for part in fragments]
