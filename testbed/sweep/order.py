"""In which order the runs of a sweep are made. Pure.

grouped      as the file has them, runs over one network together and a cell's repeats one after another
interleaved  in rounds, in each of which every cell runs once: networks shuffled, and the cells within a network, so that a
             machine that warms up or slows down does it to all codecs alike. Cells of one network stay together in a round,
             because they share a lab.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from testbed.results import Order
from testbed.spec import Cell

Network = Callable[[Cell], Hashable]
"""What cells must agree in to share a lab (`session.network_of`)."""


def arrange(cells: Sequence[Cell], *, repeats: int, order: Order, seed: int, network: Network) -> list[Cell]:
    """Every cell `repeats` times. The same arguments give the same order."""
    networks: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        networks.setdefault(network(cell), []).append(cell)
    groups = list(networks.values())
    if order == "grouped":
        return [cell for group in groups for cell in group for _ in range(repeats)]
    runs: list[Cell] = []
    for number in range(repeats):
        shuffle = random.Random(f"{seed} {number}")  # a round is the same however many follow
        for group in shuffle.sample(groups, len(groups)):
            runs += shuffle.sample(group, len(group))
    return runs


def missing(runs: Iterable[Cell], done: Mapping[str, int]) -> list[Cell]:
    """The runs that are still to be made, in the same order: of each cell the first so many are done."""
    left = dict(done)
    found = []
    for cell in runs:
        if left.get(cell.id, 0) > 0:
            left[cell.id] -= 1
        else:
            found.append(cell)
    return found
