"""Records a job as a trace: an observer of `jobs.loop`. Also replays a played trace to observers, as if the job had run
at the player's times.

A trace is recorded from a run of all places, not derived from each program separately, because the sizes of messages
that are forwarded without decoding are known only then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from testbed.jobs.actions import (
    Begin,
    Collect,
    Decode,
    Encode,
    EndStep,
    Fork,
    Job,
    Key,
    Meet,
    Message,
    Node,
    Receive,
    Send,
    Sent,
    Wait,
    Work,
)
from testbed.jobs.loop import MAIN, Began, Cost, Ended, Loop, MayGoOn, NodeLane, Observer
from testbed.jobs.recorder import Named
from testbed.trace.format import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.trace.played import PlayedLane

_BARRIER = "barrier"


class Colocation(NamedTuple):
    """Nodes of a trace that consist of several places each; messages within a node cross no link."""

    names: tuple[str, ...]
    """Names of the nodes."""
    of: Sequence[int]
    """Node of each place."""
    lanes: Sequence[str]
    """Name of the lane of each place."""
    within_ns: Callable[[int, int, Key], int]
    """Duration of a message within a node, given its sending place, its receiving place and its key."""

    @classmethod
    def apart(cls, places: Sequence[str], lanes: Sequence[str]) -> Colocation:
        """Return the colocation in which each place is a node of its own."""
        return cls(tuple(places), range(len(places)), lanes, lambda sender, receiver, key: 0)


@dataclass(frozen=True)
class TracedJob:
    """A job, and how to trace it."""

    job: Job
    nodes: Sequence[Node]
    """Nodes by place, which supply the sizes of messages."""
    cost: Cost
    """Duration of work, as for the loop; work without a cost is omitted from the trace."""
    labels: Sequence[str] = ()
    """Names of work and messages that precede those found in the run."""
    about: Mapping[str, Any] = field(default_factory=dict)
    sites: Colocation | None = None
    """Colocation of places; None: each place is a node."""
    named: Callable[[Key], Named] | None = None
    """Names of messages in the records of a run; None: it has no records."""
    goes_on: MayGoOn = lambda place, step: True
    """The answer to `EndStep`, for programs without a fixed last step."""

    def trace(self) -> Trace:
        """Return its trace. TimingDecidesError if the job's behaviour depends on the arrival times of messages."""
        tracer = Tracer(self)
        self.run(tracer)
        return tracer.trace()

    def run(self, observer: Observer) -> None:
        """Run it without advancing time. TimingDecidesError as above."""
        places = range(len(self.job.places))
        programs = [self.job.program(place) for place in places]
        Loop(programs, self.nodes, observers=[observer], goes_on=self.goes_on).run()


class Tracer:
    """Observes a run and makes its trace."""

    def __init__(self, traced: TracedJob) -> None:
        places = traced.job.places
        self._cost, self._about = traced.cost, dict(traced.about)
        lanes = ["server" if name == "server" else "compute" for name in places]
        self._sites = traced.sites or Colocation.apart(places, lanes)
        self._at, self._places = self._sites.of, len(places)
        self._labels = {label: number for number, label in enumerate(traced.labels)}
        self._lanes: dict[tuple[int, str], Lane] = {}
        """Lanes by place and name, in the order of their first actions."""
        self._side: dict[tuple[int, str], Lane] = {}
        """Helper lanes that receive for a place, or carry messages within a node: by node and name."""
        self._tags: dict[tuple[int, int, Key], int] = {}
        """Tags of the messages in flight: by sender, receiver and key."""
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._events: dict[object, int] = {}
        self._awaited: set[tuple[int, int, Key]] = set()
        self._met: dict[tuple[int, Sequence[int] | None], int] = defaultdict(int)
        self._notes: dict[type, Callable[[NodeLane, Lane, Any, Any], None]] = {
            Work: self._worked,
            Encode: self._worked,
            Decode: self._worked,
            Send: self._has_sent,
            Receive: self._has_received,
            Collect: self._collected,
            Meet: self._has_met,
            Fork: lambda lane, own, action, value: self._signal(own, (lane.node, "begin", action.key), action.key.what),
            Began: self._began,
            Ended: lambda lane, own, action, value: self._signal(own, (lane.node, "end", action.key), action.key.what),
            Wait: self._waited,
            EndStep: self._ended_step,
        }
        self._last: NodeLane | None = None
        self._own: Any = None
        """The lane of the trace for the current lane of the job."""
        self.message: tuple[Lane, int] | None = None
        """The last send or receive: the lane and the operation."""

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Add an action of a lane to the trace."""
        if (note := self._notes.get(type(action))) is not None:
            if lane is not self._last:
                self._last, self._own = lane, self.lane(lane)
            note(lane, self._own, action, value)

    def lane(self, lane: NodeLane) -> Lane:
        """Return the lane of the trace for a lane of the job."""
        if (own := self._lanes.get((lane.node, lane.name))) is None:
            name = self._sites.lanes[lane.node] if lane.name == MAIN else lane.name
            own = self._lanes[lane.node, lane.name] = Lane(self._at[lane.node], name)
        return own

    def trace(self) -> Trace:
        """Return the recorded trace."""
        lanes = [lane for own in (self._lanes, self._side) for lane in sorted(own.values(), key=attrgetter("node"))]
        steps = max(len(lane.starts) for lane in lanes)
        for lane in lanes:
            _go_to(lane, steps)
        return Trace(self._sites.names, tuple(self._labels), tuple(lanes), self._about)

    # ------------------------------------------------------------------ work
    def _worked(self, lane: NodeLane, own: Lane, action: Work | Encode | Decode, value: Any) -> None:
        if (took_ns := self._cost(lane.node, action)) is not None:
            what = action.what if isinstance(action, Work) else "encode" if isinstance(action, Encode) else "decode"
            own.add(WORK, self._label(what), 0, 0, took_ns)

    # ------------------------------------------------------------------ messages
    def _has_sent(self, lane: NodeLane, own: Lane, action: Send, value: Any) -> None:
        (message, peer, note, awaited), place = action, lane.node
        node, target, size = self._at[place], self._at[peer], len(message.payload) + len(note)
        label, what = self._label(message.key.what), (place, peer, message.key)
        if node == target:
            wire = self._beside(own, f"from {self._sites.lanes[place]} to {peer}")
            self._signal(own, ("handed", *what), message.key.what)
            self._wait(wire, ("handed", *what), message.key.what)
            wire.add(WORK, label=label, value=self._sites.within_ns(*what))
            self._signal(wire, ("there", *what), message.key.what)
            return
        if awaited:
            self._awaited.add(what)
        self._tags[what] = tag = self._sent[node, target]
        self._sent[node, target] = tag + 1
        self.message = own, len(own)
        own.add(SEND, label, target, tag, size)

    def _has_received(self, lane: NodeLane, own: Lane, action: Receive, value: Any) -> None:
        self._received(lane, own, action.key, action.peer, self._cost(lane.node, action) or 0)

    def _collected(self, lane: NodeLane, own: Lane, action: Collect, value: Sequence[Message]) -> None:
        for message in value:
            self._received(lane, own, message.key, message.source, 0)

    def _received(self, lane: NodeLane, own: Lane, key: Key, peer: int, waking_ns: int) -> None:
        what, source = (peer, lane.node, key), self._at[peer]
        if source == own.node:
            self._wait(own, ("there", *what), key.what)
            return
        label, tag, at = self._label(key.what), self._tags.pop(what), own
        if what in self._awaited:
            # The sender waits for its arrival, even if the receiver is busy: so a separate lane receives it.
            at, waking_ns = self._beside(own, f"from {self._sites.names[source]}"), 0
        self.message = at, len(at)
        at.add(RECEIVE, label, source, tag, waking_ns)
        if what in self._awaited:
            self._awaited.remove(what)
            self._signal(at, what, key.what)
            self._wait(own, what, key.what)

    def _beside(self, own: Lane, name: str) -> Lane:
        """Return a lane of the same node, in the same step."""
        if (lane := self._side.get((own.node, name))) is None:
            lane = self._side[own.node, name] = Lane(own.node, name)
        _go_to(lane, len(own.starts))
        return lane

    # ------------------------------------------------------------------ events
    def _has_met(self, lane: NodeLane, own: Lane, action: Meet, value: Any) -> None:
        met = lane.node, action.places
        event = (_BARRIER, action.places, self._met[met])
        self._met[met] += 1
        self._signal(own, event, _BARRIER)
        self._wait(own, event, _BARRIER, self._places if action.places is None else len(action.places))

    def _began(self, lane: NodeLane, own: Lane, action: Began, value: Any) -> None:
        _go_to(own, lane.step + 1)
        self._wait(own, (lane.node, "begin", action.key), action.key.what)

    def _waited(self, lane: NodeLane, own: Lane, action: Wait, value: Any) -> None:
        (key, peer), place = action, lane.node
        self._wait(own, (place, "end", key) if peer is None else (place, peer, key), key.what)

    def _ended_step(self, lane: NodeLane, own: Lane, action: EndStep, value: Any) -> None:
        if action.phase == "train":
            own.end_step()

    def _signal(self, lane: Lane, event: object, label: str) -> None:
        lane.add(SIGNAL, label=self._label(label), tag=self._event(event))

    def _wait(self, lane: Lane, event: object, label: str, times: int = 1) -> None:
        lane.add(WAIT, label=self._label(label), tag=self._event(event), value=times)

    def _label(self, what: str) -> int:
        if (number := self._labels.get(what)) is None:
            number = self._labels[what] = len(self._labels)
        return number

    def _event(self, name: object) -> int:
        return self._events.setdefault(name, len(self._events))


def _go_to(lane: Lane, starts: int) -> None:
    """End steps of a lane until `starts` steps have begun."""
    while len(lane.starts) < starts:
        lane.end_step()


class _Retold:
    """Accompanies a tracer, and replaces the times of its operations by the played ones."""

    def __init__(self, traced: TracedJob, trace: Trace, played: Sequence[PlayedLane], observer: Observer) -> None:
        self._tracer, self._observer = Tracer(traced), observer
        self._times = {(lane.node, lane.name): times for lane, times in zip(trace.lanes, played, strict=True)}
        self._now: dict[tuple[int, str], int] = defaultdict(int)
        """When the last operation of a lane of the job ended."""

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        own, running = self._tracer.lane(lane), (lane.node, lane.name)
        times, first = self._times[own.node, own.name], len(own)
        self._tracer.message = None
        self._tracer.did(lane, action, value, begin_ns, end_ns)
        begin_ns = end_ns = self._now[running]
        if len(own) > first:
            begin_ns, end_ns = times.begin_ns[first], times.end_ns[len(own) - 1]
            self._now[running] = end_ns
        elif isinstance(action, Begin) and first < len(times.begin_ns):
            begin_ns = end_ns = times.begin_ns[first]  # a lane that was delayed between two steps begins later
        if (message := self._tracer.message) is not None:
            (of, at), kind = message, type(action)
            crossed = self._times[of.node, of.name]
            first_byte_ns, last_byte_ns = crossed.first_byte_ns[at], crossed.last_byte_ns[at]
            if kind is Send:
                value = Sent(first_byte_ns, last_byte_ns)
            elif kind is Receive:
                value = value._replace(first_byte_ns=first_byte_ns, last_byte_ns=last_byte_ns)
        self._observer.did(lane, action, value, begin_ns, end_ns)


def retell(traced: TracedJob, trace: Trace, played: Sequence[PlayedLane], observer: Observer) -> None:
    """Replay the played trace of a job to an observer, for as many steps as the job has.

    `played`: by lane of the trace, at least that many steps.
    """
    traced.run(_Retold(traced, trace, played, observer))
