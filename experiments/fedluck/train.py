"""Train digits by asynchronous and synchronous federated rounds over slow links: `python experiments/fedluck/train.py`.

This writes runs.csv, a row for each training: when it reached the target accuracy, and what had been sent by then; and
choices.csv, what FedLuck chooses for each device. Computing is real, and time is that of formulas for devices and links
(`testbed.studies.asynchronous_rounds`); tests/nodes/test_trouble_on_links.py holds that against a network. For each
method the learning rate is the one with the least mean time over TUNING_SEEDS, which are not the seeds that count, on
the published network; among rates that do not reach the target, the one that gets nearest. What is finished is kept, so
that an interrupted program goes on where it was.
"""

import argparse
import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from testbed import csv_rows
from testbed.errors import StageError
from testbed.metrics.wires import wire_bytes
from testbed.nodes.arrivals import Rounds, RoundsTraining, Server
from testbed.nodes.bucket import Bucket
from testbed.nodes.learners import ImagesLearner
from testbed.policies import fedluck
from testbed.policies.fedluck import DeviceChoice
from testbed.profiles import LinkProfile, load_profile
from testbed.spec import ArrivalsSpec, DataParallelSpec, OptimiserSpec, OuterSpec
from testbed.studies.asynchronous_rounds import Formula, ServerStep, run_rounds
from testbed.workloads.images import build_network, images, score
from testbed.workloads.networks import DIGITS
from testbed.workloads.shards import ShardBatches, data_shares, divide

HERE = Path(__file__).resolve().parent
DEVICES, BATCH, ALPHA, PERIOD_S = 10, 16, 1.0, 1.5
STEP_S = tuple(np.linspace(0.4, 0.1, DEVICES).tolist())
"""Of a local step, by device (FedLuck, ASyncConfig.json for FMNIST)."""
BANDWIDTHS_MB = tuple(np.linspace(0.1, 0.25, DEVICES).tolist())
"""Of each device's uplink, in MB/s, but for the straggler's."""
STRAGGLER = 1
PUBLISHED, NETWORKS = 0.03, (0.1, 0.03, 0.01)
"""The straggler's bandwidths, in MB/s; the first is a link like the others'."""
PUBLISHED_BYTES = 4 * 234_090
"""Of the published network's weights. Rates are scaled by ours over these, so that a dense message takes as long."""
DELAY_MS, BOUND = 10, 1000
"""One way; and the staleness beyond which an update is refused: none is, as published."""
MODEL = "digits-mlp-large"
TARGET, MOST_S, MOST_LOCAL_STEPS = 0.9, 3000.0, 6_000
FIRST_RATE, FACTOR, PATIENCE = 0.8, 2, 2
"""The learning rate that is tried first; then those so many times as large, and as small, until they are worse. A trial
ends after so many times as long as the method's best rate took.
"""
SEEDS, TUNING_SEEDS = range(5), (100, 101)
FEDLUCK, SYNCHRONOUS = "FedLuck", "FedAvg"
_DENSE, _MEASURED = 1.0, 0.1
"""A ratio that goes dense; and the one whose message says what FedLuck counts per kept value."""


class Device(NamedTuple):
    """What a device needs."""

    step_s: float
    full_s: float
    """For a message of ratio 1, with positions."""


Choose = Callable[[Device], DeviceChoice]


def fixed(local_steps: int, ratio: float) -> Choose:
    """Choose alike for every device."""
    return lambda device: DeviceChoice(local_steps, ratio)


def joint(device: Device) -> DeviceChoice:
    """Choose as FedLuck does."""
    return fedluck.choose(device.step_s, device.full_s, PERIOD_S)


def _least(pairs: Sequence[tuple[int, float]], device: Device) -> DeviceChoice:
    values = [
        float(fedluck.objective(k, d, step_s=device.step_s, full_s=device.full_s, period_s=PERIOD_S)) for k, d in pairs
    ]
    return DeviceChoice(*pairs[int(np.argmin(values))])


def ratio_only(device: Device) -> DeviceChoice:
    """Choose the ratio by FedLuck's objective, with the local steps of the fixed choices."""
    return _least([(5, percent / 100) for percent in range(1, 101)], device)


def steps_only(device: Device) -> DeviceChoice:
    """Choose the local steps by FedLuck's objective, with the ratio of the fixed choices."""
    return _least([(steps, 0.1) for steps in range(2, fedluck.MOST_LOCAL_STEPS + 1)], device)


class Method(NamedTuple):
    """How rounds are made."""

    arrivals: ArrivalsSpec
    choose: Choose
    server_rate: float = 1.0
    codec: str = "{}"


_PERIOD, _ALL = ArrivalsSpec(period_s=PERIOD_S), ArrivalsSpec(buffer=DEVICES)
METHODS = {
    FEDLUCK: Method(_PERIOD, joint),
    SYNCHRONOUS: Method(_ALL, fixed(5, 0.1)),
    "periodic, 5 steps, 0.1": Method(_PERIOD, fixed(5, 0.1)),
    "periodic, 5 steps, 0.3": Method(_PERIOD, fixed(5, 0.3)),
    "periodic, 10 steps, 0.1": Method(_PERIOD, fixed(10, 0.1)),
    "periodic, 10 steps, 0.3": Method(_PERIOD, fixed(10, 0.3)),
    "FedBuff": Method(ArrivalsSpec(buffer=3), fixed(5, 0.1)),
    "FedAsync": Method(ArrivalsSpec(buffer=1), fixed(5, 0.1), server_rate=0.4),
    "periodic, ratio chosen": Method(_PERIOD, ratio_only),
    "periodic, steps chosen": Method(_PERIOD, steps_only),
    "FedLuck, synchronous": Method(_ALL, joint),
    "FedLuck, error feedback": Method(_PERIOD, joint, codec="ef({})"),
    "FedAvg, dense": Method(_ALL, fixed(5, _DENSE)),
    "quorum of 5": Method(ArrivalsSpec(buffer=5), fixed(5, 0.1)),
    "quorum of 5, grace": Method(ArrivalsSpec(buffer=5, grace_s=PERIOD_S), fixed(5, 0.1)),
}
ELSEWHERE = (SYNCHRONOUS, "periodic, 5 steps, 0.1", FEDLUCK)
"""What is tried over the other networks."""
QUICK = (SYNCHRONOUS, "periodic, 5 steps, 0.1", FEDLUCK)
"""What the short form tries."""


class Choice(NamedTuple):
    """A line of choices.csv."""

    straggler: float
    """Its bandwidth, in MB/s of the published sizes."""
    device: int
    step_s: float
    full_s: float
    local_steps: int
    ratio: float
    staleness: int
    """Periods after which its message is there, as FedLuck counts."""


class Row(NamedTuple):
    """A line of runs.csv."""

    use: str
    """tuning, or result."""
    straggler: float
    method: str
    learning_rate: float
    seed: int
    seconds: float
    """To the target; NaN: not reached."""
    sent_mb: float
    """By all devices until then: payloads, positions included."""
    answered_mb: float
    """By the server."""
    steps: int
    """Of the server, until then or in all."""
    local_steps: int
    accuracy: float
    """The best that was seen."""
    staleness: float
    """Of what was applied, mean."""
    stalest: int


def bandwidths(straggler: float) -> list[float]:
    """Return the devices' bandwidths, in MB/s of the published sizes."""
    return [straggler if device == STRAGGLER else rate for device, rate in enumerate(BANDWIDTHS_MB)]


def text_of(ratio: float) -> str:
    """Return the codec of a ratio."""
    return "fp32" if ratio == _DENSE else f"topk({ratio:g}, tensor, fp32)"


def devices(straggler: float) -> list[Device]:
    """Return what FedLuck goes by: durations of local steps, and of messages as the codec packs them."""
    parameters = [parameter.detach() for parameter in build_network(MODEL, DIGITS, 0).parameters()]
    bucket = Bucket([tuple(each.shape) for each in parameters], text_of(_MEASURED), seed=0, sender=0)
    expansion = len(bucket.encode(parameters, 0)) / (_MEASURED * bucket.raw_bytes)
    return [
        Device(step_s, expansion * PUBLISHED_BYTES / (1e6 * bandwidth))
        for step_s, bandwidth in zip(STEP_S, bandwidths(straggler), strict=True)
    ]


def links(straggler: float) -> list[str]:
    """Return the profiles of the devices' links, and of the server's. What comes down is not slowed, as published."""
    scale = sum(parameter.numel() for parameter in build_network(MODEL, DIGITS, 0).parameters()) * 4 / PUBLISHED_BYTES
    rates = [8 * round(1e6 * scale * bandwidth) for bandwidth in bandwidths(straggler)]
    fast = f"link(1Gbit, {DELAY_MS}ms"
    return [*(f"{fast}, up.rate={rate}bit, up.buffer=256kB)" for rate in rates), f"{fast})"]


class Case(NamedTuple):
    """Which method, over which links."""

    straggler: float
    method: str

    @property
    def choices(self) -> list[DeviceChoice]:
        """By device."""
        return [METHODS[self.method].choose(device) for device in devices(self.straggler)]


def make(case: Case, rate: float, seed: int) -> tuple[RoundsTraining, Callable[[int], ImagesLearner], list[str]]:
    """Return a training, what its devices learn from, and their codecs."""
    method, choices = METHODS[case.method], case.choices
    labels = images("digits").train.labels.numpy()
    shards = divide(labels, data_shares(DEVICES, 1.0), alpha=ALPHA, seed=seed)
    optimiser = OptimiserSpec(
        algorithm="sgd", learning_rate=rate, weight_decay=0.0, beta1=0.0, beta2=0.0, clip_norm=1e9
    )
    data = DataParallelSpec(
        workers=DEVICES,
        exchange="star",
        staleness=BOUND,
        local_steps=[choice.local_steps for choice in choices],
        outer=OuterSpec(learning_rate=method.server_rate, momentum=0.0, nesterov=False),
        answer="fp32",
        arrivals=method.arrivals,
    )

    def learner(device: int) -> ImagesLearner:
        batches = ShardBatches(shards[device], BATCH, seed=seed, worker=device)
        return ImagesLearner(build_network(MODEL, DIGITS, seed), batches, images("digits"))

    codecs = ["fp32" if choice.ratio == _DENSE else method.codec.format(text_of(choice.ratio)) for choice in choices]
    return RoundsTraining(data, optimiser, 1, seed), learner, codecs


def train(case: Case, use: str, rate: float, seed: int, most_s: float = MOST_S) -> Row:
    """Train until the target is reached, or it has taken too long."""
    training, learner, codecs = make(case, rate, seed)
    server_learner = learner(0)
    server = Server(training, server_learner, codecs)
    workers = [Rounds(training, device, learner(device), codec) for device, codec in enumerate(codecs)]
    test = images("digits").test
    pipes = Pipes([load_profile(link) for link in links(case.straggler)])
    best, stale, seconds, sent, answered = 0.0, list[int](), math.nan, math.nan, math.nan

    def taken() -> int:
        return sum(worker.made * worker.local_steps for worker in workers)

    def watch(step: ServerStep) -> bool:
        """Score a step; returns whether there is to be another."""
        nonlocal best, seconds, sent, answered
        stale.extend(update.staleness for update in step.applied.used)
        if step.applied.used:
            best = max(best, score(server_learner.model, test).accuracy)
        if best >= TARGET:
            seconds, sent, answered = step.at_ns / 1e9, step.received_bytes / 1e6, step.answered_bytes / 1e6
            return False
        return step.at_ns <= most_s * 1e9 and taken() <= MOST_LOCAL_STEPS

    local_ns = [round(step_s * 1e9) for step_s in STEP_S]
    with contextlib.suppress(StageError):  # it diverged
        run_rounds(training.job(), server, workers, Formula(pipes.sent), watch, local_ns=local_ns)
    return Row(
        use, *case, rate, seed, seconds, sent, answered, server.step, taken(), best,
        fmean(stale) if stale else math.nan, max(stale, default=0),
    )  # fmt: skip


class Pipes:
    """A star's links that whole messages cross, first come first served: on the second link from their first packet."""

    def __init__(self, profiles: Sequence[LinkProfile]) -> None:
        self._profiles, self._free_ns = profiles, dict[tuple[int, str], int]()

    def sent(self, node: int, peer: int, size: int, now_ns: int) -> int:
        """Take a message; return when its last byte reaches the peer."""
        first_ns = last_ns = now_ns
        for hop in ((node, "up"), (peer, "down")):
            profile = self._profiles[hop[0]]
            pipe = profile.up if hop[1] == "up" else profile.down
            assert pipe is not None
            total = wire_bytes(size, profile)
            whole_ns, packet_ns = (
                -(-count * 8_000_000_000 // pipe.rate_bps) for count in (total, min(total, profile.mtu))
            )
            start_ns = max(first_ns, self._free_ns.get(hop, 0))
            left_ns = max(start_ns + whole_ns, last_ns + packet_ns * (last_ns > first_ns))
            self._free_ns[hop] = left_ns
            first_ns, last_ns = start_ns + packet_ns + pipe.delay_ns, left_ns + pipe.delay_ns
        return last_ns


def main(asked: argparse.Namespace) -> None:
    """Write both tables."""
    methods, elsewhere, networks, seeds, tuning = tuple(METHODS), ELSEWHERE, NETWORKS, SEEDS, TUNING_SEEDS
    if asked.quick:
        methods, elsewhere, networks, seeds, tuning = QUICK, (), (PUBLISHED,), range(2), TUNING_SEEDS[:1]
    chosen = [
        Choice(straggler, number, *device, *choice, fedluck.staleness(choice, **device._asdict(), period_s=PERIOD_S))
        for straggler in networks
        for number, device in enumerate(devices(straggler))
        for choice in [joint(device)]
    ]
    csv_rows.write_rows(asked.output / "choices.csv", Choice._fields, chosen)
    table = csv_rows.Table(asked.output / "runs.csv", Row, *Row._fields[:5], digits=None)

    def times(use: str, case: Case, rate: float, tried: Iterable[int], most_s: float = MOST_S) -> tuple[float, float]:
        """Return the mean seconds to the target; and, for rates none of which gets there, what accuracy they miss."""
        known = []
        for seed in tried:
            if (use, *case, rate, seed) not in table:
                table.add([train(case, use, rate, seed, most_s)])
            known.append(table.find(use, *case, rate, seed))
        seconds = [float(row["seconds"]) for row in known]
        missed = 1 - fmean(float(row["accuracy"]) for row in known)
        return fmean(math.inf if math.isnan(each) else each for each in seconds), missed

    best = {}
    for method in methods:
        published = Case(PUBLISHED, method)
        best[method] = FIRST_RATE
        least = times("tuning", published, FIRST_RATE, tuning)
        for factor in () if asked.quick else (FACTOR, 1 / FACTOR):
            while (found := times("tuning", published, best[method] * factor, tuning, PATIENCE * least[0])) < least:
                best[method], least = best[method] * factor, found
        times("result", published, best[method], seeds)
    for straggler, method in itertools.product(networks, elsewhere):
        times("result", Case(straggler, method), best[method], seeds)


if __name__ == "__main__":
    csv_rows.run_program(main, __doc__, HERE)
