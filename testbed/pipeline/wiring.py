"""What connects a stage: Unix sockets to the other stages, links to its neighbours, and its devices' counters. No torch."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from testbed.counters import DeviceCounters
from testbed.pipeline import connect
from testbed.pipeline.gather import Gather
from testbed.pipeline.job import StageJob
from testbed.pipeline.pacing import be_prompt, step_back
from testbed.pipeline.port import Side, takes
from testbed.pipeline.transport import Connection
from testbed.workloads import table as workloads

_SWITCH_INTERVAL_S = 0.0005
"""How long the maths may keep the interpreter lock from a transport thread: Python's 5 ms would show in every message."""
_FRAMES = 2
"""Steps' worth of frames that may wait unsent or untaken."""


def largest_payload(tokens: int, width: int) -> int:
    """Bytes that a payload of so many tokens may have: an end to what a hostile length can take.

    Four times the tensor in fp32 for the values, and a matrix in fp32 of the hidden size squared for what a codec carries along:
    a basis, or its gradient, is never larger. Headers, and examples' visits, are within the last MiB.
    """
    return 4 * 4 * tokens * width + 4 * width**2 + (1 << 20)


class Wiring:
    """A stage's connections, while they last; a context manager. It listens from the start, so that others can connect while
    this stage still builds its model.
    """

    def __init__(self, job: StageJob, sockets: Sequence[socket.socket]) -> None:
        """`sockets` are those of the job's `Gather`; both they and what is opened here are closed at the end."""
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._job, self._name = job, f"stage {job.stage}"
        self.upstream: Connection | None = None
        self.downstream: Connection | None = None
        self.counters: DeviceCounters | None = None
        with ExitStack() as stack:
            self.gather = Gather(job.stage, sockets, job.limits.message_s)
            stack.callback(self.gather.close)
            if job.devices:
                self.counters = stack.enter_context(DeviceCounters(job.devices, job.overhead_bytes))
            self._listener = (
                stack.enter_context(connect.listen(job.listen, self._name)) if job.listen is not None else None
            )
            self._stack = stack.pop_all()

    def connect(self) -> None:
        """Reach both neighbours, and wait until every stage has reached its own. TransportError where one cannot be.

        Where the job is prompt, its connections' threads go before what the calling thread does; the stage's log says how.
        """
        job = self._job
        if job.prompt:
            be_prompt()
        if job.downstream is not None:
            peer = f"{self._name} <-> stage {job.stage + 1} ({job.downstream})"
            self.downstream = self._connection(
                "downstream", connect.connect(job.downstream, peer, job.limits.connect_s), peer
            )
        if self._listener is not None:
            peer = f"{self._name} <-> stage {job.stage - 1}"
            self.upstream = self._connection(
                "upstream", connect.accept(self._listener, peer, job.limits.connect_s), peer
            )
        if job.prompt:
            sys.stdout.write(f"{self._name} works with {step_back()}\n")
        self.gather.exchange([])  # the first step starts when every stage is there

    def leave(self) -> None:
        """Say the end to both neighbours and wait for theirs."""
        for connection in (self.upstream, self.downstream):
            if connection is not None:
                connection.close(self._job.limits.message_s)

    def _connection(self, side: Side, sock: socket.socket, name: str) -> Connection:
        workload, frames = self._job.workload, self._job.pipeline.microbatches * self._job.pipeline.accumulation
        tokens = workload.batch_size // frames * workload.sequence_length
        connection = Connection(
            sock,
            name=name,
            token=bytes.fromhex(self._job.token),
            incoming=takes(side),
            max_payload_bytes=largest_payload(tokens, workloads.width(workload)),
            max_frames=_FRAMES * frames,
        )
        return self._stack.enter_context(connection)

    def __enter__(self) -> Wiring:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)
