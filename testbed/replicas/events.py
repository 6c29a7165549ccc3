"""Asynchronous federated rounds in one process, an event at a time: messages take as long as formulas for links say.

What `asynchronous` does over a network, in the order that these times give. Where no two events lie so close together
that headers and acknowledgements decide between them, that is the network's order, and the numbers are the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from testbed.pipeline.frame import HEADER_BYTES
from testbed.replicas.arrivals import Applied, Rounds, Server
from testbed.spec import ArrivalsSpec

Sent: TypeAlias = Callable[[int, int, int, int], int]
"""Of a sender, a receiver, a frame's bytes and the moment (ns) at which it is handed over: when its last byte is there.
Called in the order of the moments."""
_Kind = Literal["made", "arrived", "due", "answered"]
_ORDER: dict[_Kind, int] = {"made": 0, "arrived": 1, "due": 2, "answered": 3}
"""Of what happens in one nanosecond: what arrives then is applied then."""


class Step(NamedTuple):
    """A step of the server."""

    at_ns: int
    """When the new weights were there, from the beginning of training."""
    applied: Applied
    received_bytes: int
    """Payloads of all workers that had arrived by then, from the beginning."""
    answered_bytes: int
    """Payloads of all answers before this step's."""


class Events:
    """A training; `steps` makes it."""

    def __init__(
        self,
        server: Server,
        workers: Sequence[Rounds],
        arrivals: ArrivalsSpec,
        sent: Sent,
        *,
        local_ns: Sequence[int],
        update_ns: int = 0,
    ) -> None:
        """`local_ns`: how long a local step takes, by worker; `update_ns`: a step of the server."""
        self.server, self.workers = server, workers
        self._arrivals, self._sent, self._local_ns, self._update_ns = arrivals, sent, local_ns, update_ns
        self._queue: list[tuple[int, int, int, _Kind]] = []
        self._payloads: dict[int, bytes] = {}
        self._idle_ns = 0
        """From when on the server can make its next step."""

    def steps(self, count: int) -> Iterator[Step]:
        """Make so many steps; yields each. StageError, CodecError as they come."""
        received = answered = 0
        for worker in range(len(self.workers)):
            self._begin(worker, 0)
        if self._arrivals.period_ns is not None:
            self._push(self._arrivals.period_ns, "due")
        while self.server.step < count:
            now_ns, _, worker, kind = heapq.heappop(self._queue)
            if kind == "made":
                _, payload = self.workers[worker].make()
                self._payloads[worker] = payload
                self._cross(now_ns, worker, len(self.workers), len(payload), "arrived", worker)
            elif kind == "arrived":
                payload = self._payloads.pop(worker)
                self.server.arrived(worker, self.workers[worker].made - 1, payload)
                received += len(payload)
                if len(self.server.waiting) == self._arrivals.buffer:
                    self._push(max(now_ns, self._idle_ns), "due")
            elif kind == "answered":
                self.workers[worker].answered(self._payloads.pop(worker))
                self._begin(worker, now_ns)
            else:
                applied = self.server.apply()
                done_ns = self._idle_ns = max(now_ns, self._idle_ns) + self._update_ns
                yield Step(done_ns, applied, received, answered)
                if self._arrivals.period_ns is not None:
                    self._push((self.server.step + 1) * self._arrivals.period_ns, "due")
                for each in applied.answered:
                    answer = self._payloads[each] = self.server.answer()
                    answered += len(answer)
                    self._cross(done_ns, len(self.workers), each, len(answer), "answered", each)

    def _begin(self, worker: int, now_ns: int) -> None:
        self._push(now_ns + self._local_ns[worker] * self.workers[worker].local_steps, "made", worker)

    def _cross(self, now_ns: int, sender: int, receiver: int, payload_bytes: int, kind: _Kind, worker: int) -> None:
        self._push(self._sent(sender, receiver, payload_bytes + HEADER_BYTES, now_ns), kind, worker)

    def _push(self, at_ns: int, kind: _Kind, worker: int = 0) -> None:
        heapq.heappush(self._queue, (at_ns, _ORDER[kind], worker, kind))
