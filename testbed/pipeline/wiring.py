"""Connect a place: Unix sockets to all others, links to its peers, and its devices' counters. No torch.

Of two peers the later listens, and the earlier one connects. Where a place has several of these, all say which they
are.
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
from testbed.pipeline.gather import Gather
from testbed.pipeline.job import Endpoint, PlaceJob
from testbed.pipeline.pacing import be_prompt, step_back
from testbed.pipeline.transport import Connection

SWITCH_INTERVAL_S = 0.0005
"""How long the maths may keep the interpreter lock from a transport thread: Python's 5 ms would show in every message.
"""
_NUMBER = struct.Struct("=I")
_RETRY_S = 0.02


def largest_payload(tokens: int, width: int) -> int:
    """Return the most bytes that a payload of `tokens` tokens may have, so that a hostile length cannot take all
    memory.

    Four times the tensor in fp32 for the values, and a matrix in fp32 of the hidden size squared for what a codec
    carries along: a basis, or its gradient, is never larger. Headers, and examples' visits, are within the last MiB.
    """
    return 4 * 4 * tokens * width + 4 * width**2 + (1 << 20)


class Wiring:
    """A place's connections, while they last; a context manager. It listens from the start, so that others can connect
    while this place still builds its model.
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
        """`sockets` are those of the job's `Gather`; both they and what is opened here are closed at the end. The
        rest as a `Connection` has it.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._job, self._place, self._peers = job, job.place, job.peers
        self._places = job.recipe.parallelism.places
        self._names, self._max_payload_bytes, self._max_frames = names, max_payload_bytes, max_frames
        self._numbered = any(len(self._earlier(place)) > 1 for place in range(len(job.peers)))
        self.connections: dict[int, Connection] = {}
        """By peer."""
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
        """Reach all peers. TransportError where one cannot be reached.

        Where the job is prompt, its connections' threads go before what the calling thread does; its log says how.
        """
        job, place, sockets = self._job, self._place, {}
        if job.prompt:
            be_prompt()
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
            sys.stdout.write(f"{job.name} works with {step_back()}\n")

    def leave(self) -> None:
        """Say the end to all peers and wait for theirs: pair by pair in an order that all places keep."""
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
            raise TransportError(f"{self._job.name}: an earlier place connected, and did not say which it is") from None

    def __enter__(self) -> Wiring:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def listen(endpoint: Endpoint, name: str, backlog: int = 1) -> socket.socket:
    """Listen for the earlier stage, or for so many nodes. StageError names the address when that is not possible."""
    try:
        # reuse_address: connections of the job before this one may still be in TIME_WAIT
        return socket.create_server((endpoint.address, endpoint.port), backlog=backlog)
    except OSError as error:
        raise StageError(f"{name} cannot listen on {endpoint}: {error.strerror}") from None


def accept_earlier(listener: socket.socket, name: str, timeout_s: float) -> socket.socket:
    """Accept an earlier place's connection. TransportError when none comes in time."""
    listener.settimeout(timeout_s)
    try:
        return listener.accept()[0]
    except TimeoutError:
        raise TransportError(f"{name}: not all earlier places connected within {timeout_s:g} s") from None


def connect_to_later(endpoint: Endpoint, name: str, timeout_s: float) -> socket.socket:
    """Connect to the later stage, trying again while it does not listen yet. TransportError when it cannot be reached
    in time.
    """
    deadline = time.monotonic() + timeout_s
    reason = "no time was given"
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
