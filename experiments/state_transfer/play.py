"""Play the transfers over links: `python experiments/state_transfer/play.py`, after encode.py.

This writes transfers.csv: the seconds from the first byte's encoding to the last one's decoding, on the virtual clock,
beside the ideal of the links as formulas. The messages and how long coding takes are those of messages.csv.
"""

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import state

from testbed import csv_rows
from testbed.metrics.links import Pipes
from testbed.player.split import step_split
from testbed.player.virtual import OverLinks, guest_lab, play_virtual
from testbed.profiles import load_profile
from testbed.trace.simulate import ideal_step_ns
from testbed.trace.synthetic import transfer_trace

LINKS = {20: "link(20Mbit, 10ms)", 80: "consumer-80mbps"}
"""Mbit/s -> the profile of both ends' links."""
_AT_ONCE = 4
"""Transfers that are played before their rows are kept."""


class Row(NamedTuple):
    """A line of transfers.csv."""

    state: str
    codec: str
    mbps: int
    messages: int
    payload_bytes: int
    encode_s: float
    """Processor time of one core, all messages."""
    decode_s: float
    seconds: float
    """From the first message's encoding to the last one's decoding."""
    ideal_s: float
    """The same over links that do what they say, and nothing else."""
    wire_bytes: float
    """IP packets of both nodes."""


def played(transfers: list[tuple[str, str, int, list[tuple[int, int, int]]]]) -> Iterator[Row]:
    """Play transfers: (state, codec, Mbit/s, messages as `transfer_trace` takes them). Errors: `play_virtual`."""
    asked = [
        OverLinks(transfer_trace(sent), guest_lab("star", [load_profile(LINKS[mbps])], 2))
        for _, _, mbps, sent in transfers
    ]
    for (trace, lab, _), found, (name, codec, mbps, sent) in zip(asked, play_virtual(asked), transfers, strict=True):
        split = step_split(trace, found)
        encode, size, decode = (sum(each) for each in zip(*sent, strict=True))
        ideal_ns = ideal_step_ns(trace, Pipes("star", lab.profiles, 2), 1)
        seconds = (encode / 1e9, decode / 1e9, split.step_ns / 1e9, ideal_ns / 1e9)
        yield Row(name, codec, mbps, len(sent), size, *seconds, split.sent_bytes)


def main(asked: argparse.Namespace) -> None:
    """Play what messages.csv has and transfers.csv lacks."""
    table = csv_rows.Table(asked.output / "transfers.csv", Row, "state", "codec", "mbps")
    sent: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for row in csv_rows.read_records(asked.output / "messages.csv"):
        if row["state"] in state.names(asked):
            numbers = (int(row["encode_ns"]), int(row["payload_bytes"]), int(row["decode_ns"]))
            sent.setdefault((row["state"], row["codec"]), []).append(numbers)
    todo = [(*key, mbps, each) for key, each in sent.items() for mbps in LINKS if (*key, mbps) not in table]
    for first in range(0, len(todo), _AT_ONCE):
        table.add(played(todo[first : first + _AT_ONCE]))


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, state.HERE)
