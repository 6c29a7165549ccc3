"""Sums over a trace: how often, how many bytes, how much work."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from testbed.play.trace import KINDS, SEND, WORK, Trace


class PairTotal(NamedTuple):
    """All messages of one node for another."""

    sender: int
    receiver: int
    messages: int
    payload_bytes: int


class WorkTotal(NamedTuple):
    """All work under one label."""

    label: int
    ns_by_node: tuple[int, ...]
    """Of all of a node's lanes."""


def operations_by_kind(trace: Trace) -> dict[str, int]:
    """Count operations; every kind is there."""
    counts = sum((np.bincount(np.asarray(lane.kind), minlength=len(KINDS)) for lane in trace.lanes), np.zeros(5, int))
    return dict(zip(KINDS, counts.tolist(), strict=True))


def bytes_by_pair(trace: Trace) -> list[PairTotal]:
    """Sum what nodes send each other, by sender and receiver."""
    totals: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for lane in trace.lanes:
        sends = np.asarray(lane.kind) == SEND
        peers, values = np.asarray(lane.peer)[sends], np.asarray(lane.value)[sends]
        for peer in np.unique(peers):
            chosen = values[peers == peer]
            total = totals[lane.node, int(peer)]
            total[0] += len(chosen)
            total[1] += int(chosen.sum())
    return [PairTotal(*pair, *total) for pair, total in sorted(totals.items())]


def work_by_label(trace: Trace) -> list[WorkTotal]:
    """Sum work, by label and node; labels without work are left out."""
    totals: dict[int, list[int]] = defaultdict(lambda: [0] * len(trace.nodes))
    for lane in trace.lanes:
        works = np.asarray(lane.kind) == WORK
        labels, values = np.asarray(lane.label)[works], np.asarray(lane.value)[works]
        for label in np.unique(labels):
            totals[int(label)][lane.node] += int(values[labels == label].sum())
    return [WorkTotal(label, tuple(total)) for label, total in sorted(totals.items())]
