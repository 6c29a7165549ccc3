"""Pipelines within replicas and data parallel training across them, on shared links; from shapes alone.

Devices belong to sites, and each site has one access link for all traffic with other sites. Each replica is a pipeline
over consecutive devices in the list of sites: a single device (an unsplit replica), devices of one site, or devices of
several sites, in which case a boundary between sites crosses two access links. A step consists of `local_steps` batches
of every replica and one exchange: of gradients for one batch, of weight changes for several (DiLoCo, arXiv 2311.08105;
replicas split and unsplit: arXiv 2601.02360). Before step t, a device has received the aggregate of step
t - 1 - staleness: with staleness 0 all wait for the exchange, with 1 it overlaps the next batches.

star         every device sends its share of the parameters to a server, which holds all of them, and returns the
             aggregate once complete: to each device its share, but only once to devices of one site with the same
             share, of which the first forwards it to the others
all-to-all   every device sends to the devices of each other replica the layers that both hold; an unsplit replica
             sends each stage of a split one its part, and receives as much from it

Messages between two devices of a site take the time of a formula, at the site's own rate: links of a hundred gigabits
cannot be emulated here.

Replicas may be away for a step (`rounds`; see churn.py): they neither compute nor send, and the others exchange among
themselves. A returning replica first receives all weights, each device its share: from the server, or from the next
replica that was present. All others wait for that too.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from testbed.devices.flops import ADAMW_BYTES, parameters, stage
from testbed.errors import SpecError
from testbed.frozen import Frozen
from testbed.jobs.actions import Key, Sizes, Work
from testbed.jobs.hybrid import HybridJob, HybridRound
from testbed.jobs.schedule import all_actions
from testbed.metrics.links import AlonePipes
from testbed.metrics.wires import wire_bytes
from testbed.predict.data_parallel_shapes import steady_mean_ns
from testbed.predict.scenarios import Scenario, SiteDevice, load_scenario
from testbed.predict.shapes import Count, ModelTable, codec_bytes, coding_ns, model_on_device, resolve
from testbed.profiles import LinkProfile
from testbed.spec import ScheduleName, Topology
from testbed.trace.format import Trace
from testbed.trace.simulate import ideal_steps_ns
from testbed.trace.synthetic import LABELS as PIPELINE_LABELS
from testbed.trace.synthetic import WAYS
from testbed.trace.tracing import Colocation, TracedJob
from testbed.workloads.models import ModelSize, split_layers

LABELS = (*PIPELINE_LABELS, "exchange")
_STALE_STEPS = 24
"""Number of steps from which the bound of a cycle is computed if replicas run ahead."""
_Number = Annotated[int, Field(ge=0, strict=True)]


class RoundTable(Frozen):
    """Participants of a step."""

    away: tuple[_Number, ...] = ()
    """Absent replicas."""
    returning: tuple[_Number, ...] = ()
    """Participating replicas that were away in the previous step, and need the weights first."""


class HybridTable(ModelTable):
    """A job as a file states it."""

    parallelism: Literal["hybrid"]
    scenario: str | Scenario
    """A row of scenarios.toml, or a table like one."""
    replicas: tuple[Count, ...] = Field(min_length=1)
    """Number of stages of each replica. They use the scenario's devices in order; remaining devices are idle."""
    microbatches: Count | tuple[Count, ...]
    """Number of micro-batches per batch, for all replicas or for each one."""
    schedule: ScheduleName = "1f1b"
    in_flight: Count | None = None
    """Micro-batches in flight; None: the replica's number of stages."""
    codec: str = "bf16"
    """Codec of messages between stages at different sites."""
    site_codec: str = "bf16"
    """Codec of messages between stages at one site."""
    codec_cost: Literal["device", "zero"] = "zero"
    """Cost of the codec between sites; it adds to the durations of the passes."""
    recompute: bool = False
    local_steps: Count = 1
    """Number of batches between two exchanges, which make up a step."""
    exchange: Literal["star", "all-to-all"] = "star"
    bits: Annotated[float, Field(gt=0)] | None = None
    """Bits per parameter in a replica's message; required for several replicas."""
    answer_bits: Annotated[float, Field(gt=0)] | None = None
    """Bits per parameter in the aggregate of a star, regardless of absences; None: as in a replica's message."""
    staleness: Annotated[int, Field(ge=0, strict=True)] = 0
    """Maximum number of steps between a replica and its last aggregate."""
    rounds: tuple[RoundTable, ...] = ()
    """Participants of consecutive steps, cyclic; none: all replicas take part in every step."""
    weights_bits: Annotated[float, Field(gt=0)] = 16.0
    """Bits per parameter of the weights sent to a returning replica."""


Messages = tuple[tuple[int, int, int], ...]
"""Messages as (sender, receiver, bytes). The server, if any, is the device after the last."""


class RoundShape(Frozen):
    """Participants of a step, and the messages between replicas in it."""

    away: tuple[int, ...] = ()
    """Replicas."""
    restored: Messages = ()
    """Weights for returning replicas, sent before they compute."""
    exchanged: Messages
    passed_on: Messages = ()
    """Messages that devices forward within their site."""


class HybridShape(Frozen):
    """The numbers of a step, which determine a trace. Devices are numbered through all replicas."""

    sites: tuple[int, ...]
    """Site of each device."""
    replicas: tuple[int, ...]
    """Number of stages of each replica, on consecutive devices."""
    microbatches: tuple[int, ...]
    """Number of micro-batches per batch, by replica."""
    schedule: ScheduleName
    in_flight: tuple[int, ...]
    """Number of micro-batches in flight, by replica."""
    local_steps: int
    forward_ns: tuple[int, ...]
    """Duration of the forward pass of one micro-batch, by device."""
    backward_ns: tuple[int, ...]
    update_ns: tuple[int, ...]
    crossing_bytes: tuple[int, int]
    """Sizes of a micro-batch's activations and gradients between two sites."""
    site_bytes: tuple[int, int]
    """The same within a site."""
    within_bps: tuple[int, ...]
    """Rate within each site; 0 if it has one device."""
    star: bool
    exchanged: Messages
    """Messages of an exchange in which all replicas take part; `passed_on` likewise."""
    passed_on: Messages = ()
    # Empty values of newer fields are omitted from a shape's text, so that ids of existing cells do not change.
    rounds: tuple[RoundShape, ...] = Field(default=(), exclude_if=operator.not_)
    """Rounds of consecutive steps, cyclic; none: all replicas take part in every step."""
    staleness: int = Field(default=0, exclude_if=operator.not_)
    tokens: int
    """Tokens per step, over all replicas; a mean over rounds, like all numbers of a step here."""

    @property
    def period(self) -> int | None:
        """Number of steps after which participants repeat; None if steps are not synchronised at their end."""
        return None if self.staleness else len(self._rounds)

    @property
    def nodes(self) -> int:
        return max(self.sites) + 1 + self.star

    @property
    def least_steps(self) -> int:
        """Minimum number of steps to reach the steady state: all rounds, after a first step that does not count."""
        return 4 * (self.staleness + 1) if self.staleness else max(3, 1 + len(self._rounds))

    def steady_ns(self, steps_ns: Sequence[int]) -> float:
        """Return the steady step time: the mean over the rounds of whole periods."""
        if self.staleness:
            return steady_mean_ns(steps_ns, self.staleness)
        return float(median(steps_ns) if len(self._rounds) == 1 else mean(steps_ns))

    @property
    def message_bytes(self) -> tuple[int, ...]:
        """Sizes of the messages that cross links, also with all replicas present; (1,) if there are none."""
        every = [RoundShape(exchanged=self.exchanged), *self.rounds]
        return tuple(size for each in every for _, _, size, _ in self._crossings(each)) or (1,)

    @property
    def payload_bytes(self) -> int:
        """Payload bytes per step that all sites send over their links."""
        sent = sum(size * count for each in self._rounds for _, _, size, count in self._crossings(each))
        return sent // len(self._rounds)

    def columns(self) -> dict[str, float]:
        """Return the table columns that are known before play, in bytes, by name."""
        return {
            "activation_bytes": self.crossing_bytes[0],
            "gradient_bytes": self.crossing_bytes[1],
            "exchanged_bytes": sum(size for each in self._rounds for _, _, size in (*each.restored, *each.exchanged))
            // len(self._rounds),
        }

    def formula_s(self, topology: Topology, profiles: Sequence[LinkProfile]) -> float:
        """Return a lower bound of the step time for any transport: the maximum of the critical path with each message
        alone on its links, and the transfer time of all messages on the busiest link direction.
        """
        links, rounds = AlonePipes(topology, profiles, self.nodes), len(self._rounds)
        if self.staleness:
            alone_ns = [self.steady_ns(ideal_steps_ns(self.trace(_STALE_STEPS), links, _STALE_STEPS))]
        else:
            alone_ns = [float(ns) for ns in ideal_steps_ns(self.trace(rounds + 1), links, rounds + 1)[1:]]
        floors = list[float]()
        for step, step_ns in enumerate(alone_ns, start=1):
            busy_s: dict[tuple[int, str], float] = defaultdict(float)
            for sender, receiver, size, count in self._crossings(self._round(step)):
                for node, way in ((sender, "up"), (receiver, "down")):
                    profile = profiles[node % len(profiles)]
                    if (pipe := profile.up if way == "up" else profile.down) is not None:
                        busy_s[node, way] += count * wire_bytes(size, profile) * 8 / pipe.rate_bps
            floors.append(max(step_ns / 1e9, *busy_s.values(), 0.0))
        return mean(floors)

    def devices(self) -> list[range]:
        """Return the devices of each replica, first stage first."""
        ends = itertools.accumulate(self.replicas)
        return [range(end - count, end) for count, end in zip(self.replicas, ends, strict=True)]

    def site_of(self, device: int) -> int:
        """Return the node of a device or the server."""
        return self.sites[device] if device < len(self.sites) else self.nodes - 1

    @property
    def _rounds(self) -> tuple[RoundShape, ...]:
        return self.rounds or (RoundShape(exchanged=self.exchanged, passed_on=self.passed_on),)

    def _round(self, step: int) -> RoundShape:
        return self._rounds[step % len(self._rounds)]

    def _crossings(self, who: RoundShape) -> Iterator[tuple[int, int, int, int]]:
        """Yield the messages of a step that cross links: node of the sender, node of the receiver, bytes, count."""
        for replica, (devices, microbatches) in enumerate(zip(self.devices(), self.microbatches, strict=True)):
            if replica in who.away:
                continue
            for a, b in itertools.pairwise(map(self.site_of, devices)):
                if a != b:
                    yield a, b, self.crossing_bytes[0], microbatches * self.local_steps
                    yield b, a, self.crossing_bytes[1], microbatches * self.local_steps
        for sender, receiver, size in (*who.restored, *who.exchanged):
            if self.site_of(sender) != self.site_of(receiver):
                yield self.site_of(sender), self.site_of(receiver), size, 1

    def trace(self, steps: int, scale: int = 1) -> Trace:
        """Return the trace of `steps` steps, with messages that cross links divided by `scale`. In the last step,
        devices receive the messages still in flight.
        """
        count, sizes = len(self.sites), dict[tuple[str, int, int, int], int]()
        for number, each in enumerate(self._rounds):
            for what, messages in (("weights", each.restored), ("exchange", each.exchanged)):
                sizes |= {(what, number, sender, receiver): size for sender, receiver, size in messages}

        def full(sender: int, receiver: int, key: Key) -> int:
            if key.what in WAYS:
                return (self.crossing_bytes if crosses(sender, receiver) else self.site_bytes)[WAYS[key.what]]
            return sizes[key.what, key.step % len(self._rounds), key.origin, key.part]

        def crosses(sender: int, receiver: int) -> bool:
            return self.site_of(sender) != self.site_of(receiver)

        def encoded(sender: int, key: Key) -> int:
            receiver = sender + 1 - 2 * WAYS[key.what] if key.what in WAYS else key.part
            size = full(sender, receiver, key)
            return -(-size // scale) if crosses(sender, receiver) else size

        def within_ns(sender: int, receiver: int, key: Key) -> int:
            return math.ceil(full(sender, receiver, key) * 8e9 / self.within_bps[self.site_of(sender)])

        places = range(count + self.star)
        names = tuple(f"site {site}" for site in range(max(self.sites) + 1)) + ("server",) * self.star
        lanes = [*(f"device {device}" for device in range(count)), "server"]
        works_ns = {"forward": self.forward_ns, "backward": self.backward_ns, "update": self.update_ns}
        return TracedJob(
            self._job(steps),
            [Sizes(functools.partial(encoded, place)) for place in places],
            lambda place, action: (
                works_ns[action.what][place] if isinstance(action, Work) and action.what in works_ns else None
            ),
            LABELS,
            {"maker": "synthetic hybrid"},
            Colocation(names, [self.site_of(place) for place in places], lanes, within_ns),
        ).trace()

    def _job(self, steps: int) -> HybridJob:
        orders = [
            all_actions(self.schedule, stages=stages, microbatches=microbatches, in_flight=in_flight)
            for stages, microbatches, in_flight in zip(self.replicas, self.microbatches, self.in_flight, strict=True)
        ]
        rounds = [
            HybridRound(
                each.away, *([message[:2] for message in of] for of in (each.restored, each.exchanged, each.passed_on))
            )
            for each in self._rounds
        ]
        return HybridJob(orders, self.local_steps, rounds, self.star, self.staleness, steps)


# ------------------------------------------------------------------ from tables
def _taken(asked: HybridTable) -> list[SiteDevice]:
    devices, needed = load_scenario(asked.scenario).devices(), sum(asked.replicas)
    if needed > len(devices):
        raise SpecError(
            f"replicas is {list(asked.replicas)}, {needed} stages in all, but scenario "
            f"{getattr(asked.scenario, 'summary', asked.scenario)} has only {len(devices)} devices"
        )
    return devices[:needed]


def access_links(table: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return the access links of a job's sites, in order, then the server's. SpecError as from `resolve_hybrid`."""
    return resolve(HybridTable, _links, table, where)


def _links(asked: HybridTable) -> tuple[str, ...]:
    by_site = {device.site: device.link for device in _taken(asked)}
    return tuple(by_site.values()) + (load_scenario(asked.scenario).server,) * _has_server(asked)


def _has_server(asked: HybridTable) -> bool:
    return asked.exchange == "star" and len(asked.replicas) > 1


def resolve_hybrid(table: Mapping[str, Any], where: str) -> HybridShape:
    """Resolve a job's table to its shape. SpecError, prefixed with `where`, if that is impossible."""
    return resolve(HybridTable, _shape, table, where)


def _shape(asked: HybridTable) -> HybridShape:
    devices, several = _taken(asked), len(asked.replicas) > 1
    microbatches = asked.microbatches
    if isinstance(microbatches, int):
        microbatches = (microbatches,) * len(asked.replicas)
    if len(microbatches) != len(asked.replicas):
        raise SpecError(f"microbatches is {list(microbatches)}; state one number, or {len(asked.replicas)}")
    if several and asked.bits is None:
        raise SpecError("bits is missing; state the bits per parameter that replicas exchange, e.g. bits = 32")
    if asked.staleness and (asked.rounds or not several):
        raise SpecError(
            f"staleness is {asked.staleness}, which requires several replicas that are always present: set it to 0, or "
            "remove rounds"
        )
    machines = {name: model_on_device(asked.model, name, asked.precision) for name in {at.device for at in devices}}
    size = machines[devices[0].device][0]
    parts = [split_layers(size.layers, stages) for stages in asked.replicas]
    forward, update = list[float](), list[float]()
    for own, at in zip(itertools.chain(*parts), devices, strict=True):
        _, device, flops = machines[at.device]
        count = stage(size, own, sequence_length=asked.sequence_length, sequences=asked.sequences)
        forward.append(count / flops * asked.compute)
        update.append(ADAMW_BYTES * parameters(size, own) / device.bandwidth_bytes_per_s)
    backward = [(3 if asked.recompute else 2) * seconds for seconds in forward]
    shape = (asked.sequences, asked.sequence_length, size.width)
    if asked.codec_cost == "device":
        coding = {name: coding_ns(asked.codec, shape, machine[1]) for name, machine in machines.items()}
        for a in _crossed(asked.replicas, devices):
            for number, sends, receives, way in ((a, forward, backward, 0), (a + 1, backward, forward, 1)):
                encode, decode = coding[devices[number].device]
                sends[number] += encode[way] / 1e9
                receives[number] += decode[1 - way] / 1e9
    numbers = itertools.count()
    layout = _Layout(asked, size, [[(next(numbers), own) for own in part] for part in parts], [d.site for d in devices])
    exchanged, passed_on = layout.exchange()
    rounds = tuple(map(layout.round, asked.rounds))
    read = [
        sum(microbatches) - sum(microbatches[replica] for replica in each.away) for each in rounds or [RoundTable()]
    ]
    return HybridShape(
        sites=tuple(layout.sites),
        replicas=asked.replicas,
        microbatches=microbatches,
        schedule=asked.schedule,
        in_flight=tuple(asked.in_flight or stages for stages in asked.replicas),
        local_steps=asked.local_steps,
        forward_ns=tuple(math.ceil(seconds * 1e9) for seconds in forward),
        backward_ns=tuple(math.ceil(seconds * 1e9) for seconds in backward),
        update_ns=tuple(math.ceil(seconds * 1e9) for seconds in update),
        crossing_bytes=codec_bytes(asked.codec, shape),
        site_bytes=codec_bytes(asked.site_codec, shape),
        within_bps=tuple({device.site: device.within_bps for device in devices}.values()),
        star=_has_server(asked),
        exchanged=exchanged,
        passed_on=passed_on,
        rounds=rounds,
        staleness=asked.staleness,
        tokens=asked.sequences * asked.sequence_length * asked.local_steps * sum(read) // len(read),
    )


def _crossed(replicas: Sequence[int], devices: Sequence[SiteDevice]) -> Iterator[int]:
    """Yield the devices whose next stage is at another site."""
    ends = set(itertools.accumulate(replicas))
    yield from (a for a in range(len(devices) - 1) if a + 1 not in ends and devices[a].site != devices[a + 1].site)


class _Layout(NamedTuple):
    """The layers of each device, and the messages between devices."""

    asked: HybridTable
    size: ModelSize
    held: Sequence[Sequence[tuple[int, range]]]
    """Devices of each replica, with their layers."""
    sites: Sequence[int]
    """Site of each device."""

    def round(self, who: RoundTable) -> RoundShape:
        """Return the messages of a step in which some replicas are away or return."""
        numbers, server = range(len(self.held)), _has_server(self.asked)
        stated = f"rounds has away = {list(who.away)} and returning = {list(who.returning)}"
        if unknown := {*who.away, *who.returning} - set(numbers):
            raise SpecError(f"{stated}; there is no replica {min(unknown)}: they are numbered from 0 to {numbers[-1]}")
        if both := set(who.away) & set(who.returning):
            raise SpecError(f"{stated}; replica {min(both)} cannot be both: remove it from one of them")
        if not (there := [each for each in numbers if each not in who.away]):
            raise SpecError(f"{stated}; all replicas are away, so there is no step: let at least one take part")
        kept = [each for each in there if each not in who.returning]
        if who.returning and not kept and not server:
            raise SpecError(f"{stated}; no other node has the weights for them: let a replica stay, or use a server")
        restored = list[tuple[int, int, int]]()
        for replica in who.returning:
            givers: Sequence[tuple[int, range]] = [(len(self.sites), range(self.size.layers))]
            if not server:
                givers = self.held[min(kept, key=lambda each: (each - replica) % len(numbers))]
            shared = self._shared(self.held[replica], givers, self.asked.weights_bits)
            restored += [(giver, device, size) for device, giver, size in shared]
        exchanged, passed_on = self.exchange(who.away)
        return RoundShape(away=who.away, restored=tuple(restored), exchanged=exchanged, passed_on=passed_on)

    def exchange(self, away: Sequence[int] = ()) -> tuple[Messages, Messages]:
        """Return the messages of an exchange, and the forwarded ones; a single replica exchanges nothing."""
        if len(self.held) == 1:
            return (), ()
        assert self.asked.bits is not None
        held, server = [part for replica, part in enumerate(self.held) if replica not in away], len(self.sites)
        messages, passed_on, first = list[tuple[int, int, int]](), list[tuple[int, int, int]](), dict[object, int]()
        if self.asked.exchange == "all-to-all":
            for further, number in itertools.product(range(1, len(held)), range(len(held))):
                messages += self._shared(held[number], held[(number + further) % len(held)], self.asked.bits)
            return tuple(messages), ()
        holders = list(itertools.chain(*held))
        messages += [(device, server, self._bytes(own, self.asked.bits)) for device, own in holders]
        for device, own in holders:
            answer = self._bytes(own, self.asked.answer_bits or self.asked.bits)
            if (same := first.setdefault((self.sites[device], own), device)) == device:
                messages.append((server, device, answer))
            else:
                passed_on.append((same, device, answer))
        return tuple(messages), tuple(passed_on)

    def _shared(
        self, some: Sequence[tuple[int, range]], others: Sequence[tuple[int, range]], bits: float
    ) -> Iterator[tuple[int, int, int]]:
        """Yield each pair of devices that share layers, with the bytes of these."""
        for (device, own), (other, its) in itertools.product(some, others):
            if both := range(max(own.start, its.start), min(own.stop, its.stop)):
                yield device, other, self._bytes(both, bits)

    def _bytes(self, own: range, bits: float) -> int:
        return max(1, math.ceil(parameters(self.size, own) * bits / 8))
