"""Play rounds over links, on the virtual clock: `python experiments/dagc/play.py`, after train.py.

This writes times.csv: when each training reaches the target, and how long a round takes. Rounds are synchronous, so
links change no weights: only the messages' lengths count. Those of top-k are the same in every round and with every
seed, so that a few rounds are played and the others are as long as the last; those of thresholds are in messages.csv.
The server answers with dense weights.

equal     every client has an uplink of the same rate
FedLuck's the uplinks of its released configuration, with a straggler: the clients with most data have the slowest ones
shared    fast uplinks, and a server whose downlink has the rate of all equal ones together
"""

import argparse
import csv
from typing import NamedTuple

import train

from testbed import csv_rows
from testbed.metrics.links import Pipes
from testbed.nodes.bucket import Bucket
from testbed.profiles import LinkProfile, load_profile
from testbed.studies.federated import FederatedSpec, Federation, OverStar, round_ends_s, rounds_trace
from testbed.trace.simulate import replay
from testbed.workloads.images import build_network
from testbed.workloads.networks import DIGITS

MODEL, LOCAL_NS = "digits-mlp-large", 50_000_000
"""A client's local steps take 10 ms each."""
_PUBLISHED_BYTES = 4 * 234_090
"""Of FedLuck's network, whose uplinks are scaled by ours over these, as in experiments/fedluck."""
UPLINKS_MB = (0.1, 0.03, 0.133, 0.15, 0.167, 0.183, 0.2, 0.217, 0.233, 0.25)
EQUAL_MB = 0.175
CONSTANT = 4
"""Rounds of equal messages that are played."""
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

    def star(uplinks: list[float], server: str) -> list[LinkProfile]:
        rates = [8 * round(1e6 * scale * rate) for rate in uplinks]
        clients = [f"link(80Mbit, 10ms, up.rate={rate}bit, up.buffer=256kB)" for rate in rates]
        return [load_profile(link) for link in (*clients, server)]

    together = 8 * round(1e6 * scale * EQUAL_MB) * train.CLIENTS
    return {
        "equal": star([EQUAL_MB] * train.CLIENTS, "link(1Gbit, 10ms)"),
        "FedLuck's": star(list(UPLINKS_MB), "link(1Gbit, 10ms)"),
        "shared": star([36.0] * train.CLIENTS, f"link(1Gbit, 10ms, down.rate={together}bit, down.buffer=256kB)"),
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
    table = csv_rows.Table(asked.output / "times.csv", Row, *Row._fields[:6])
    with (asked.output / "runs.csv").open(encoding="utf8", newline="") as file:
        runs = [row for row in csv.DictReader(file) if row["use"] == "result" and row["arm"] in PLAYED]
    skew = max(float(row["skew"]) for row in runs)
    runs = [row for row in runs if float(row["skew"]) == skew]
    changing: dict[tuple[str, ...], list[list[int]]] = {}
    for line in csv_rows.read_records(asked.output / "messages.csv"):
        key = line["arm"], line["mean_ratio"], line["seed"]
        changing.setdefault(key, []).append([int(size) for size in line["payload_bytes"].split()])
    answer = parameters()
    plays: dict[tuple[str, ...], OverStar] = {}
    """By network, arm, mean ratio and, where messages depend on it, seed."""
    for network, links in networks(answer).items():
        for row in runs:
            key = row["arm"], row["mean_ratio"], row["seed"]
            if (network, row["arm"], row["feedback"], skew, row["mean_ratio"], row["seed"]) in table:
                continue
            if row["arm"] not in train.ARMS:
                plays[network, *key] = OverStar(changing[key], links)
            elif (network, *key[:2]) not in plays:
                sizes = constant(row["arm"], skew, float(row["mean_ratio"]))
                plays[network, *key[:2]] = OverStar([sizes] * CONSTANT, links)
    ends = dict(zip(plays, round_ends_s(list(plays.values()), LOCAL_NS, answer) if plays else [], strict=True))
    for network in networks(answer):
        for row in runs:
            key = next(
                (each for each in ends if each == (network, row["arm"], row["mean_ratio"], row["seed"])[: len(each)]),
                None,
            )
            if key is None:
                continue
            played, play = ends[key], plays[key]
            pipes = Pipes("star", play.links, len(play.links))
            ideal = replay(rounds_trace(play.sent, LOCAL_NS, answer), links=pipes)[-1] / 1e9 / len(played)
            reached = int(row["rounds_to_target"]) if row["rounds_to_target"] else None
            last = played[-1] - played[-2] if len(played) > 1 else played[-1]
            seconds = None
            if reached is not None:
                seconds = played[min(reached, len(played)) - 1] + max(0, reached - len(played)) * last
            found = reached, seconds, last if len(key) == 3 else played[-1] / len(played), ideal
            named = row["feedback"] == "True", skew, float(row["mean_ratio"]), int(row["seed"])
            table.add([Row(network, row["arm"], *named, *found)])


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, __file__)
