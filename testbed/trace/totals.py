"""Sums over a trace: numbers of operations, bytes and work."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from testbed.trace.format import KINDS, SEND, WORK, Trace


class PairTotal(NamedTuple):
    """All messages from one node to another."""

    sender: int
    receiver: int
    messages: int
    payload_bytes: int


class WorkTotal(NamedTuple):
    """All work under one label."""

    label: int
    ns_by_node: tuple[int, ...]
    """By node, over all of its lanes."""


def operations_by_kind(trace: Trace) -> dict[str, int]:
    """Count operations by kind, including kinds without any."""
    return {name: sum(lane.kind.count(kind) for lane in trace.lanes) for kind, name in enumerate(KINDS)}


def bytes_by_pair(trace: Trace) -> list[PairTotal]:
    """Sum the messages between nodes, by sender and receiver."""
    sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
    for lane in trace.lanes:
        for kind, peer, value in zip(lane.kind, lane.peer, lane.value, strict=True):
            if kind == SEND:
                sizes[lane.node, peer].append(value)
    return [PairTotal(*pair, len(own), sum(own)) for pair, own in sorted(sizes.items())]


def work_by_label(trace: Trace) -> list[WorkTotal]:
    """Sum work by label and node; omits labels without work."""
    totals: dict[int, list[int]] = defaultdict(lambda: [0] * len(trace.nodes))
    for lane in trace.lanes:
        for kind, label, value in zip(lane.kind, lane.label, lane.value, strict=True):
            if kind == WORK:
                totals[label][lane.node] += value
    return [WorkTotal(label, tuple(total)) for label, total in sorted(totals.items())]
