"""What each place did in a step, from the actions of its program: an observer of any interpreter.

An action of the records is what a program did between two `Begin`s: it waited for its input, decoded it, computed, and
encoded its output. What a forked program sent belongs to the step that forked it, and what it received to the step that
waited for it. So a step is complete when all that it forked has ended; steps are handed on in order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from testbed.errors import SpecError
from testbed.jobs import actions
from testbed.jobs.actions import Key, Message, Sent
from testbed.jobs.loop import MAIN, Began, Ended, NodeLane
from testbed.message_key import Direction, Phase
from testbed.records import ActionKind, ActionRecord, DecidedRecord, ReceivedRecord, SentRecord


class Named(NamedTuple):
    """How the records of a kind of job name a message."""

    direction: Direction
    number: int
    """Its micro-batch, or the step that it is of."""
    with_peer: bool = True
    """Whether the peer is named; in a pipeline it follows from the direction."""


class Said(NamedTuple):
    """What a node says of a step, or an evaluation, for its record."""

    loss: float | None = None
    """None except at the place whose loss is the job's."""
    accuracy: float | None = None
    tokens: int = 0
    """Or images."""
    gradient_norm: float | None = None
    learning_rate: float | None = None


class PacedWork(NamedTuple):
    """Told right after work of an action that is held to a duration: see `ActionRecord`."""

    began_ns: int
    maths_ns: int
    due_ns: int


@dataclass
class Recorded:
    """A step, or an evaluation, of one place."""

    step: int
    phase: Phase
    start_ns: int
    end_ns: int = 0
    optimiser_start_ns: int | None = None
    """When what belongs to none of its actions began."""
    synchronised_ns: int | None = None
    """When the places had met."""
    actions: list[ActionRecord] = field(default_factory=list)
    sent: list[SentRecord] = field(default_factory=list)
    messages: list[tuple[int, Key]] = field(default_factory=list)
    """Of what was sent: to whom, and what."""
    received: list[ReceivedRecord] = field(default_factory=list)
    decided: list[DecidedRecord] = field(default_factory=list)


@dataclass
class _Forked:
    """What a forked program sent and received so far."""

    step: Recorded
    sent: list[SentRecord] = field(default_factory=list)
    messages: list[tuple[int, Key]] = field(default_factory=list)
    received: list[ReceivedRecord] = field(default_factory=list)


@dataclass
class _RecordedPlace:
    current: Recorded
    fresh: bool = True
    """Whether nothing of the current step has been done."""
    action: dict[str, Any] | None = None
    """The times of the action that is under way."""
    worked: bool = False
    """Whether it has computed or encoded something."""
    running: dict[str, _Forked] = field(default_factory=dict)
    """By lane."""
    forks: dict[Key, _Forked] = field(default_factory=dict)
    """Those that nobody has waited for yet."""
    unfinished: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By `id` of a step: how many of its forks have not ended."""
    complete: deque[Recorded] = field(default_factory=deque)
    """Steps that have ended, and wait for their forks or those of a step before."""


class StepRecorder:
    """Observes a run and hands on what each place did in each step."""

    def __init__(
        self, write: Callable[[int, Recorded], None], named: Callable[[Key], Named], header_bytes: int = 0
    ) -> None:
        """`write` is given a place and one of its steps; `named` says how records call a message; a frame has so many
        `header_bytes` beside payload and note.
        """
        self._write, self._named, self._header_bytes = write, named, header_bytes
        self._places: dict[int, _RecordedPlace] = defaultdict(lambda: _RecordedPlace(Recorded(0, "train", 0)))

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note what has ended."""
        place = self._places[lane.node]
        if lane.name != MAIN:
            self._forked_did(place, lane.name, action, value, begin_ns)
            return
        if place.fresh:
            place.current.start_ns, place.fresh = begin_ns, False
        match action:
            case actions.Begin(kind, number):
                self._end_action(place)
                place.worked = False
                if kind is None:
                    place.current.optimiser_start_ns = end_ns
                else:
                    place.action = {"kind": cast(ActionKind, kind), "microbatch": number} | dict.fromkeys(
                        _TIMES, end_ns
                    )
            case actions.Work(what, key):
                place.worked = True
                _reached(place, "computed_ns", end_ns)
                if type(value) is int:
                    decided = DecidedRecord(what=what, part=key.part, origin=key.origin, value=value)
                    place.current.decided.append(decided)
            case actions.Encode():
                place.worked = True
                _reached(place, "encoded_ns", end_ns)
            case actions.Decode():
                _reached(place, "decoded_ns", end_ns)
            case actions.Send():
                place.current.sent.append(self._sent(action, value, begin_ns))
                place.current.messages.append((action.peer, action.message.key))
            case actions.Receive():
                _has_input(lane, place, action)
                if end_ns > begin_ns:  # else it was there, while messages before it were decoded
                    _reached(place, "input_ns", end_ns)
                place.current.received.append(self._received(value))
            case actions.Collect():
                _has_input(lane, place, action)
                _reached(place, "input_ns", end_ns)
                place.current.received += map(self._received, value)
            case actions.Fork(_, key, _):
                place.forks[key] = _Forked(place.current)
                place.unfinished[id(place.current)] += 1
            case actions.Wait(key, None):
                _has_input(lane, place, action)
                _reached(place, "input_ns", end_ns)
                place.current.received += place.forks.pop(key).received
            case PacedWork():
                if place.action is not None:
                    place.action |= action._asdict()
            case actions.Meet():
                place.current.synchronised_ns = end_ns
            case actions.EndStep(number, phase, True):
                now = place.current.start_ns
                place.complete.append(Recorded(number, phase, now, now))
                self._hand_on(lane.node, place)
            case actions.EndStep(number, phase, _, at_action):
                if at_action and place.action is not None:
                    end_ns = place.action["asked_ns"]
                else:
                    self._end_action(place)
                place.current.step, place.current.phase, place.current.end_ns = number, phase, end_ns
                place.complete.append(place.current)
                place.current, place.fresh = Recorded(number, phase, end_ns), not at_action
                self._hand_on(lane.node, place)

    def _forked_did(self, place: _RecordedPlace, name: str, action: Any, value: Any, begin_ns: int) -> None:
        match action:
            case Began(key):
                place.running[name] = place.forks[key]
            case actions.Send():
                place.running[name].sent.append(self._sent(action, value, begin_ns))
                place.running[name].messages.append((action.peer, action.message.key))
            case actions.Receive():
                place.running[name].received.append(self._received(value))
            case Ended():
                forked = place.running.pop(name)
                forked.step.sent += forked.sent
                forked.step.messages += forked.messages
                place.unfinished[id(forked.step)] -= 1
                self._hand_on(next(node for node, each in self._places.items() if each is place), place)

    def _hand_on(self, node: int, place: _RecordedPlace) -> None:
        while place.complete and not place.unfinished.get(id(place.complete[0])):
            place.unfinished.pop(id(place.complete[0]), None)
            self._write(node, place.complete.popleft())

    def _end_action(self, place: _RecordedPlace) -> None:
        if place.action is not None:
            place.current.actions.append(ActionRecord(**place.action))
            place.action = None

    def _sent(self, action: actions.Send, left: Sent | None, queued_ns: int) -> SentRecord:
        message, peer, left = action.message, action.peer, left or Sent(queued_ns, queued_ns)
        named, size = self._named(message.key), len(message.payload)
        return SentRecord(
            direction=named.direction,
            microbatch=named.number,
            peer=peer if named.with_peer else None,
            raw_bytes=message.raw_bytes,
            payload_bytes=size,
            frame_bytes=size + len(action.note) + self._header_bytes,
            queued_ns=queued_ns,
            first_byte_ns=left.first_byte_ns,
            last_byte_ns=left.last_byte_ns,
            choice=message.choice,
        )

    def _received(self, message: Message) -> ReceivedRecord:
        named = self._named(message.key)
        return ReceivedRecord(
            direction=named.direction,
            microbatch=named.number,
            peer=message.source if named.with_peer else None,
            payload_bytes=len(message.payload),
            first_byte_ns=message.first_byte_ns,
            last_byte_ns=message.last_byte_ns,
        )


_TIMES = ("asked_ns", "input_ns", "decoded_ns", "computed_ns", "encoded_ns")


def _has_input(lane: NodeLane, place: _RecordedPlace, action: Any) -> None:
    """Refuse input for an action that has already worked: that work would count as waiting, in the records and in the
    ideal. SpecError.
    """
    if place.action is not None and place.worked:
        begun = f"{place.action['kind']} {place.action['microbatch']}"
        raise SpecError(
            f"node {lane.node} works in its action {begun} and then waits in it ({type(action).__name__}), so that "
            "work would count as waiting; yield another Begin, with a number of its own, before that"
        )


def _reached(place: _RecordedPlace, what: str, at_ns: int) -> None:
    """Note that the action under way has got so far: what comes after it cannot have been earlier."""
    if place.action is not None:
        place.action |= dict.fromkeys(_TIMES[_TIMES.index(what) :], at_ns)
