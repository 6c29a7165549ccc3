"""Play the transfers of scenes over home links: `python experiments/mesongs/play.py`, after compress.py.

This writes transfers.csv: the seconds from the beginning of encoding to the end of decoding, on the virtual clock,
beside those of links as formulas.
"""

import argparse
from typing import NamedTuple

from testbed import csv_rows
from testbed.metrics.links import Pipes
from testbed.player.split import step_split
from testbed.player.virtual import OverLinks, guest_lab, play_virtual
from testbed.profiles import load_profile
from testbed.trace.simulate import ideal_step_ns
from testbed.trace.synthetic import transfer_trace

LINKS = {20: "link(20Mbit, 10ms)", 80: "consumer-80mbps"}
"""Mbit/s -> the profile of both ends' links."""


class Row(NamedTuple):
    """A line of transfers.csv."""

    scene: int
    stage: str
    mbps: int
    payload_bytes: int
    seconds: float
    """From the first part's encoding to the last one's decoding."""
    ideal_s: float
    """The same over links that do what they say, and nothing else."""
    wire_bytes: float
    """IP packets of both nodes."""


def main(asked: argparse.Namespace) -> None:
    """Play what messages.csv has and transfers.csv lacks."""
    table = csv_rows.Table(asked.output / "transfers.csv", Row, "scene", "stage", "mbps")
    sent: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
    for row in csv_rows.read_records(asked.output / "messages.csv"):
        numbers = (int(row["encode_ns"]), int(row["payload_bytes"]), int(row["decode_ns"]))
        sent.setdefault((int(row["scene"]), row["stage"]), []).append(numbers)
    todo = [(*key, mbps, each) for key, each in sent.items() for mbps in LINKS if (*key, mbps) not in table]
    plays = [
        OverLinks(transfer_trace(each), guest_lab("star", [load_profile(LINKS[mbps])], 2)) for *_, mbps, each in todo
    ]
    for (trace, lab, _), found, (*key, each) in zip(plays, play_virtual(plays) if plays else [], todo, strict=True):
        split = step_split(trace, found)
        ideal_ns = ideal_step_ns(trace, Pipes("star", lab.profiles, 2), 1)
        size = sum(payload for _, payload, _ in each)
        table.add([Row(*key, size, split.step_ns / 1e9, ideal_ns / 1e9, split.sent_bytes)])


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
