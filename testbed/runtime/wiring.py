"""Connect a place: Unix sockets to all places, links to its peers, and its devices' counters. No torch.

Of two peers the later one listens and the earlier one connects. If a place has several earlier peers, each identifies
itself.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from testbed.counters import DeviceCounters
from testbed.errors import StageError, TransportError
from testbed.process import set_timer_slack
from testbed.runtime.gather import Gather
from testbed.runtime.pacing import lower_priority
from testbed.runtime.place_job import Endpoint, PlaceJob
from testbed.runtime.transport import Connection

SWITCH_INTERVAL_S = 0.0005
"""The longest time for which maths may keep the interpreter lock from a transport thread; Python's default of 5 ms
would delay every message.
"""
_NUMBER = struct.Struct("=I")
_RETRY_S = 0.02


def largest_payload(tokens: int, width: int) -> int:
    """Return the maximum size of a payload of `tokens` tokens, so that a hostile length cannot exhaust memory.

    Four times the fp32 tensor for the values, plus an fp32 matrix of the hidden size squared for a codec's basis or its
    gradient, plus 1 MiB for headers and examples' visits.
    """
    return 4 * 4 * tokens * width + 4 * width**2 + (1 << 20)


class Wiring:
    """A place's connections, as a context manager. It listens from the start, so that others can connect while this
    place is still building its model.
    """

    def __init__(
        self,
        job: PlaceJob,
        sockets: Sequence[socket.socket],
        *,
        names: Sequence[str],
        max_payload_bytes: int,
        max_frames: int,
    ) -> None:
        """`sockets` are those of the job's `Gather`; they and all sockets opened here are closed at the end. Other
        arguments as for `Connection`.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._job, self._place, self._peers = job, job.place, job.peers
        self._places = job.recipe.parallelism.places
        self._names, self._max_payload_bytes, self._max_frames = names, max_payload_bytes, max_frames
        self._numbered = any(len(self._earlier(place)) > 1 for place in range(len(job.peers)))
        self.connections: dict[int, Connection] = {}
        """Connections, by peer."""
        self.counters: DeviceCounters | None = None
        self._listener: socket.socket | None = None
        with ExitStack() as stack:
            self.gather = Gather(self._place, sockets, job.limits.message_s)
            stack.callback(self.gather.close)
            if job.devices:
                self.counters = stack.enter_context(DeviceCounters(job.devices, job.overhead_bytes))
            if earlier := self._earlier(self._place):
                self._listener = stack.enter_context(listen(job.endpoints[self._place], job.name, len(earlier)))
            self._stack = stack.pop_all()

    def connect(self) -> None:
        """Connect to all peers. TransportError where one cannot be reached.

        If the job is prompt, its connections' threads get priority over the calling thread, as its log states.
        """
        job, place, sockets = self._job, self._place, {}
        if job.prompt:
            set_timer_slack()
        for peer in self._peers[place]:
            if peer > place:
                where = f"{job.name} <-> {self._places[peer]} ({job.endpoints[peer]})"
                sockets[peer] = connect_to_later(job.endpoints[peer], where, job.limits.connect_s)
                if self._numbered:
                    sockets[peer].sendall(_NUMBER.pack(place))
        if self._listener is not None:
            with self._listener:
                sockets |= dict(self._accept(self._listener) for _ in self._earlier(place))
        for peer in self._peers[place]:
            connection = Connection(
                sockets[peer],
                name=f"{job.name} <-> {self._places[peer]}",
                token=bytes.fromhex(job.token),
                names=self._names,
                max_payload_bytes=self._max_payload_bytes,
                max_frames=self._max_frames,
            )
            self.connections[peer] = self._stack.enter_context(connection)
        if job.prompt:
            sys.stdout.write(f"{job.name} runs with {lower_priority()}\n")

    def leave(self) -> None:
        """Close the connections to all peers, pair by pair in an order common to all places."""
        for peer in sorted(self.connections, key=lambda peer: sorted((peer, self._place))):
            self.connections[peer].close(self._job.limits.message_s)

    def _earlier(self, place: int) -> list[int]:
        return [peer for peer in self._peers[place] if peer < place]

    def _accept(self, listener: socket.socket) -> tuple[int, socket.socket]:
        sock = accept_earlier(listener, self._job.name, self._job.limits.connect_s)
        if not self._numbered:
            return self._earlier(self._place)[0], sock
        sock.settimeout(self._job.limits.connect_s)
        try:
            return _NUMBER.unpack(sock.recv(_NUMBER.size, socket.MSG_WAITALL))[0], sock
        except (TimeoutError, struct.error):
            raise TransportError(f"{self._job.name}: an earlier place connected without identifying itself") from None

    def __enter__(self) -> Wiring:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def listen(endpoint: Endpoint, name: str, backlog: int = 1) -> socket.socket:
    """Listen for the earlier stage, or for `backlog` nodes. StageError with the address when that fails."""
    try:
        # reuse_address: connections of the job before this one may still be in TIME_WAIT
        return socket.create_server((endpoint.address, endpoint.port), backlog=backlog)
    except OSError as error:
        raise StageError(f"{name} cannot listen on {endpoint}: {error.strerror}") from None


def accept_earlier(listener: socket.socket, name: str, timeout_s: float) -> socket.socket:
    """Accept an earlier place's connection. TransportError after `timeout_s`."""
    listener.settimeout(timeout_s)
    try:
        return listener.accept()[0]
    except TimeoutError:
        raise TransportError(f"{name}: not all earlier places connected within {timeout_s:g} s") from None


def connect_to_later(endpoint: Endpoint, name: str, timeout_s: float) -> socket.socket:
    """Connect to the later stage, retrying until it listens. TransportError when it cannot be reached in time."""
    deadline = time.monotonic() + timeout_s
    reason = "the time limit was 0"
    while (left := deadline - time.monotonic()) > 0:
        try:
            return socket.create_connection((endpoint.address, endpoint.port), timeout=left)
        except ConnectionRefusedError as error:
            reason = str(error.strerror)
            time.sleep(min(_RETRY_S, left))
        except OSError as error:
            raise TransportError(
                f"{name}: cannot reach the later stage at {endpoint}: {error.strerror or error}"
            ) from None
    raise TransportError(f"{name}: the later stage did not listen on {endpoint} within {timeout_s:g} s ({reason})")
