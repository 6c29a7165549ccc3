"""What a place of a job may do, and what it gets back. docs/jobs.md explains the table and shows an example.

A job is one program per place: a generator that yields actions and is sent what they return. Programs know no torch, no
sockets and no clock; interpreters (`loop`, `live`) know no kind of job. Values, which `Work` and `Decode` return, are
opaque: a program passes them on within a step and never looks inside, so it runs the same with tensors and with None.

             one event loop                                       over sockets (`live`)
Begin        names the action of the records that follows         the same
Work         the node's `work`, then its cost                     the node's `work`, paced to its cost
Encode       the node's `encode`, then its cost                   the same
Decode       the node's `decode`, then its cost                   the same
Send         the links say when the last byte arrives             queued for the peer's socket
Receive      waits for that byte                                  waits for the frame
Collect      all that had arrived; refused where time stands      all frames that had arrived
Fork, Wait   another lane of the node; its end, or a delivery     another thread; its end
Meet         everybody's values, when the last one is there       over a control plane that crosses no link
EndStep      asks whether the job goes on                         the same
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence, Sized
from typing import Any, NamedTuple, Protocol

from testbed.message_key import Phase


class Key(NamedTuple):
    """Which message, or which piece of work. No two messages from one node to another have the same key."""

    what: str
    """'activation', 'gradient', 'aggregate': what people call it."""
    step: int
    part: int = 0
    """Within the step: a micro-batch, a hop, a layer."""
    origin: int = 0
    """The place whose value it is, where several places have one of their own."""
    phase: Phase = "train"


class Encoded(NamedTuple):
    """What a node makes of a value."""

    payload: Sized
    raw_bytes: int = 0
    choice: str | None = None
    """The last two as in `Message`."""


class Message(NamedTuple):
    """What `Encode` and `Receive` return. It may be sent any number of times, and passed on undecoded."""

    key: Key
    payload: Sized
    source: int = -1
    """The place that sent it; -1: it was made here, and not sent yet."""
    raw_bytes: int = 0
    """Its tensors as fp32: known where it was encoded, and not sent along."""
    choice: str | None = None
    """What its codec chose by what it measures of its link, likewise."""
    note: bytes = b""
    """What the sender's program said beside the payload."""
    first_byte_ns: int = 0
    """When the sender handed its first byte over; 0 where time stands still."""
    last_byte_ns: int = 0
    """When the receiver had its last byte."""
    round_trip_ns: int | None = None
    """The shortest round trip that the connection has seen so far, where there is a connection."""


class Sent(NamedTuple):
    """When a message left: what observers are told of a `Send` where it is known."""

    first_byte_ns: int
    last_byte_ns: int
    """As in `records.SentRecord`."""


class Begin(NamedTuple):
    """What follows on this lane, up to the next `Begin`, is one action of the records: forward 3, update 7."""

    kind: str | None = None
    """None: what follows belongs to the step, and to none of its actions."""
    number: int = 0


class Work(NamedTuple):
    """Compute; returns the node's value."""

    what: str
    key: Key
    value: Any = None


class Encode(NamedTuple):
    """Make a message of a value; returns the message."""

    key: Key
    value: Any = None


class Decode(NamedTuple):
    """Make values of messages, in one go; returns as many, in order."""

    messages: tuple[Message, ...]


class Send(NamedTuple):
    """Hand a message over and go on at once. Messages to one peer leave in order."""

    message: Message
    peer: int
    note: bytes = b""
    """Travels with the payload, counts in its size, and can be read before anything is decoded."""
    awaited: bool = False
    """Whether a `Wait` for its delivery follows."""


class Receive(NamedTuple):
    """Wait for a message's last byte; returns the message."""

    key: Key
    peer: int


class Collect(NamedTuple):
    """Wait for messages of any key; returns all that had arrived by then, in the order of arrival. What arrives in the
    very nanosecond has arrived.
    """

    peers: tuple[int, ...]
    at_least: int = 0
    """Wait until so many have arrived."""
    until_ns: int = 0
    """Wait until this time, counted from the start of the job."""


class Fork(NamedTuple):
    """Have another lane of this node run a program, beside this one. A lane runs what it is given in turn."""

    lane: str
    key: Key
    program: Program


class Wait(NamedTuple):
    """Wait for a forked program, and return what it returned; or, with a peer, until that peer has a message whole."""

    key: Key
    peer: int | None = None


class Meet(NamedTuple):
    """Wait for all places; returns everybody's value, by place."""

    value: Any = None
    places: tuple[int, ...] | None = None
    """Wait for these only, this one among them; returns their values, in this order."""


class EndStep(NamedTuple):
    """This place has ended a step, or an evaluation. Returns True: the job goes on; False: it ends here, as somebody
    asked for; None: its time is spent.
    """

    number: int
    phase: Phase = "train"
    idle: bool = False
    """Whether it did nothing in it: what it has done since the step before belongs to one that ends later."""
    at_action: bool = False
    """Whether it had ended when the action under way began, which belongs to the next one."""


Action = Begin | Work | Encode | Decode | Send | Receive | Collect | Fork | Wait | Meet | EndStep
Program = Generator[Action, Any, Any]


class Job(Protocol):
    """A kind of job with its numbers."""

    @property
    def places(self) -> Sequence[str]:
        """The names of its places."""
        ...

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return what a place does, from that step on."""
        ...


class Node(Protocol):
    """What a place has: a model, kept activations, codecs with their state, an optimiser. All that touches torch."""

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute."""
        ...

    def encode(self, key: Key, value: Any) -> Encoded:
        """Return the payload of a message. CodecError as from the codec."""
        ...

    def decode(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Return the values of messages, in order. CodecError as from the codec."""
        ...


class Sizes(NamedTuple):
    """A node without maths, which knows how large messages are."""

    size: Callable[[Key], int]
    """The bytes of a message that is encoded here."""

    def work(self, what: str, key: Key, value: Any) -> None:
        """Compute nothing."""

    def encode(self, key: Key, value: Any) -> Encoded:
        """Return something that is so long, and empty."""
        return Encoded(range(self.size(key)))

    def decode(self, messages: Sequence[Message]) -> Sequence[None]:
        """Return no values."""
        return [None] * len(messages)
