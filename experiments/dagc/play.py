"""Play rounds over links, on the virtual clock: `python experiments/dagc/play.py`, after train.py.

This writes times.csv: when each training reaches the target, and how long a round takes. Rounds are synchronous, so
links change no weights: only the messages' lengths count. Those of top-k are the same in every round and with every
seed, so that a few rounds are played and the others are as long as the last; those of thresholds are in messages.csv.
The server answers with dense weights.

equal     every client has an uplink of the same rate
FedLuck's the uplinks of its released configuration, with a straggler: the clients with most data have the slowest ones
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import train

from testbed import csv_rows
from testbed.metrics.links import Pipes
from testbed.nodes.bucket import Bucket
from testbed.player.virtual import OverLinks, guest_lab, play_virtual
from testbed.profiles import LinkProfile, load_profile
from testbed.studies.federated import FederatedSpec, Federation
from testbed.trace.simulate import replay, step_ends
from testbed.trace.synthetic import rounds_trace
from testbed.workloads.images import build_network
from testbed.workloads.networks import DIGITS

MODEL, LOCAL_NS = "digits-mlp-large", 50_000_000
"""A client's local steps take 10 ms each."""
_PUBLISHED_BYTES = 4 * 234_090
"""Of FedLuck's network, whose uplinks are scaled by ours over these, as in experiments/fedluck."""
UPLINKS_MB = (0.1, 0.03, 0.133, 0.15, 0.167, 0.183, 0.2, 0.217, 0.233, 0.25)
EQUAL_MB = 0.175
CONSTANT = 4
"""Rounds of equal messages that are played: where every queue has one flow, rounds repeat."""
WITH_THRESHOLDS = ("equal",)
"""Networks over which thresholds are played, whose rounds differ from seed to seed."""
PLAYED = ("uniform", "share^(2/3)", train.SAME, train.ABSOLUTE)


class Row(NamedTuple):
    """A line of times.csv."""

    network: str
    arm: str
    feedback: bool
    skew: float
    mean_ratio: float
    seed: int
    rounds: int | None
    """Until the target; None: it is never reached."""
    seconds: float | None
    round_s: float
    """Mean."""
    ideal_s: float
    """Mean over links that do what they say, and nothing else."""


def parameters() -> int:
    """Return the bytes of dense weights."""
    return 4 * sum(each.numel() for each in build_network(MODEL, DIGITS, 0).parameters())


def networks(answer_bytes: int) -> dict[str, list[LinkProfile]]:
    """Return the links of the clients and of the server, by network."""
    scale = answer_bytes / _PUBLISHED_BYTES

    def star(uplinks: list[float]) -> list[LinkProfile]:
        rates = [8 * round(1e6 * scale * rate) for rate in uplinks]
        clients = [f"link(80Mbit, 10ms, up.rate={rate}bit, up.buffer=256kB)" for rate in rates]
        return [load_profile(link) for link in (*clients, "link(1Gbit, 10ms)")]

    return {
        "equal": star([EQUAL_MB] * train.CLIENTS),
        "FedLuck's": star(list(UPLINKS_MB)),
    }


def constant(arm: str, skew: float, mean: float) -> list[int]:
    """Return the lengths of top-k's messages, by client."""
    spec = FederatedSpec(
        model=MODEL, clients=train.CLIENTS, rounds=1, local_steps=1, batch_size=1, learning_rate=1.0,
        learning_rate_floor=1.0, alpha=train.ALPHA, skew=skew, seed=0,
    )  # fmt: skip
    weights = [each.detach() for each in build_network(MODEL, DIGITS, 0).parameters()]
    shapes = [tuple(each.shape) for each in weights]
    return [
        len(Bucket(shapes, f"topk({ratio:.6g}, tensor)", seed=0, sender=client).encode(weights, 0))
        for client, ratio in enumerate(train.ARMS[arm](Federation(spec).shares, mean))
    ]


def main(asked: argparse.Namespace) -> None:
    """Play what runs.csv has and times.csv lacks."""
    table = csv_rows.Table(asked.output / "times.csv", Row, *Row._fields[:6], digits=None)
    rows = csv_rows.read_records(asked.output / "runs.csv")
    runs = [row for row in rows if row["use"] == "result" and row["arm"] in PLAYED]
    skew = max(float(row["skew"]) for row in runs)
    runs = [row for row in runs if float(row["skew"]) == skew]
    changing: dict[tuple[str, ...], list[list[int]]] = {}
    for line in csv_rows.read_records(asked.output / "messages.csv"):
        key = line["arm"], line["mean_ratio"], line["seed"]
        changing.setdefault(key, []).append([int(size) for size in line["payload_bytes"].split()])
    for network in networks(parameters()):
        table.add(played(network, runs, changing, table))


def played(
    network: str,
    runs: Sequence[Mapping[str, str]],
    changing: Mapping[tuple[str, ...], list[list[int]]],
    known: csv_rows.Table,
) -> list[Row]:
    """Play what is not known of one network."""
    answer = parameters()
    links = networks(answer)[network]
    plays: dict[tuple[str, ...], OverLinks] = {}
    todo: list[tuple[tuple[str, ...], Mapping[str, str]]] = []
    for row in runs:
        if row["arm"] not in train.ARMS and network not in WITH_THRESHOLDS:
            continue
        if (network, *(row[name] for name in Row._fields[1:6])) in known:
            continue
        arm, mean = row["arm"], row["mean_ratio"]
        play = (network, arm, mean, *([] if arm in train.ARMS else [row["seed"]]))
        todo.append((play, row))
        if play not in plays:
            always = arm in train.ARMS
            sent = (
                [constant(arm, float(row["skew"]), float(mean))] * CONSTANT
                if always
                else changing[arm, mean, row["seed"]]
            )
            trace = rounds_trace(sent, LOCAL_NS, answer)
            plays[play] = OverLinks(trace, guest_lab("star", links, len(links)))
    every = play_virtual(list(plays.values()), prove_steady=False) if plays else []
    ends = {
        name: [end / 1e9 for end in step_ends(play.trace, found.lanes, found.steps)]
        for (name, play), found in zip(plays.items(), every, strict=True)
    }
    ideals = {
        name: replay(play.trace, links=Pipes("star", play.lab.profiles, len(play.lab.profiles)))[-1] / 1e9
        for name, play in plays.items()
    }
    return [timed(network, row, ends[name], ideals[name]) for name, row in todo]


def timed(network: str, run: Mapping[str, str], ends: Sequence[float], ideal_s: float) -> Row:
    """Return when a training reaches its target; `ends`: of the rounds that were played."""
    reached, always = int(run["rounds_to_target"] or 0) or None, run["arm"] in train.ARMS
    last = ends[-1] - ends[-2] if always else ends[-1] / len(ends)
    seconds = None if reached is None else ends[min(reached, len(ends)) - 1] + max(0, reached - len(ends)) * last
    named = run["feedback"] == "True", float(run["skew"]), float(run["mean_ratio"]), int(run["seed"])
    return Row(network, run["arm"], *named, reached, seconds, last, ideal_s / len(ends))


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
