"""Two workers that exchange messages over one link whose rate moves: when everything happens, and what is chosen.

Real TCP carries messages of the stated sizes in the guest kernel, on its virtual clock, and who chooses hears meanwhile
what a live run would tell it. No choice depends on what is learned, so all of it is known before anything is.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from testbed.codecs.contract import Context
from testbed.codecs.make import make
from testbed.jobs.actions import Key, Message
from testbed.jobs.decision import Decision, Decisions
from testbed.message_key import MessageKey
from testbed.metrics.wires import wire_bytes
from testbed.nodes.fragments import SMALL
from testbed.nodes.leader import Leader, ratio_of
from testbed.player.lanes import LaneState
from testbed.player.play_job import DirectorCall
from testbed.player.virtual import OverLinks, guest_lab, play_virtual
from testbed.policies.cycle import MessageSize, iteration_s
from testbed.policies.deco import DecoChoice
from testbed.policies.link_estimate import LinkEstimate
from testbed.profiles import LinkProfile, load_profile
from testbed.profiles.timeline import Timeline, timeline
from testbed.runtime.frame import HEADER_BYTES
from testbed.spec import DecoSpec
from testbed.trace.format import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.trace.played import Played

WORKERS = 2
COMPUTE_NS = 400_000_000
EVERY = 5
"""Steps between choices."""
FIRST = DecoChoice(1, 0.01)
LABELS = ("compute", "gradient", "aggregate")
HERE = Path(__file__).resolve().parent
_SAMPLE, _DRAWN_VALUES = 1_000_000, 36


class Network(NamedTuple):
    """A link, and how large a model is trained over it."""

    profile: str
    tensors: tuple[int, ...]
    """How many values each tensor has of the model whose steps are timed."""

    @property
    def link(self) -> LinkProfile:
        return load_profile(self.profile)

    @property
    def pipes(self) -> Sequence[Timeline]:
        """Both directions of the link, that in which worker 0 sends first."""
        return _pipes(self.profile)

    @property
    def delay_ns(self) -> int:
        """One way. It does not vary."""
        return self.pipes[0].at(0).delay_ns

    @property
    def raw_bytes(self) -> int:
        """All tensors as fp32."""
        return 4 * sum(self.tensors)

    def message_bytes(self, ratio: float) -> int:
        """Return the size of a message's payload, which a `Bucket` makes."""
        return sum(4 * values if values < SMALL else 4 + tensor_bytes(ratio, values) for values in self.tensors)


NETWORKS: Mapping[str, Network] = {
    each.profile: each for each in (Network("varying-80mbps", (40_000_000,)), Network("lte-trace", (10_000_000,)))
}


class Step(NamedTuple):
    """What holds in a step, and when it ends at worker 1, whose replica is evaluated."""

    ratio: float
    staleness: int
    end_ns: int
    rate_bps: float
    """Of the slower direction of the link, mean over the step."""
    known_bps: float
    """What the leader takes it for when the step begins; 0: nothing is known yet."""


@functools.cache
def _pipes(profile: str) -> Sequence[Timeline]:
    link = load_profile(profile)
    return [timeline(pipe) for pipe in (link.up, link.down) if pipe is not None]


def codec(ratio: float) -> str:
    """Return the codec of that ratio."""
    return f"ef(topk({ratio:.6g}, tensor, fp32))"


@functools.cache
def tensor_bytes(ratio: float, values: int) -> int:
    """Return the size of a tensor's payload: measured, of more than 1,000,000 values with so many of them."""
    sample = _sample()[:values]
    payload = make(f"topk({ratio:.6g}, tensor, fp32)", Context(0, 0, "backward")).encode(
        sample, MessageKey("train", 0, 0, ())
    )
    return round(memoryview(payload).nbytes * values / sample.numel())


@functools.cache
def _sample() -> torch.Tensor:
    return torch.randn(_SAMPLE, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------ who chooses
class Informed(Leader):
    """DeCo-SGD that knows the rate and the delay of the link at the moment of choosing."""

    network: Network
    now_ns = 0

    def slowest(self) -> LinkEstimate:
        """Return them, of the slower direction."""
        steps, payload_share = [pipe.at(self.now_ns) for pipe in self.network.pipes], self.network.link.payload_share
        return LinkEstimate(payload_share * min(step.rate_bps for step in steps), max(step.delay_ns for step in steps))


class Oracle(Informed):
    """It knows how fast the link will be until the next choice, and how many steps each pair takes to the target, and
    chooses the pair that would get there first if the link stayed like that. What it chooses holds at once.
    """

    steps_to_target: Mapping[DecoChoice, float]

    def decide(self, step: int) -> Decision | None:
        """Choose for the step after this one."""
        if (step + 1) % EVERY:
            return None
        until_ns = self.now_ns + EVERY * COMPUTE_NS
        rate_bps = min(
            pipe.bits_between(self.now_ns, until_ns) / (until_ns - self.now_ns) * 1e9 for pipe in self.network.pipes
        )
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


DECO, KNOWS, ORACLE = "DeCo-SGD", "DeCo-SGD, told the link", "oracle"
KINDS: Final[Mapping[str, type[Leader]]] = {DECO: Leader, KNOWS: Informed, ORACLE: Oracle}
"""Arms that choose. The others are static."""


class Arm(NamedTuple):
    """Who exchanges messages over which link."""

    name: str
    network: Network
    first: DecoChoice
    """What holds before anything is chosen."""
    steps: int
    reached: tuple[tuple[DecoChoice, float], ...] = ()
    """For an oracle: how many steps static pairs take to the target."""
    begins_ns: int = 0
    """When the first step does, since the link began to vary."""

    def drawn(self, draw: int) -> Arm:
        """Return the same with messages that are so many times 144 bytes larger: that decides which packets are lost,
        and so what is measured, chosen and sent from then on.
        """
        return self._replace(network=self.network._replace(tensors=(*self.network.tensors, _DRAWN_VALUES * draw)))

    @property
    def decision(self) -> Decision:
        return Decision(0, (self.first.staleness,) * WORKERS, (1,) * WORKERS, (codec(self.first.ratio),) * WORKERS)

    def leader(self) -> Leader:
        """Make the one who chooses."""
        leader = KINDS.get(self.name, Static)(
            DecoSpec(every=EVERY, noise="exp", noise_weight=1.0),
            self.decision,
            hears=[1],
            compute_ns=COMPUTE_NS,
            copies=1,
            raw_bytes=self.network.raw_bytes,
        )
        if isinstance(leader, Informed):
            leader.network = self.network
        if isinstance(leader, Oracle):
            leader.steps_to_target = dict(self.reached)
        return leader


# ------------------------------------------------------------------ what happens when
_WORK, _SEND, _WAIT, _OPERATIONS = 0, 1, 2, 3
"""The operations of a step of a worker that computes: it waits until so many messages are there. Another lane of its
receives, and counts."""
_RECEIVED = 2
"""Operations of a step of that lane."""


class Choosing:
    """What is chosen, and so how large messages are and how many are waited for: a `testbed.player.lanes.Director`."""

    def __init__(self, arm: Arm) -> None:
        self.arm, self.leader, self.decisions = arm, arm.leader(), Decisions(arm.decision)
        self._begun = self._heard = 0

    def numbers(self, step: int) -> tuple[int, int]:
        """Return a step's bytes of a frame, and how many messages must be there at its end."""
        frame_bytes = self.arm.network.message_bytes(ratio_of(self.decisions.at(step).codecs[0])) + HEADER_BYTES
        return frame_bytes, max(0, step + 1 - self.decisions.at(step + 1).staleness[0])

    def begins(self, step: int, now_ns: int, first_ns: Sequence[int], last_ns: Sequence[int]) -> Decision | None:
        """Worker 0 begins a step: choose, by what it has waited for before. The columns are of its receiving lane."""
        due = step - self.decisions.at(step).staleness[0]
        for number in range(self._heard, due):
            decision = self.decisions.at(number)
            message = Message(
                Key("gradient", number, origin=1),
                range(self.arm.network.message_bytes(ratio_of(decision.codecs[1]))),
                first_byte_ns=first_ns[_RECEIVED * number],
                last_byte_ns=last_ns[_RECEIVED * number],
                round_trip_ns=2 * self.arm.network.delay_ns,
            )
            self.leader.heard(1, message, decision)
        self._heard = max(self._heard, due)
        if isinstance(self.leader, Informed):
            self.leader.now_ns = now_ns + COMPUTE_NS
        chosen = self.leader.decide(step)
        if chosen is not None:
            self.decisions.add(chosen)
        return chosen

    def step_ended(self, lane: LaneState, lanes: Sequence[LaneState]) -> None:
        """Choose when worker 0 begins a step; an oracle, which hears nothing, when the first of both does."""
        if lane is lanes[1] or lane is lanes[3] or (lane.node and not isinstance(self.leader, Oracle)):
            return
        if lane.step <= self._begun or lane.step == self.arm.steps:
            return
        self._begun = lane.step
        decision = self.begins(lane.step, lane.at_ns, lanes[1].first, lanes[1].last)
        if decision is None:
            return
        for worker in (lanes[0], lanes[2]):
            changed = _OPERATIONS * (decision.effective_from - 1) + _WAIT
            assert worker.index < changed, "a worker was told too late"
            for step in range(decision.effective_from - 1, self.arm.steps):
                frame_bytes, awaited = self.numbers(step)
                worker.value[_OPERATIONS * step + _WAIT] = awaited
                if step >= decision.effective_from:
                    worker.value[_OPERATIONS * step + _SEND] = frame_bytes


def choosing(
    name: str, network: list[Any], first: list[Any], steps: int, reached: list[Any], begins_ns: int
) -> Choosing:
    """Make one of what JSON makes of an `Arm`."""
    known = tuple((DecoChoice(*pair), needed) for pair, needed in reached)
    profile, tensors = network
    return Choosing(Arm(name, Network(profile, tuple(tensors)), DecoChoice(*first), steps, known, begins_ns))


def trace_of(frame_bytes: Sequence[Sequence[int]], awaited: Sequence[int], begins_ns: int = 0) -> Trace:
    """Return the trace of two workers: what each sends in each step, and how many messages both need to end it."""
    lanes = []
    for worker in range(WORKERS):
        compute, receive = Lane(worker, "compute"), Lane(worker, "receive")
        for step in range(len(awaited)):
            compute.add(WORK, label=0, value=COMPUTE_NS + begins_ns * (step == 0))
            compute.add(SEND, label=1, peer=1 - worker, tag=step, value=frame_bytes[worker][step])
            compute.add(WAIT, label=2, tag=worker, value=awaited[step])
            receive.add(RECEIVE, label=2, peer=1 - worker, tag=step)
            receive.add(SIGNAL, label=2, tag=worker)
            compute.end_step()
            receive.end_step()
        lanes += [compute, receive]
    return Trace(tuple(f"worker {worker}" for worker in range(WORKERS)), LABELS, tuple(lanes), {"maker": HERE.name})


def over(link: LinkProfile, trace: Trace, director: DirectorCall | None = None) -> OverLinks:
    """Return what is to be played of a trace over a link."""
    return OverLinks(trace, guest_lab("line", [link], WORKERS), director)


def job_of(arm: Arm) -> OverLinks:
    """Return what is to be played of an arm: a trace that says what holds at first, and who chooses."""
    begin = Choosing(arm)
    frame_bytes, awaited = zip(*(begin.numbers(step) for step in range(arm.steps)), strict=True)
    trace = trace_of([frame_bytes] * WORKERS, awaited, arm.begins_ns)
    if arm.name not in KINDS:
        return over(arm.network.link, trace)
    arguments = json.loads(json.dumps(arm._asdict()))
    director = DirectorCall(made_by=f"experiments.{HERE.name}.timeline:choosing", arguments=arguments)
    return over(arm.network.link, trace, director)


def played(jobs: Sequence[OverLinks]) -> list[Played]:
    """Play traces in guests, whole; errors as from `play_virtual`."""
    return play_virtual(jobs, guests=2, prove_steady=False)


def timelines(arms: Sequence[Arm]) -> list[list[Step]]:
    """Return what happens in each step of each arm."""
    return [steps_of(arm, found) for arm, found in zip(arms, played([job_of(arm) for arm in arms]), strict=True)]


def steps_of(arm: Arm, found: Played) -> list[Step]:
    """Return what happened in each step, and what was chosen: by going through what was heard once more."""
    choosing, made = Choosing(arm), list[Step]()
    ours, heard, theirs = found.lanes[0], found.lanes[1], found.lanes[2]
    ends = [[lane.end_ns[_OPERATIONS * step + _WAIT] for step in range(arm.steps)] for lane in (ours, theirs)]
    for step in range(arm.steps):
        began_ns = [end[step - 1] if step else arm.begins_ns for end in ends]
        if step:
            now_ns = min(began_ns) if isinstance(choosing.leader, Oracle) else began_ns[0]
            choosing.begins(step, now_ns, heard.first_byte_ns, heard.last_byte_ns)
        estimate, now = choosing.leader.slowest(), choosing.decisions.at(step)
        span = (began_ns[1], ends[1][step])
        rate_bps = min(each.bits_between(*span) / (span[1] - span[0]) * 1e9 for each in arm.network.pipes)
        known_bps = 0.0 if estimate is None else estimate.rate_bps
        made.append(Step(ratio_of(now.codecs[0]), now.staleness[0], span[1], rate_bps, known_bps))
    return made


PAIRS = tuple(itertools.starmap(DecoChoice, itertools.product((0, 1), (0.01, 0.003, 0.001))))
"""Static ones: staleness and ratio."""
