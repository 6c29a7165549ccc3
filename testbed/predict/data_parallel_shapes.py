"""Data parallel training from shapes alone: workers that hold whole models and exchange updates.

Before iteration t, a worker has received the aggregate of iteration t - 1 - staleness, as in delayed aggregation
(DeCo-SGD, arXiv 2507.17346); staleness 0 is synchronous SGD. It then computes and sends its message.

all-to-all   every worker sends its message to every other one
star         every worker sends its message to a server, which returns the aggregate once it has all
all-reduce   a ring sums parts of dense messages and forwards the sums
all-gather   a ring forwards every message unchanged, for sparse messages, whose parts cannot be summed
pairs        every worker sends its message to one other, and receives that one's
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Annotated, Any, Literal

from pydantic import Field

from testbed.devices.flops import ADAMW_BYTES, parameters, stage
from testbed.frozen import Frozen
from testbed.jobs.actions import Action, Key, Sizes, Work
from testbed.jobs.data_parallel import MESSAGES, DataParallelJob
from testbed.metrics.wires import HEADER_BYTES, wire_bytes
from testbed.policies.cycle import steady_cycle_s
from testbed.predict.shapes import Count, ModelTable, model_on_device, resolve
from testbed.profiles import LinkProfile
from testbed.spec import RINGS, Exchange, Topology
from testbed.trace.format import Trace
from testbed.trace.tracing import TracedJob

LABELS = ("local step", *MESSAGES)


class DataParallelTable(ModelTable):
    """A job as a file states it."""

    parallelism: Literal["data"]
    device: str
    workers: Annotated[int, Field(ge=2, strict=True)]
    exchange: Exchange
    staleness: Annotated[int, Field(ge=0, strict=True)] = 0
    """Maximum number of iterations between a worker and its last aggregate."""
    local_iterations: Count = 1
    """Number of iterations between two exchanges, which make up a step."""
    bits: Annotated[float, Field(gt=0)]
    """Bits per parameter in a worker's message."""
    answer_bits: Annotated[float, Field(gt=0)] | None = None
    """Bits per parameter in the aggregate of a star; None: as in a worker's message."""


class DataParallelShape(Frozen):
    """The numbers of an iteration, which determine a trace."""

    workers: int
    exchange: Exchange
    staleness: int
    compute_ns: int
    """Compute time of all iterations between two exchanges."""
    message_bytes: tuple[int, int]
    """Sizes of a worker's message and of the server's answer."""
    tokens: int
    """Tokens per step, over all workers."""

    @property
    def nodes(self) -> int:
        return self.workers + (self.exchange == "star")

    @property
    def least_steps(self) -> int:
        """Minimum number of steps to reach the steady state."""
        return 4 * (self.staleness + 1)

    @property
    def period(self) -> None:
        """Number of steps after which the job repeats: unknown, because nodes do not synchronise at the end of a step;
        a worker runs ahead, and then waits.
        """

    def steady_ns(self, steps_ns: Sequence[int]) -> float:
        """Return the time of a step in the steady state, see `steady_mean_ns`."""
        return steady_mean_ns(steps_ns, self.staleness)

    @property
    def payload_bytes(self) -> int:
        """Payload bytes per step, over all nodes."""
        up, down = self.message_bytes
        others = 1 if self.exchange == "pairs" else self.workers - 1
        if self.exchange == "star":
            return self.workers * (up + down)
        if self.exchange == "all-reduce":
            return self.workers * 2 * others * max(1, -(-up // self.workers))
        return self.workers * others * up

    def columns(self) -> dict[str, float]:
        """Return the table columns that are known before play, in seconds and bytes, by name."""
        up, down = self.message_bytes
        return {"compute_s": self.compute_ns / 1e9, "message_bytes": up, "answer_bytes": down}

    def trace(self, steps: int, scale: int = 1) -> Trace:
        """Return the trace of `steps` steps, with messages divided by `scale`. In its last step every worker receives
        the messages still in flight.
        """
        up, down = (-(-size // scale) for size in self.message_bytes)
        first = _ring(self.exchange, self.workers, up)[1] if self.exchange in RINGS else up

        def size(node: int, key: Key) -> int:
            return down if node == self.workers else first

        def cost(node: int, action: Action) -> int | None:
            return self.compute_ns if isinstance(action, Work) and action.what == LABELS[0] else None

        staleness, local_steps = [self.staleness] * self.workers, [1] * self.workers
        # Published numbers of the experiments use steps that end before a worker waits.
        job = DataParallelJob(self.workers, self.exchange, staleness, local_steps, steps, waits_first=True)
        nodes = [Sizes(functools.partial(size, node)) for node in range(self.nodes)]
        return TracedJob(job, nodes, cost, LABELS, {"maker": "synthetic data parallel"}).trace()

    def formula_s(self, topology: Topology, profiles: Sequence[LinkProfile]) -> float | None:
        """Return the steady step time in seconds, `max(Tc, S, (Tc + E) / (staleness + 1))`, where Tc is the compute
        time, S the busy time of the slowest link direction per exchange, and E the time of an exchange from its first
        byte to the last worker's aggregate.

        Applies to a line of two workers, or to a star in which a message is forwarded to the receiver's link from its
        first packet on. All workers must have the same link; the server of a star may have another. None for other
        links.
        """
        own, server = profiles[0], profiles[-1]
        if len(set(profiles[: self.workers])) > 1 or (topology == "line" and self.nodes > 2):
            return None
        if own.up is None or own.down is None or server.up is None or server.down is None:
            return None
        packet = own.mtu + own.overhead_bytes
        first, answer = (wire_bytes(size, own) * 8 for size in self.message_bytes)
        # Acknowledgements, one per two packets, share the opposite direction with other messages.
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
            # The first worker to receive the aggregate sends first, so the two directions of the server's link overlap.
            turns_s = (n - 1) * max(first / server.down.rate_bps, answer / server.up.rate_bps)
            whole_s = there_s + back_s + turns_s + delays_ns / 1e9 + packets_s
            busy_s = max(
                max(to_server / own.up.rate_bps, to_workers / own.down.rate_bps),
                n * max(to_server / server.down.rate_bps, to_workers / server.up.rate_bps),
            )
        elif self.exchange in ("all-to-all", "pairs"):
            others = 1 if self.exchange == "pairs" else n - 1
            whole_s, busy_s = others * first / slowest + hop_s, others * first * (1 + acknowledged) / slowest
        else:
            rounds, message_bytes = _ring(self.exchange, n, self.message_bytes[0])
            whole_s = rounds * (wire_bytes(message_bytes, own) * 8 * (1 + acknowledged) / slowest + hop_s)
            busy_s = whole_s  # a member goes round once more when it has been round
        compute_s = self.compute_ns / 1e9
        return steady_cycle_s(compute_s, busy_s, whole_s, self.staleness)


def _ring(exchange: str, workers: int, size: int) -> tuple[int, int]:
    """Return the rounds of a ring (Patarasuk and Yuan, 2009), and the bytes that each worker sends in one."""
    part = max(1, -(-size // workers))
    return (2 * (workers - 1), part) if exchange == "all-reduce" else (workers - 1, max(1, size))


def resolve_data_parallel(table: Mapping[str, Any], where: str) -> DataParallelShape:
    """Resolve a job's table to its shape. SpecError, prefixed with `where`, if that is impossible."""
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
    """Return the steady step time: the mean over whole cycles of `staleness + 1` steps, of at most half of all steps.
    The last step is ignored, because it receives messages still in flight.

    If an exchange takes only slightly longer than compute, the steady state comes late: workers run ahead of it for
    `staleness / (its time / computing - 1)` steps before they wait.
    """
    period = staleness + 1
    cycles = max(1, (len(steps_ns) - 1) // 2 // period)
    return float(mean(steps_ns[:-1][-cycles * period :]))
