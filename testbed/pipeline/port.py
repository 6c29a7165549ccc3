"""One stage's end of the connection to the neighbour on one side: payloads out and in, and what there is to record of them.

It knows no tensors: a `Boundary` puts codecs on top, `replay` sends bytes of recorded sizes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from testbed.message_key import Direction, Phase
from testbed.pipeline import sockinfo
from testbed.pipeline.frame import HEADER_BYTES, Key
from testbed.pipeline.transport import Arrival, Connection, Payload
from testbed.records import ReceivedRecord, SentRecord, SocketRecord

Side = Literal["upstream", "downstream"]


class Place(NamedTuple):
    """Which micro-batch of what; with a direction it is a frame's key."""

    phase: Phase
    step: int
    microbatch: int


def sends(side: Side) -> Direction:
    """What goes to the neighbour on that side: activations downstream, gradients upstream."""
    return "forward" if side == "downstream" else "backward"


def takes(side: Side) -> Direction:
    """What comes from there."""
    return "backward" if side == "downstream" else "forward"


class Port:
    """Payloads to and from the neighbour on one side."""

    def __init__(self, side: Side, *, connection: Connection, timeout_s: float) -> None:
        """`timeout_s` is the longest wait for one frame."""
        self.side: Side = side
        self.connection = connection
        self._out, self._in = sends(side), takes(side)
        self._timeout_s = timeout_s
        self._told: dict[Key, tuple[int, str | None]] = {}
        """Of each frame that is on its way: raw bytes and the codec's choice."""
        self._received: list[ReceivedRecord] = []

    def post(
        self, place: Place, payload: Payload, raw_bytes: int, not_before_ns: int = 0, choice: str | None = None
    ) -> int:
        """Queue a payload that stands for `raw_bytes` of fp32; `choice` as in `SentRecord`. Returns the time (ns) at which it was
        free to go: see `Connection.send`.
        """
        key = Key(place.phase, place.step, self._out, place.microbatch)
        self._told[key] = raw_bytes, choice
        return self.connection.send(key, payload, not_before_ns)

    def take(self, place: Place) -> Arrival:
        """Wait for the neighbour's payload."""
        return self.connection.take(Key(place.phase, place.step, self._in, place.microbatch), self._timeout_s)

    def note(self, place: Place, arrival: Arrival) -> None:
        """Record what was taken; apart from `take`, so that it counts neither as waiting nor as decoding."""
        self._received.append(
            ReceivedRecord(
                direction=self._in,
                microbatch=place.microbatch,
                payload_bytes=arrival.payload.nbytes,
                first_byte_ns=arrival.first_byte_ns,
                last_byte_ns=arrival.last_byte_ns,
            )
        )

    def records(self) -> tuple[list[SentRecord], list[ReceivedRecord]]:
        """All frames since the last call, each list in order."""
        sent = [
            SentRecord(
                direction=self._out,
                microbatch=departure.key.microbatch,
                raw_bytes=raw_bytes,
                payload_bytes=departure.payload_bytes,
                frame_bytes=departure.payload_bytes + HEADER_BYTES,
                queued_ns=departure.queued_ns,
                first_byte_ns=departure.first_byte_ns,
                last_byte_ns=departure.last_byte_ns,
                choice=choice,
            )
            for departure in self.connection.departures(self._timeout_s)
            for raw_bytes, choice in (self._told.pop(departure.key),)
        ]
        received, self._received = self._received, []
        return sent, received

    def socket_record(self) -> SocketRecord:
        """TCP_INFO of the connection, now."""
        return sockinfo.read_socket(self.connection.socket, self.side)
