"""Two workers that exchange messages over one link whose rate moves: when everything happens, and what is chosen.

A message leaves when it is made and the one before has left, as fast as the link's rate says at each moment, and is
there a delay later; who chooses is told of it then, as `replicas.live` tells it. This is what the guest kernel does but
for TCP's packets and windows (play.py compares both), a thousand times as fast: choices do not depend on what is
learned, so one timeline serves all seeds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from testbed.codecs.contract import Context
from testbed.codecs.make import make
from testbed.message_key import MessageKey
from testbed.metrics.wires import HEADER_BYTES, wire_bytes
from testbed.pipeline.frame import HEADER_BYTES as FRAME_BYTES
from testbed.policies.cycle import MessageSize, iteration_s
from testbed.policies.deco import DecoChoice
from testbed.policies.links import LinkEstimate
from testbed.profiles import LinkProfile, Pipe, load_profile
from testbed.profiles.timeline import Timeline, timeline
from testbed.replicas.decision import Decision
from testbed.replicas.leader import Decisions, Leader, ratio_of
from testbed.spec import DecoSpec

WORKERS = 2
COMPUTE_NS = 400_000_000
EVERY = 5
"""Steps between choices."""
FIRST = DecoChoice(1, 0.01)
_SAMPLE = 1_000_000


class Network(NamedTuple):
    """A link, and how large a model is trained over it."""

    profile: str
    values: int
    """Of the model whose steps are timed."""

    @property
    def link(self) -> LinkProfile:
        return load_profile(self.profile)

    def message_bytes(self, ratio: float) -> int:
        """Return the size of a message's payload."""
        return round(bytes_per_value(ratio) * self.values)


NETWORKS: Mapping[str, Network] = {
    each.profile: each for each in (Network("varying-80mbps", 40_000_000), Network("lte-trace", 10_000_000))
}


class Step(NamedTuple):
    """What holds in a step, and when it ends at worker 1, whose replica is evaluated."""

    ratio: float
    staleness: int
    end_ns: int
    rate_bps: float
    """Of the slower direction of the link, mean over the step."""
    known_bps: float
    """What the leader takes it for; 0: nothing is known yet."""


def codec(ratio: float) -> str:
    """Return the codec of that ratio."""
    return f"ef(topk({ratio:.6g}, tensor, fp32))"


@functools.cache
def bytes_per_value(ratio: float) -> float:
    """Return the size of a large message per value of the model: measured with 1,000,000 of them."""
    payload = make(f"topk({ratio:.6g}, tensor, fp32)", Context(0, 0, "backward")).encode(
        _sample(), MessageKey("train", 0, 0, ())
    )
    return memoryview(payload).nbytes / _SAMPLE


@functools.cache
def _sample() -> torch.Tensor:
    return torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------ who chooses
class Informed(Leader):
    """DeCo-SGD that knows the rate and the delay of the link at the moment of choosing."""

    pipes: Sequence[Timeline]
    now_ns = 0

    def slowest(self) -> LinkEstimate:
        """Return them, of the slower direction."""
        steps = [pipe.at(self.now_ns) for pipe in self.pipes]
        return LinkEstimate(min(step.rate_bps for step in steps), max(step.delay_ns for step in steps))


class Oracle(Informed):
    """It knows how fast the link will be until the next choice, and how many steps each pair takes to the target, and
    chooses the pair that would get there first if the link stayed like that. What it chooses holds at once.
    """

    steps_to_target: Mapping[DecoChoice, float]
    network: Network

    def decide(self, step: int) -> Decision | None:
        """Choose for the step after this one."""
        if (step + 1) % EVERY:
            return None
        until_ns = self.now_ns + EVERY * COMPUTE_NS
        rate_bps = min(pipe.bits_between(self.now_ns, until_ns) / (until_ns - self.now_ns) * 1e9 for pipe in self.pipes)
        delay_s = self.slowest().delay_ns / 1e9

        def expected_s(pair: DecoChoice) -> float:
            exchanged = MessageSize(wire_bytes(self.network.message_bytes(pair.ratio), self.network.link), 1.0)
            cycle_s = iteration_s(
                exchanged, 1.0, pair.staleness, compute_s=COMPUTE_NS / 1e9, rate_bps=rate_bps, delay_s=delay_s
            )
            return cycle_s * self.steps_to_target[pair]

        chosen = min(self.steps_to_target, key=expected_s)
        return Decision(step + 1, (chosen.staleness,) * WORKERS, (1,) * WORKERS, (codec(chosen.ratio),) * WORKERS)


class Static(Leader):
    """It never chooses."""

    def decide(self, step: int) -> None:
        """Say nothing."""


def leader_of(kind: type[Leader], network: Network, first: DecoChoice) -> Leader:
    """Make one that begins with a pair."""
    leader = kind(
        DecoSpec(every=EVERY, noise="exp", noise_weight=1.0),
        Decision(0, (first.staleness,) * WORKERS, (1,) * WORKERS, (codec(first.ratio),) * WORKERS),
        hears=[1],
        compute_ns=COMPUTE_NS,
        copies=1,
        raw_bytes=4 * network.values,
    )
    if isinstance(leader, Informed):
        leader.pipes = [timeline(pipe) for pipe in _pipes(network.link)]
    return leader


# ------------------------------------------------------------------ what happens when
class _Direction:
    """One direction of the link, which carries one message after another."""

    def __init__(self, pipe: Pipe, profile: LinkProfile) -> None:
        self.timeline, self._profile, self._free_ns = timeline(pipe), profile, 0.0
        # Every second packet of the other direction is acknowledged.
        packet = profile.mtu + profile.overhead_bytes
        self._acknowledged = 1 + (HEADER_BYTES + profile.overhead_bytes) / (2 * packet)
        self.messages: list[tuple[float, float]] = []
        """By step: when the first byte left, and when the last was there."""

    def carry(self, made_ns: float, payload_bytes: int) -> None:
        """Send a message that is made at a moment."""
        first_ns = max(made_ns, self._free_ns)
        bits = 8 * wire_bytes(payload_bytes + FRAME_BYTES, self._profile) * self._acknowledged
        self._free_ns = self.timeline.carried_at(first_ns, bits)
        self.messages.append((first_ns, self._free_ns + self.timeline.at(int(self._free_ns)).delay_ns))


def simulate(network: Network, leader: Leader, first: DecoChoice, steps: int) -> list[Step]:
    """Return what happens in each step; in the last one nothing is waited for that would not be before another."""
    directions = [_Direction(pipe, network.link) for pipe in _pipes(network.link)]
    start = Decision(0, (first.staleness,) * WORKERS, (1,) * WORKERS, (codec(first.ratio),) * WORKERS)
    decisions, ready_ns, applied, made = Decisions(start), [0.0] * WORKERS, [0] * WORKERS, []
    for step in range(steps):
        now, began_ns = decisions.at(step), ready_ns[1]
        ratio = ratio_of(now.codecs[0])
        made_ns = [ready + COMPUTE_NS for ready in ready_ns]
        if isinstance(leader, Informed):
            leader.now_ns = int(made_ns[0])
        decisions.add(leader.decide(step))
        for direction, moment in zip(directions, made_ns, strict=True):
            direction.carry(moment, network.message_bytes(ratio))
        stale = decisions.at(step + 1).staleness[0]
        for worker, other in ((0, 1), (1, 0)):
            ready_ns[worker] = made_ns[worker]
            for due in range(applied[worker], step + 1 - stale):
                first_ns, last_ns = directions[other].messages[due]
                ready_ns[worker] = max(ready_ns[worker], last_ns)
                if worker == 0:
                    delay_ns = directions[other].timeline.at(int(first_ns)).delay_ns
                    leader.heard(
                        other,
                        network.message_bytes(ratio_of(decisions.at(due).codecs[other])),
                        first_ns=int(first_ns),
                        last_ns=int(last_ns),
                        round_trip_ns=2 * delay_ns,
                        ratio=ratio_of(decisions.at(due).codecs[other]),
                    )
            applied[worker] = max(applied[worker], step + 1 - stale)
        span = (int(began_ns), int(ready_ns[1]))
        rate_bps = min(each.timeline.bits_between(*span) / (span[1] - span[0]) * 1e9 for each in directions)
        estimate = leader.slowest()
        known_bps = 0.0 if estimate is None else estimate.rate_bps
        made.append(Step(ratio, now.staleness[0], span[1], rate_bps, known_bps))
    return made


def _pipes(link: LinkProfile) -> list[Pipe]:
    return [pipe for pipe in (link.up, link.down) if pipe is not None]


PAIRS = tuple(itertools.starmap(DecoChoice, itertools.product((0, 1), (0.01, 0.003, 0.001))))
"""Static ones: staleness and ratio."""
