"""Data parallel training from shapes alone: workers that hold whole models and exchange what they computed.

Before iteration t a worker has the aggregate of iteration t - 1 - staleness, as in delayed aggregation (DeCo-SGD, arXiv
2507.17346); staleness 0 is synchronous SGD. It computes, and hands its message over.

all-to-all   every worker sends its message to every other
star         every worker sends its message to a server, which sends each the aggregate when it has all
all-reduce   a ring adds up parts of dense messages and passes the sums on
all-gather   a ring passes on every message as it is: of sparse ones, which have no parts in common
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from testbed.devices.flops import ADAMW_BYTES, parameters, stage
from testbed.frozen import Frozen
from testbed.jobs.actions import Action, Key, Sizes, Work
from testbed.jobs.data_parallel import MESSAGES, DataParallelJob
from testbed.metrics.wires import HEADER_BYTES, wire_bytes
from testbed.play.rings import ring_rounds
from testbed.play.shapes import Count, ModelTable, model_on_device, resolve
from testbed.play.trace import Trace
from testbed.play.tracing import TracedJob
from testbed.policies.cycle import steady_cycle_s
from testbed.profiles import LinkProfile
from testbed.spec import Exchange, Topology

LABELS = ("local step", *MESSAGES)


class DataParallelTable(ModelTable):
    """A job as a file states it."""

    parallelism: Literal["data"]
    device: str
    workers: Annotated[int, Field(ge=2, strict=True)]
    exchange: Exchange
    staleness: Annotated[int, Field(ge=0, strict=True)] = 0
    """Iterations that a worker may be ahead of the aggregate."""
    local_iterations: Count = 1
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
        up, down = (-(-size // scale) for size in self.message_bytes)
        first = up
        if self.exchange in _COLLECTIVES:
            first = ring_rounds(_COLLECTIVES[self.exchange], 0, self.workers, up)[0].message_bytes

        def size(node: int, key: Key) -> int:
            return down if node == self.workers else first

        def cost(node: int, action: Action) -> int | None:
            return self.compute_ns if isinstance(action, Work) and action.what == LABELS[0] else None

        staleness, local_steps = [self.staleness] * self.workers, [1] * self.workers
        # What experiments published counts times and bytes by steps that end before a worker waits.
        job = DataParallelJob(self.workers, self.exchange, staleness, local_steps, steps, waits_first=True)
        nodes = [Sizes(functools.partial(size, node)) for node in range(self.nodes)]
        return TracedJob(job, nodes, cost, LABELS, {"maker": "synthetic data parallel"}).trace()

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
