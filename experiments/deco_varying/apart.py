"""Why does a pipe carry messages sooner than TCP does? `python experiments/deco_varying/apart.py`.

A pipe's formula says when a message is there: when its packets, headers included, have left at the link's rate, and a
delay later. Here every message of a static pair is timed by it and in the guest, while one thing after another is taken
away that the formula knows nothing of: the rate that moves, the messages of the other direction, the end of the queue.
This writes apart.csv.
"""

from __future__ import annotations

import argparse
import itertools
from typing import NamedTuple

from timeline import FIRST, HERE, NETWORKS, WORKERS, Network, over, played, trace_of

from testbed import csv_rows
from testbed.metrics.wires import Wire
from testbed.player.virtual import OverLinks
from testbed.profiles import LinkProfile, Pipe
from testbed.runtime.frame import HEADER_BYTES
from testbed.trace.played import Played

STEPS = 60
SMALL_BYTES = 1000
"""A message that is in nobody's way."""
_SEND, _OPERATIONS = 1, 3
_SEGMENT_BYTES = 1448


class Case(NamedTuple):
    """What is left of the link."""

    rate: str
    """constant | varying"""
    directions: str
    """one | both: in which large messages are on their way."""
    buffer: str
    """whole: it holds any message; own: the profile's."""


CASES = tuple(Case(*each) for each in itertools.product(("constant", "varying"), ("one", "both"), ("whole", "own")))


class Row(NamedTuple):
    """A line of apart.csv: a message of worker 0's."""

    network: str
    rate: str
    directions: str
    buffer: str
    step: int
    formula_s: float
    """From when it is handed over until it is there, by the pipe's formula."""
    entry_s: float
    """The same if the rate of that moment lasted: if all packets were timed when they enter the queue, at once."""
    played_s: float
    delay_s: float
    """Of the link, one way."""
    packets: int
    """Of the message."""
    window_packets: int
    """Of its connection, when the step has ended."""
    resent_packets: int
    """So far."""


def link_of(network: Network, case: Case) -> LinkProfile:
    """Return the link of a case."""

    def changed(pipe: Pipe | None) -> Pipe | None:
        if pipe is None:
            return None
        update: dict[str, object] = {"schedule": None, "trace": None} if case.rate == "constant" else {}
        if case.buffer == "whole":
            update["buffer_bytes"] = 2 * network.message_bytes(FIRST.ratio)
        return pipe.model_copy(update=update)

    link = network.link
    return link.model_copy(update={"up": changed(link.up), "down": changed(link.down)})


def job_of(network: Network, case: Case, steps: int) -> OverLinks:
    """Return what is to be played: synchronous steps, so that no message queues behind another."""
    large = network.message_bytes(FIRST.ratio) + HEADER_BYTES
    sizes = (large, large if case.directions == "both" else SMALL_BYTES)
    trace = trace_of([[size] * steps for size in sizes], [step + 1 for step in range(steps)])
    return over(link_of(network, case), trace)


def rows(network: Network, case: Case, steps: int, found: Played) -> list[Row]:
    """Return a row for each of worker 0's messages."""
    link, made = link_of(network, case), list[Row]()
    assert link.up is not None
    wire = Wire((0, "up"), link, link.up, played=True)
    large = network.message_bytes(FIRST.ratio) + HEADER_BYTES
    bits = wire.bits(large)
    sent, received = found.lanes[0], found.lanes[WORKERS + 1]
    for step in range(steps):
        first_ns, last_ns = sent.first_byte_ns[_OPERATIONS * step + _SEND], received.last_byte_ns[2 * step]
        left_ns, delay_ns = wire.carried_at(first_ns, bits), wire.delay_at(first_ns)
        (state,) = (each for each in found.sockets[step] if each.node == 0)
        made.append(
            Row(
                network.profile,
                *case,
                step,
                (left_ns + delay_ns - first_ns) / 1e9,
                bits / wire.rate_at(first_ns) + delay_ns / 1e9,
                (last_ns - first_ns) / 1e9,
                delay_ns / 1e9,
                -(-large // _SEGMENT_BYTES),
                state.cwnd_packets,
                state.bytes_retransmitted // _SEGMENT_BYTES,
            )
        )
    return made


def main(asked: argparse.Namespace) -> None:
    """Write apart.csv."""
    wanted, steps = list(itertools.product(NETWORKS.values(), CASES)), STEPS
    if asked.quick:
        wanted, steps = [wanted[0], wanted[len(CASES) - 1]], 8
    every = played([job_of(network, case, steps) for network, case in wanted])
    made = [row for each, found in zip(wanted, every, strict=True) for row in rows(*each, steps, found)]
    csv_rows.write_rows(asked.output / "apart.csv", Row._fields, made, digits=6)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, HERE)
