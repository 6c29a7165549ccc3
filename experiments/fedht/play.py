"""Play rounds over links, on the virtual clock: `python experiments/fedht/play.py`, after train.py.

This writes times.csv: how long each training takes, at the strongest label skew; of thresholds those with the middle
ratio. Rounds are synchronous, so links change no weights: only the messages' lengths count. Those of top-k are the same
in every round, so that a few rounds are played and the others are as long as the last; those of thresholds are in
messages.csv. The server answers with dense weights.

equal     every client has an uplink of the same rate
FedLuck's the uplinks of its released configuration, with a straggler
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import train

from testbed import csv_rows
from testbed.metrics.links import Pipes
from testbed.player.virtual import OverLinks, guest_lab, play_virtual
from testbed.profiles import LinkProfile, load_profile
from testbed.trace.simulate import replay, step_ends
from testbed.trace.synthetic import rounds_trace
from testbed.workloads.images import build_network
from testbed.workloads.networks import DIGITS

MODEL, LOCAL_NS = "digits-mlp-large", 50_000_000
"""A client's local steps take 10 ms each."""
_PUBLISHED_BYTES = 4 * 234_090
"""Of FedLuck's network, whose uplinks are scaled by ours over these, as in experiments/fedluck."""
UPLINKS_MB = {
    "equal": (0.175,) * train.CLIENTS,
    "FedLuck's": (0.1, 0.03, 0.133, 0.15, 0.167, 0.183, 0.2, 0.217, 0.233, 0.25),
}
CONSTANT = 4
"""Rounds of equal messages that are played."""


class Row(NamedTuple):
    """A line of times.csv."""

    network: str
    method: str
    alpha: float
    first_ratio: float
    seed: int
    seconds: float
    """Of all rounds."""
    ideal_s: float
    """The same over links that do what they say, and nothing else."""


def links(uplinks_mb: tuple[float, ...], answer_bytes: int) -> list[LinkProfile]:
    """Return the links of the clients and of the server."""
    rates = [8 * round(1e6 * answer_bytes / _PUBLISHED_BYTES * rate) for rate in uplinks_mb]
    clients = [f"link(80Mbit, 10ms, up.rate={rate}bit, up.buffer=256kB)" for rate in rates]
    return [load_profile(link) for link in (*clients, "link(1Gbit, 10ms)")]


def constant(run: Mapping[str, str]) -> list[int]:
    """Return the lengths of top-k's messages, which are all the same."""
    return [round(1e6 * float(run["payload_mb"]) / int(run["rounds"]) / train.CLIENTS)] * train.CLIENTS


def main(asked: argparse.Namespace) -> None:
    """Play what runs.csv has and times.csv lacks."""
    table = csv_rows.Table(asked.output / "times.csv", Row, *Row._fields[:5])
    changing: dict[tuple[str, ...], list[list[int]]] = {}
    for line in csv_rows.read_records(asked.output / "messages.csv"):
        run = line["method"], line["alpha"], line["first_ratio"], line["seed"]
        changing.setdefault(run, []).append([int(size) for size in line["payload_bytes"].split()])
    rows = [row for row in csv_rows.read_records(asked.output / "runs.csv") if row["use"] == "result"]
    strongest = min(float(row["alpha"]) for row in rows)
    for network in UPLINKS_MB:
        table.add(played(network, [row for row in rows if float(row["alpha"]) == strongest], changing, table))


def played(
    network: str,
    rows: Sequence[Mapping[str, str]],
    changing: Mapping[tuple[str, ...], list[list[int]]],
    known: csv_rows.Table,
) -> list[Row]:
    """Play what is not known of one network."""
    answer = 4 * sum(each.numel() for each in build_network(MODEL, DIGITS, 0).parameters())
    profiles = links(UPLINKS_MB[network], answer)
    plays: dict[tuple[str, ...], OverLinks] = {}
    todo: list[tuple[tuple[str, ...], Mapping[str, str]]] = []
    for row in rows:
        run = row["method"], row["alpha"], row["first_ratio"], row["seed"]
        always = row["method"] == train.TOP_K
        if (network, *run) in known or not (always or run in changing):
            continue
        play = (network, *run[:3], *([] if always else [row["seed"]]))
        todo.append((play, row))
        if play not in plays:
            sent = [constant(row)] * CONSTANT if always else changing[run]
            plays[play] = OverLinks(rounds_trace(sent, LOCAL_NS, answer), guest_lab("star", profiles, len(profiles)))
    every = play_virtual(list(plays.values()), prove_steady=False) if plays else []
    found = {}
    for (name, play), times in zip(plays.items(), every, strict=True):
        ends = step_ends(play.trace, times.lanes, times.steps)
        ideal = replay(play.trace, links=Pipes("star", play.lab.profiles, len(play.lab.profiles)))
        found[name] = [[each[-1] / 1e9, (each[-1] - each[-2]) / 1e9] for each in (ends, ideal)]
    done = []
    for name, row in todo:
        more = max(0, int(row["rounds"]) - plays[name].trace.steps)
        seconds = (whole + more * last for whole, last in found[name])
        named = row["method"], float(row["alpha"]), float(row["first_ratio"]), int(row["seed"])
        done.append(Row(network, *named, *seconds))
    return done


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
