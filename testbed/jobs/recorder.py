"""Records the actions and messages of each place in a step, as an observer of any interpreter.

An action of the records covers what a program did between two `Begin`s: wait for input, decode, compute, encode the
output. A forked program's sends belong to the step that forked it, its receives to the step that waited for it. A step
is therefore complete once all its forks have ended; steps are passed on in order.
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
    """The name of a message in the records of a kind of job."""

    direction: Direction
    number: int
    """Its micro-batch or its step."""
    with_peer: bool = True
    """Whether the record names the peer; in a pipeline the direction implies it."""


class Said(NamedTuple):
    """A node's part of the record of a step or an evaluation."""

    loss: float | None = None
    """None except at the place that reports the job's loss."""
    accuracy: float | None = None
    tokens: int = 0
    """Or images."""
    gradient_norm: float | None = None
    learning_rate: float | None = None


class PacedWork(NamedTuple):
    """Reported right after the work of an action that is paced to a duration: see `ActionRecord`."""

    began_ns: int
    maths_ns: int
    due_ns: int


@dataclass
class Recorded:
    """A step or an evaluation of one place."""

    step: int
    phase: Phase
    start_ns: int
    end_ns: int = 0
    optimiser_start_ns: int | None = None
    """When the part of the step outside its actions began."""
    synchronised_ns: int | None = None
    """When all places had met."""
    actions: list[ActionRecord] = field(default_factory=list)
    sent: list[SentRecord] = field(default_factory=list)
    messages: list[tuple[int, Key]] = field(default_factory=list)
    """Sent messages: receiver and key."""
    received: list[ReceivedRecord] = field(default_factory=list)
    decided: list[DecidedRecord] = field(default_factory=list)


@dataclass
class _Forked:
    """Messages of a forked program so far."""

    step: Recorded
    sent: list[SentRecord] = field(default_factory=list)
    messages: list[tuple[int, Key]] = field(default_factory=list)
    received: list[ReceivedRecord] = field(default_factory=list)


@dataclass
class _RecordedPlace:
    current: Recorded
    fresh: bool = True
    """Whether the current step has not started."""
    action: dict[str, Any] | None = None
    """Times of the current action."""
    worked: bool = False
    """Whether the current action has computed or encoded."""
    running: dict[str, _Forked] = field(default_factory=dict)
    """Running forks, by lane."""
    forks: dict[Key, _Forked] = field(default_factory=dict)
    """Forks that no program has waited for yet."""
    unfinished: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Number of running forks, by `id` of the step."""
    complete: deque[Recorded] = field(default_factory=deque)
    """Ended steps that wait for their own forks or for an earlier step."""


class StepRecorder:
    """Observes a run and writes a record for each step of each place."""

    def __init__(
        self, write: Callable[[int, Recorded], None], named: Callable[[Key], Named], header_bytes: int = 0
    ) -> None:
        """`write` receives a place and one of its steps; `named` gives the name of a message in records; a frame adds
        `header_bytes` to payload and note.
        """
        self._write, self._named, self._header_bytes = write, named, header_bytes
        self._places: dict[int, _RecordedPlace] = defaultdict(lambda: _RecordedPlace(Recorded(0, "train", 0)))

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note an ended action."""
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
                if end_ns > begin_ns:  # otherwise it arrived while earlier messages were decoded
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

    def state(self) -> dict[int, Any]:
        """Return what later records need of earlier steps while no fork runs: by place, what forks received."""
        return {
            number: [(tuple(key), [each.model_dump() for each in of.received]) for key, of in place.forks.items()]
            for number, place in self._places.items()
        }

    def load(self, state: dict[int, Any]) -> None:
        """Restore a `state`."""
        for number, forks in state.items():
            place = self._places[number]
            for key, received in forks:
                records = [ReceivedRecord(**each) for each in received]
                place.forks[Key(*key)] = _Forked(place.current, received=records)

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
    """Refuse input for an action that has already worked, because records and the ideal would count that work as
    waiting. SpecError.
    """
    if place.action is not None and place.worked:
        begun = f"{place.action['kind']} {place.action['microbatch']}"
        raise SpecError(
            f"node {lane.node} receives input ({type(action).__name__}) after work within its action {begun}, "
            "so records would count that work as waiting; yield another Begin, with its own number, before receiving"
        )


def _reached(place: _RecordedPlace, what: str, at_ns: int) -> None:
    """Note that the current action has reached this point: later points cannot be earlier in time."""
    if place.action is not None:
        place.action |= dict.fromkeys(_TIMES[_TIMES.index(what) :], at_ns)
