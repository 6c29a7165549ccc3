"""One end of the boundary between two stages: a codec for each direction, a connection, and what there is to record of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from testbed.codecs.base import Codec, Context, Slot
from testbed.pipeline import sockinfo
from testbed.pipeline.frame import HEADER_BYTES, Key
from testbed.pipeline.transport import Connection
from testbed.records import ReceivedRecord, SentRecord, SocketRecord
from testbed.spec import Direction

Side = Literal["upstream", "downstream"]
_FP32_BYTES = 4
_ALIGNMENT_BYTES = 64
"""Of what torch allocates. Vectorised kernels sum in another order where a tensor begins elsewhere (seen: a codec that wrapped
its payload's memory), and then the cut would touch the numbers."""


class Received(NamedTuple):
    """A tensor, and when it was asked for, was at hand as bytes, and was a tensor again."""

    tensor: Tensor
    asked_ns: int
    input_ns: int
    decoded_ns: int


def sends(side: Side) -> Direction:
    """What goes to the neighbour on that side: activations downstream, gradients upstream."""
    return "forward" if side == "downstream" else "backward"


class Boundary:
    """Tensors to and from the neighbour on one side."""

    def __init__(
        self, side: Side, *, index: int, seed: int, make: Callable[[Context], Codec], connection: Connection, timeout_s: float
    ) -> None:
        """`index` counts boundaries (0 lies between the stages 0 and 1); `make` makes a codec."""
        self.side: Side = side
        self.connection = connection
        self._out: Direction = sends(side)
        self._in: Direction = "backward" if self._out == "forward" else "forward"
        self._encoder = make(Context(seed=seed, boundary=index, direction=self._out))
        self._decoder = make(Context(seed=seed, boundary=index, direction=self._in))
        self._timeout_s = timeout_s
        self._raw_bytes: dict[Key, int] = {}
        self._received: list[ReceivedRecord] = []

    def send(self, tensor: Tensor, slot: Slot) -> int:
        """Encode and queue. Returns the time (ns) at which the payload was with the send thread."""
        key = Key(slot.phase, slot.step, self._out, slot.microbatch)
        self._raw_bytes[key] = tensor.numel() * _FP32_BYTES
        return self.connection.send(key, self._encoder.encode(tensor, slot))

    def receive(self, slot: Slot) -> Received:
        """Wait for the neighbour's tensor and decode it."""
        asked_ns = time.monotonic_ns()
        arrival = self.connection.take(Key(slot.phase, slot.step, self._in, slot.microbatch), self._timeout_s)
        input_ns = time.monotonic_ns()
        tensor = self._decoder.decode(arrival.payload, slot)
        if tensor.data_ptr() % _ALIGNMENT_BYTES:
            tensor = tensor.clone()
        decoded_ns = time.monotonic_ns()
        self._received.append(
            ReceivedRecord(
                direction=self._in,
                microbatch=slot.microbatch,
                payload_bytes=arrival.payload.nbytes,
                first_byte_ns=arrival.first_byte_ns,
                last_byte_ns=arrival.last_byte_ns,
            )
        )
        return Received(tensor, asked_ns, input_ns, decoded_ns)

    def records(self) -> tuple[list[SentRecord], list[ReceivedRecord]]:
        """All frames since the last call, each list in order."""
        sent = [
            SentRecord(
                direction=self._out,
                microbatch=departure.key.microbatch,
                raw_bytes=self._raw_bytes.pop(departure.key),
                payload_bytes=departure.payload_bytes,
                frame_bytes=departure.payload_bytes + HEADER_BYTES,
                queued_ns=departure.queued_ns,
                first_byte_ns=departure.first_byte_ns,
                last_byte_ns=departure.last_byte_ns,
            )
            for departure in self.connection.departures(self._timeout_s)
        ]
        received, self._received = self._received, []
        return sent, received

    def socket_record(self) -> SocketRecord:
        """TCP_INFO of the connection, now."""
        return sockinfo.read_socket(self.connection.socket, self.side)
