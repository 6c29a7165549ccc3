"""Data parallel training from shapes alone: workers that hold whole models and exchange what they computed.

Before iteration t a worker has the aggregate of iteration t - 1 - staleness, as in delayed aggregation (DeCo-SGD, arXiv
2507.17346); staleness 0 is synchronous SGD. It computes, and hands its message over.

all-to-all   every worker sends its message to every other
star         every worker sends its message to a server, which sends each the aggregate when it has all
all-reduce   a ring adds up parts of dense messages and passes the sums on
all-gather   a ring passes on every message as it is: of sparse ones, which have no parts in common
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field

from testbed.devices.device import Precision
from testbed.devices.flops import ADAMW_BYTES, parameters, stage
from testbed.frozen import Frozen
from testbed.metrics.wires import HEADER_BYTES, wire_bytes
from testbed.play.rings import ring_rounds
from testbed.play.shapes import model_on_device, resolve
from testbed.play.trace import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.policies.cycle import steady_cycle_s
from testbed.profiles import LinkProfile
from testbed.spec import Exchange, Topology

LABELS = ("compute", "gradient", "aggregate")
_COMPUTE, _GRADIENT, _AGGREGATE = range(len(LABELS))
_Count = Annotated[int, Field(ge=1, strict=True)]


class DataParallelTable(Frozen):
    """A job as a file states it."""

    parallelism: Literal["data"]
    model: str | dict[str, Any]
    """The name of a model whose shapes are known here, or a table with the fields of `ModelSize`."""
    device: str
    precision: Precision
    compute: Annotated[float, Field(gt=0)] = 1.0
    """An iteration takes so many times as long as the device file says."""
    sequence_length: _Count
    sequences: _Count
    """Of one worker, in one iteration."""
    workers: Annotated[int, Field(ge=2, strict=True)]
    exchange: Exchange
    staleness: Annotated[int, Field(ge=0, strict=True)] = 0
    """Iterations that a worker may be ahead of the aggregate."""
    local_iterations: _Count = 1
    """Iterations between two exchanges. A step is all of these."""
    bits: Annotated[float, Field(gt=0)]
    """Of a message, per parameter of the model."""
    answer_bits: Annotated[float, Field(gt=0)] | None = None
    """Of the star's aggregate; None: as many."""


class DataParallelShape(Frozen):
    """An iteration in numbers. A trace follows from it."""

    workers: int
    exchange: Exchange
    staleness: int
    compute_ns: int
    """Of all iterations between two exchanges."""
    message_bytes: tuple[int, int]
    """Of a worker's message, and of the server's answer."""
    tokens: int
    """In a step, of all workers."""

    @property
    def nodes(self) -> int:
        return self.workers + (self.exchange == "star")

    @property
    def least_steps(self) -> int:
        """Fewer tell nothing of the steady state."""
        return 4 * (self.staleness + 1)

    @property
    def period(self) -> None:
        """After how many steps the same is done again: not known, for nodes do not wait for each other at the end of a
        step; a worker runs ahead, and then waits.
        """

    @property
    def flows_share(self) -> bool:
        """Whether messages of several senders come to one receiver at once. TCP's flows share its link, and pipes take
        one message after the other: they are no ideal then.
        """
        return self.exchange == "all-to-all" and self.workers > 2

    def steady_ns(self, steps_ns: Sequence[int]) -> float:
        """Return the time of a step in the steady state, see `steady_mean_ns`."""
        return steady_mean_ns(steps_ns, self.staleness)

    @property
    def payload_bytes(self) -> int:
        """What all nodes send in a step."""
        up, down = self.message_bytes
        others = self.workers - 1
        if self.exchange == "star":
            return self.workers * (up + down)
        if self.exchange == "all-reduce":
            return self.workers * 2 * others * max(1, -(-up // self.workers))
        return self.workers * others * up

    def columns(self) -> dict[str, float]:
        """Return what is known of a step before it is played, in seconds and bytes, by its name in a table."""
        up, down = self.message_bytes
        return {"compute_s": self.compute_ns / 1e9, "message_bytes": up, "answer_bytes": down}

    def trace(self, steps: int, scale: int = 1) -> Trace:
        """Return the trace of so many steps; messages are divided by `scale`. In its last step every worker receives
        what is still under way.
        """
        sizes = [-(-size // scale) for size in self.message_bytes]
        workers = [
            make_lanes(self.exchange, worker, self.workers, _LABELS, frames=lambda step: self._frames(sizes[0]))
            for worker in range(self.workers)
        ]
        for worker in workers:
            for step in range(steps):
                if step > self.staleness:
                    worker.have(step - 1 - self.staleness)
                worker.lane.add(WORK, label=_COMPUTE, value=self.compute_ns)
                worker.give(step)
                if step == steps - 1:
                    for left in range(max(0, step - self.staleness), steps):
                        worker.have(left)
                worker.end_step()
        lanes = [lane for worker in workers for lane in worker.lanes()]
        nodes = [f"worker {worker}" for worker in range(self.workers)]
        if self.exchange == "star":
            lanes.append(
                server_lane(self.workers, range(steps), _LABELS, frames=lambda step: [sizes[1]] * self.workers)
            )
            nodes.append("server")
        return Trace(tuple(nodes), LABELS, tuple(lanes), {"maker": "synthetic data parallel"})

    def _frames(self, size: int) -> list[int]:
        if self.exchange in _COLLECTIVES:
            return [one.message_bytes for one in ring_rounds(_COLLECTIVES[self.exchange], 0, self.workers, size)]
        return [size] * (1 if self.exchange == "star" else self.workers - 1)

    def formula_s(self, topology: Topology, profiles: Sequence[LinkProfile]) -> float | None:
        """Return the steady cycle in seconds, `max(Tc, S, (Tc + E) / (staleness + 1))`: S is for how long an exchange
        keeps its slowest direction of a link busy, E how long one takes from its first byte to the last worker's
        aggregate.

        Over the link between two workers of a line, or the links of all in a star, where a message begins to leave the
        receiver's link when its first packet is there. The workers' links are alike; a star's server may have another.
        None for other links.
        """
        own, server = profiles[0], profiles[-1]
        if len(set(profiles[: self.workers])) > 1 or (topology == "line" and self.nodes > 2):
            return None
        if own.up is None or own.down is None or server.up is None or server.down is None:
            return None
        packet = own.mtu + own.overhead_bytes
        first, answer = (wire_bytes(size, own) * 8 for size in self.message_bytes)
        # Every second packet is acknowledged, over the direction in which others send.
        acknowledged = (HEADER_BYTES + own.overhead_bytes) / (2 * packet)
        slowest = min(own.up.rate_bps, own.down.rate_bps)
        hop_s = max(own.up.delay_ns, own.down.delay_ns) / 1e9
        if topology == "star":
            hop_s = (own.up.delay_ns + own.down.delay_ns) / 1e9 + packet * 8 / own.down.rate_bps
        n = self.workers
        if self.exchange == "star":
            to_server, to_workers = first + acknowledged * answer, answer + acknowledged * first
            delays_ns = own.up.delay_ns + own.down.delay_ns + server.up.delay_ns + server.down.delay_ns
            packets_s = packet * 8 / server.down.rate_bps + packet * 8 / own.down.rate_bps
            there_s = first / min(own.up.rate_bps, server.down.rate_bps)
            back_s = answer / min(own.down.rate_bps, server.up.rate_bps)
            # Who has the aggregate first sends first: turns at one direction of the server's link hide the other's.
            turns_s = (n - 1) * max(first / server.down.rate_bps, answer / server.up.rate_bps)
            whole_s = there_s + back_s + turns_s + delays_ns / 1e9 + packets_s
            busy_s = max(
                max(to_server / own.up.rate_bps, to_workers / own.down.rate_bps),
                n * max(to_server / server.down.rate_bps, to_workers / server.up.rate_bps),
            )
        elif self.exchange == "all-to-all":
            whole_s = (n - 1) * first / slowest + hop_s
            busy_s = (n - 1) * first * (1 + acknowledged) / slowest
        else:
            rounds = ring_rounds(_COLLECTIVES[self.exchange], 0, n, self.message_bytes[0])
            bits = sum(wire_bytes(one.message_bytes, own) * 8 for one in rounds)
            whole_s = bits * (1 + acknowledged) / slowest + len(rounds) * hop_s
            busy_s = whole_s  # a member goes round once more when it has been round
        compute_s = self.compute_ns / 1e9
        return steady_cycle_s(compute_s, busy_s, whole_s, self.staleness)


_COLLECTIVES: Final = {"all-reduce": "all_reduce", "all-gather": "all_gather"}


def resolve_data_parallel(table: Mapping[str, Any], where: str) -> DataParallelShape:
    """Return the numbers of a job. SpecError, which starts with `where`, for what cannot be resolved."""
    return resolve(DataParallelTable, _shape, table, where)


def _shape(asked: DataParallelTable) -> DataParallelShape:
    size, device, flops = model_on_device(asked.model, asked.device, asked.precision)
    whole = range(size.layers)
    forward = stage(size, whole, sequence_length=asked.sequence_length, sequences=asked.sequences)
    count = parameters(size, whole)
    update_s = ADAMW_BYTES * count / device.bandwidth_bytes_per_s
    compute_s = (3 * forward / flops * asked.compute + update_s) * asked.local_iterations
    bits = (asked.bits, asked.answer_bits or asked.bits)
    up, down = (max(1, math.ceil(count * each / 8)) for each in bits)
    return DataParallelShape(
        workers=asked.workers,
        exchange=asked.exchange,
        staleness=asked.staleness,
        compute_ns=math.ceil(compute_s * 1e9),
        message_bytes=(up, down),
        tokens=asked.workers * asked.sequences * asked.sequence_length * asked.local_iterations,
    )


# ------------------------------------------------------------------ traces
def steady_mean_ns(steps_ns: Sequence[int], staleness: int) -> float:
    """Return the time of a step in the steady state: the mean over whole cycles of `staleness + 1` steps, half of all
    steps at most. The last step is left out, for it receives what is still under way.

    An exchange that takes a little longer than computing is not there yet: workers run ahead of it for
    `staleness / (its time / computing - 1)` steps before they wait for it.
    """
    period = staleness + 1
    cycles = max(1, (len(steps_ns) - 1) // 2 // period)
    return float(mean(steps_ns[:-1][-cycles * period :]))


class LaneLabels(NamedTuple):
    """Which of a trace's labels says what."""

    gradient: int
    aggregate: int
    encode: int = 0
    decode: int = 0


class CodecTimes(NamedTuple):
    """How long a codec works on a message, in nanoseconds."""

    encode_ns: int
    decode_ns: int


_LABELS: Final = LaneLabels(_GRADIENT, _AGGREGATE)
Frames = Callable[[int], Sequence[int]]
"""The bytes of the messages that a node sends for a step, in order."""


class WorkerLanes:
    """What a worker does with its messages: what it hands over for a step, and what it must have of one."""

    def __init__(self, worker: int, others: Sequence[int], labels: LaneLabels, frames: Frames) -> None:
        """`others`: who gets its messages and whose it waits for, in order."""
        self.lane = Lane(worker, "compute")
        self._others, self._labels, self._sizes = others, labels, frames

    def have(self, step: int) -> None:
        """Wait for the aggregate of a step, or for what it is made of."""
        for other in self._others:
            self.lane.add(RECEIVE, label=self._labels.aggregate, peer=other, tag=step)

    def give(self, step: int, hops: Sequence[CodecTimes] = ()) -> None:
        """Hand over what was computed in a step; `hops`: by round of a ring, how long what
        is sent is encoded, and what comes decoded; empty: not at all.
        """
        for other, size in zip(self._others, self._sizes(step), strict=True):
            self.lane.add(SEND, label=self._labels.gradient, peer=other, tag=step, value=size)

    def end_step(self) -> None:
        """End a step of all its lanes."""
        self.lane.end_step()

    def lanes(self) -> list[Lane]:
        """Return its lanes, the one that computes first."""
        return [self.lane]


class _RingLanes(WorkerLanes):
    """A worker of a ring, whose other lane goes round it while the worker computes."""

    def __init__(self, worker: int, workers: int, labels: LaneLabels, frames: Frames) -> None:
        super().__init__(worker, [(worker + 1) % workers, (worker - 1) % workers], labels, frames)
        self._ring, self._workers = Lane(worker, "ring"), workers

    def _event(self, step: int, *, over: bool) -> int:
        return (step * self._workers + self.lane.node) * 2 + over

    def have(self, step: int) -> None:
        self.lane.add(WAIT, label=self._labels.aggregate, tag=self._event(step, over=True), value=1)

    def give(self, step: int, hops: Sequence[CodecTimes] = ()) -> None:
        self.lane.add(SIGNAL, label=self._labels.gradient, tag=self._event(step, over=False))
        self._ring.add(WAIT, label=self._labels.gradient, tag=self._event(step, over=False), value=1)
        after, before = self._others
        sizes = self._sizes(step)
        for number, size in enumerate(sizes):
            tag = step * len(sizes) + number
            if hops:
                self._ring.add(WORK, label=self._labels.encode, value=hops[number].encode_ns)
            self._ring.add(SEND, label=self._labels.gradient, peer=after, tag=tag, value=size)
            self._ring.add(RECEIVE, label=self._labels.gradient, peer=before, tag=tag)
            if hops:
                self._ring.add(WORK, label=self._labels.decode, value=hops[number].decode_ns)
        self._ring.add(SIGNAL, label=self._labels.aggregate, tag=self._event(step, over=True))

    def end_step(self) -> None:
        super().end_step()
        self._ring.end_step()

    def lanes(self) -> list[Lane]:
        return [self.lane, self._ring]


def make_lanes(exchange: Exchange, worker: int, workers: int, labels: LaneLabels, *, frames: Frames) -> WorkerLanes:
    """Make the lanes of one worker."""
    if exchange in _COLLECTIVES:
        return _RingLanes(worker, workers, labels, frames)
    others = [(worker + further) % workers for further in range(1, workers)]
    return WorkerLanes(worker, [workers] if exchange == "star" else others, labels, frames)


def server_lane(
    workers: int,
    steps: Iterable[int],
    labels: LaneLabels,
    *,
    frames: Frames,
    work: Callable[[Lane, int], None] = lambda lane, step: None,
) -> Lane:
    """Make the lane of a star's server, which has every worker's message before it works, which `work` adds to its lane
    for a step, and answers them in turn.
    """
    lane = Lane(workers, "server")
    for step in steps:
        for worker in range(workers):
            lane.add(RECEIVE, label=labels.gradient, peer=worker, tag=step)
        work(lane, step)
        for worker, size in enumerate(frames(step)):
            lane.add(SEND, label=labels.aggregate, peer=worker, tag=step, value=size)
        lane.end_step()
    return lane
