"""Validates a trace: every message is sent and received once, every wait is met, no step depends on a later one.

Separate from format.py because it needs numpy, which guests lack: makers and importers of traces validate them here,
and the player relies on that. `simulate` detects deadlocks of lanes, because it executes the operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from testbed.errors import SpecError
from testbed.trace.format import KINDS, RECEIVE, SEND, SIGNAL, WAIT, Lane, Trace, read_trace

_Keys = NDArray[np.uint64]


class _Chosen(NamedTuple):
    """All operations of one kind, sorted by key."""

    keys: _Keys
    """Key of a message: sender, receiver, tag. Key of an event: its tag."""
    steps: NDArray[np.int64]
    values: NDArray[np.int64]


def load_trace(path: Path) -> Trace:
    """Read a trace from its file and validate it. SpecError, with the fault, if either fails."""
    trace = read_trace(path)
    check_trace(trace, str(path))
    return trace


def check_trace(trace: Trace, where: str) -> None:
    """Validate a trace; `where` is for messages. SpecError names the first fault.

    Any number of first steps of a valid trace can be played alone: a message is received in the step of its send or
    later, and a wait is met by signals of its own step or earlier ones.
    """
    for lane in trace.lanes:
        _check_columns(trace, lane, where)
    sends, receives, signals, waits = (_choose(trace.lanes, kind) for kind in (SEND, RECEIVE, SIGNAL, WAIT))
    for chosen, verb in ((sends, "sent"), (receives, "received")):
        if (twice := chosen.keys[1:][chosen.keys[1:] == chosen.keys[:-1]]).size:
            raise SpecError(f"{where}: {_message(trace, twice[0])} is {verb} twice; give every message its own tag")
    for these, others, fault in (
        (receives, sends, "received but not sent"),
        (sends, receives, "sent but not received"),
    ):
        if (alone := np.setdiff1d(these.keys, others.keys, assume_unique=True)).size:
            raise SpecError(f"{where}: {_message(trace, alone[0])} is {fault}")
    if (late := np.flatnonzero(sends.steps > receives.steps)).size:
        at, message = late[0], _message(trace, sends.keys[late[0]])
        raise SpecError(
            f"{where}: {message} is received in step {receives.steps[at]} but sent in a later one, {sends.steps[at]}"
        )
    _check_waits(signals, waits, where)


def _check_columns(trace: Trace, lane: Lane, where: str) -> None:
    """Validate the operations one by one."""
    kind, label, peer, value = (np.asarray(column) for column in (lane.kind, lane.label, lane.peer, lane.value))
    messages = (kind == SEND) | (kind == RECEIVE)
    for wrong, fault in (
        (kind >= len(KINDS), "is of no known kind"),
        (label >= len(trace.labels), "has a label that is not in the trace's list"),
        (messages & (peer >= len(trace.nodes)), "refers to a node that does not exist"),
        (messages & (peer == lane.node), "is for its own node"),
        # A message has at least one byte, because its last byte marks its arrival.
        (value < (kind == SEND), "has a value below the minimum (0; 1 byte for a message)"),
    ):
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            _refuse(trace, lane, at, fault, where)
    if (lane.starts[0], lane.starts[-1]) != (0, len(lane)) or len(lane.starts) != trace.steps + 1:
        raise SpecError(
            f"{where}: the lane {lane.name!r} of {trace.nodes[lane.node]} does not have {trace.steps} steps"
        )


def _refuse(trace: Trace, lane: Lane, at: int, fault: str, where: str) -> NoReturn:
    step = int(np.searchsorted(np.asarray(lane.starts), at, side="right")) - 1
    kind = lane.kind[at]
    what = KINDS[kind] if kind < len(KINDS) else f"kind {kind}"
    numbers = f"label {lane.label[at]}, peer {lane.peer[at]}, tag {lane.tag[at]}, value {lane.value[at]}"
    raise SpecError(
        f"{where}: operation {at - lane.starts[step]} of step {step} of the lane {lane.name!r} of "
        f"{trace.nodes[lane.node]} ({what}: {numbers}) {fault}"
    )


def _choose(lanes: Sequence[Lane], kind: int) -> _Chosen:
    keys, steps, values = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for lane in lanes:
        here = np.flatnonzero(np.asarray(lane.kind) == kind)
        key = np.asarray(lane.tag)[here].astype(np.uint64)
        if kind in (SEND, RECEIVE):
            peer, node = np.asarray(lane.peer)[here].astype(np.uint64), np.uint64(lane.node)
            pair = (node << np.uint64(16)) | peer if kind == SEND else (peer << np.uint64(16)) | node
            key |= pair << np.uint64(32)
        keys.append(key)
        steps.append(np.searchsorted(np.asarray(lane.starts), here, side="right") - 1)
        values.append(np.asarray(lane.value)[here])
    key = np.concatenate(keys)
    order = np.argsort(key, kind="stable")
    return _Chosen(key[order], np.concatenate(steps)[order], np.concatenate(values)[order])


def _check_waits(signals: _Chosen, waits: _Chosen, where: str) -> None:
    """Check that each event reaches the count of every wait by the end of the wait's step."""
    shift = np.uint64(32)
    counted = np.sort((signals.keys << shift) | signals.steps.astype(np.uint64))
    before = np.searchsorted(counted, waits.keys << shift)
    until = np.searchsorted(counted, (waits.keys << shift) | waits.steps.astype(np.uint64), side="right")
    if (never := np.flatnonzero(until - before < waits.values)).size:
        at = never[0]
        raise SpecError(
            f"{where}: in step {waits.steps[at]} a lane waits until the event {waits.keys[at]} was signalled "
            f"{waits.values[at]} times, but by the end of that step it is signalled only {(until - before)[at]} times"
        )


def _message(trace: Trace, key: np.uint64) -> str:
    number = int(key)
    sender, receiver = trace.nodes[number >> 48], trace.nodes[(number >> 32) & 0xFFFF]
    return f"message {number & 0xFFFFFFFF} from {sender} to {receiver}"
