"""Actions that a place of a job may yield, and what each returns. docs/jobs.md explains them with an example.

A job is one program per place: a generator that yields actions and is sent what they return. Programs know no torch, no
sockets and no clock; interpreters (`loop`, `live`) know nothing about kinds of jobs. The values that `Work` and
`Decode` return are opaque: a program passes them on within a step and never inspects them, so it runs the same with
tensors and with None.

             one event loop                                       over sockets (`live`)
Begin        names the action of the records that follows         the same
Work         the node's `work`, then its cost                     the node's `work`, paced to its cost
Encode       the node's `encode`, then its cost                   the same
Decode       the node's `decode`, then its cost                   the same
Send         the links compute the last byte's arrival            queued for the peer's socket
Receive      waits for that byte                                  waits for the frame
Collect      all that had arrived; refused where time stands      all frames that had arrived
Fork, Wait   another lane of the node; its end, or a delivery     another thread; its end
Meet         all places' values, once the last has arrived        over a control plane that crosses no link
EndStep      asks whether the job continues                       the same
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence, Sized
from typing import Any, NamedTuple, Protocol

from testbed.message_key import Phase


class Key(NamedTuple):
    """Identifies a message or a piece of work. All messages from one node to another have distinct keys."""

    what: str
    """The kind of message or work: 'activation', 'gradient', 'aggregate'."""
    step: int
    part: int = 0
    """Index within the step: a micro-batch, a hop, a layer."""
    origin: int = 0
    """The place that owns the value, where several places have one each."""
    phase: Phase = "train"


class Encoded(NamedTuple):
    """An encoded value, as a node returns it."""

    payload: Sized
    raw_bytes: int = 0
    choice: str | None = None
    """See `Message` for the last two fields."""


class Message(NamedTuple):
    """Returned by `Encode` and `Receive`. It may be sent any number of times, and forwarded without decoding."""

    key: Key
    payload: Sized
    source: int = -1
    """The sending place; -1 for a local message that has not been sent."""
    raw_bytes: int = 0
    """Size of its tensors as fp32; known only where it was encoded, never transmitted."""
    choice: str | None = None
    """The choice of a codec that adapts to its link; also known only at the encoder."""
    note: bytes = b""
    """Bytes that the sender's program attached to the payload."""
    first_byte_ns: int = 0
    """When the sender queued its first byte; 0 in a run without time."""
    last_byte_ns: int = 0
    """When its last byte reached the receiver."""
    round_trip_ns: int | None = None
    """The connection's minimum round trip so far; None without a connection."""


class Sent(NamedTuple):
    """Times at which a message left; passed to observers of a `Send` where known."""

    first_byte_ns: int
    last_byte_ns: int
    """See `records.SentRecord`."""


class Begin(NamedTuple):
    """Begin an action of the records, such as forward 3 or update 7. It lasts until the next `Begin` on this lane."""

    kind: str | None = None
    """None: what follows belongs to the step but to no action."""
    number: int = 0


class Work(NamedTuple):
    """Compute; returns the node's result."""

    what: str
    key: Key
    value: Any = None


class Encode(NamedTuple):
    """Encode a value; returns the message."""

    key: Key
    value: Any = None


class Decode(NamedTuple):
    """Decode messages together; returns their values, in order."""

    messages: tuple[Message, ...]


class Send(NamedTuple):
    """Queue a message and continue without waiting. Messages to one peer leave in order."""

    message: Message
    peer: int
    note: bytes = b""
    """Sent with the payload, counted in its size, and readable without decoding."""
    awaited: bool = False
    """Whether the program will `Wait` for its delivery."""


class Receive(NamedTuple):
    """Wait for a message's last byte; returns the message."""

    key: Key
    peer: int


class Collect(NamedTuple):
    """Wait for messages of any key; returns all that have arrived, in order of arrival, including those that arrive in
    the same nanosecond.
    """

    peers: tuple[int, ...]
    at_least: int = 0
    """Wait until this many have arrived."""
    until_ns: int = 0
    """Wait until this time, counted from the start of the job."""
    grace_ns: int = 0
    """Wait until this long after the message that made them `at_least`, or until there are as many as peers."""


class Fork(NamedTuple):
    """Run a program on another lane of this node, concurrently. A lane runs its programs one after another."""

    lane: str
    key: Key
    program: Program


class Wait(NamedTuple):
    """Wait for a forked program and return its result; or, with a peer, wait until that peer has received a message."""

    key: Key
    peer: int | None = None


class Meet(NamedTuple):
    """Barrier over all places; returns the value of each, by place."""

    value: Any = None
    places: tuple[int, ...] | None = None
    """Limit the barrier to these places, including this one; returns their values, in this order."""


class EndStep(NamedTuple):
    """End a step or an evaluation of this place. Returns True: continue; False: a stop was requested; None: the time
    budget is exhausted.
    """

    number: int
    phase: Phase = "train"
    idle: bool = False
    """Whether the place did nothing in this step: its work since the previous step belongs to one that ends later."""
    at_action: bool = False
    """Whether the step ended when the current action began; that action belongs to the next step."""


Action = Begin | Work | Encode | Decode | Send | Receive | Collect | Fork | Wait | Meet | EndStep
Program = Generator[Action, Any, Any]


class Job(Protocol):
    """A kind of job with its parameters."""

    @property
    def places(self) -> Sequence[str]:
        """Names of its places."""
        ...

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return the program of a place, from right after the end of the step before that one: an evaluation that is
        due then comes first.
        """
        ...


class Node(Protocol):
    """The state of a place: model, kept activations, codecs, optimiser. Only nodes use torch."""

    def work(self, what: str, key: Key, value: Any) -> Any:
        """Compute."""
        ...

    def encode(self, key: Key, value: Any) -> Encoded:
        """Return the payload of a message. Raises the codec's CodecError."""
        ...

    def decode(self, messages: Sequence[Message]) -> Sequence[Any]:
        """Return the values of messages, in order. Raises the codec's CodecError."""
        ...


class Sizes(NamedTuple):
    """A node without maths that knows the sizes of messages."""

    size: Callable[[Key], int]
    """Size in bytes of a message that this node encodes."""

    def work(self, what: str, key: Key, value: Any) -> None:
        """Compute nothing."""

    def encode(self, key: Key, value: Any) -> Encoded:
        """Return a placeholder of the right length, without content."""
        return Encoded(range(self.size(key)))

    def decode(self, messages: Sequence[Message]) -> Sequence[None]:
        """Return no values."""
        return [None] * len(messages)
