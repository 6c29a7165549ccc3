"""Write down what the places of a job do, as a trace: an observer of `jobs.loop`.

A trace is recorded and not derived from one program alone: only where all places run are the sizes of messages known
that are passed on undecoded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
    Node,
    Receive,
    Send,
    Wait,
    Work,
)
from testbed.jobs.loop import MAIN, Began, Cost, Ended, Loop
from testbed.jobs.loop import Lane as RunningLane
from testbed.play.trace import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace


class Owner(NamedTuple):
    """One action of the records, and where its operations begin."""

    at: int
    kind: str
    number: int


class Tracer:
    """Observes a run and makes its trace."""

    def __init__(self, nodes: Sequence[str], labels: Sequence[str], cost: Cost, about: dict[str, Any]) -> None:
        """`labels`: names of what is worked on and sent, those that the run has not in the first place. `cost` says how
        long work takes, as for the loop; what has no cost is no operation.
        """
        self._nodes, self._cost, self._about = tuple(nodes), cost, about
        self._labels = {label: number for number, label in enumerate(labels)}
        self._lanes: dict[tuple[int, str], Lane] = {}
        self._inboxes: dict[tuple[int, str], Lane] = {}
        self.owners: dict[tuple[int, str], list[Owner]] = defaultdict(list)
        """By node and lane: whose operations these are, in order."""
        self._tags: dict[tuple[int, int], dict[Key, int]] = defaultdict(dict)
        self._events: dict[object, int] = {}
        self._awaited: set[tuple[int, int, Key]] = set()
        self._met: dict[int, int] = defaultdict(int)

    def did(self, lane: RunningLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Add what a lane has done."""
        node, own = lane.node, self._lane(lane.node, lane.name)
        match action:
            case Begin(str(kind), number):
                self.owners[node, own.name].append(Owner(len(own), kind, number))
            case Work() | Encode() | Decode():
                if (took_ns := self._cost(node, action)) is not None:
                    what = action.what if isinstance(action, Work) else type(action).__name__.lower()
                    own.add(WORK, label=self._label(what), value=took_ns)
            case Send(message, peer, note, awaited):
                tag = self._tag(node, peer, message.key)
                if awaited:
                    self._awaited.add((node, peer, message.key))
                size = len(message.payload) + len(note)
                own.add(SEND, label=self._label(message.key.what), peer=peer, tag=tag, value=size)
            case Receive(key, peer):
                self._received(node, own, key, peer, self._cost(node, action) or 0)
            case Collect():
                for message in value:
                    self._received(node, own, message.key, message.source, 0)
            case Meet():
                event = self._event(("meet", self._met[node]))
                self._met[node] += 1
                own.add(SIGNAL, tag=event)
                own.add(WAIT, tag=event, value=len(self._nodes))
            case Fork(_, key, _):
                own.add(SIGNAL, tag=self._event((node, "begin", key)))
            case Began(key):
                while len(own.starts) <= lane.step:
                    own.end_step()
                own.add(WAIT, tag=self._event((node, "begin", key)), value=1)
            case Ended(key):
                own.add(SIGNAL, tag=self._event((node, "end", key)))
            case Wait(key, None):
                own.add(WAIT, tag=self._event((node, "end", key)), value=1)
            case Wait(key, peer):
                own.add(WAIT, tag=self._event((node, peer, key)), value=1)
            case EndStep(_, "train"):
                own.end_step()

    def trace(self) -> Trace:
        """Return the trace of what was done."""
        lanes = sorted(self._lanes.values(), key=lambda lane: lane.node) + list(self._inboxes.values())
        steps = max(len(lane.starts) for lane in lanes)
        for lane in lanes:
            while len(lane.starts) < steps:
                lane.end_step()
        return Trace(self._nodes, tuple(self._labels), tuple(lanes), self._about)

    def _received(self, node: int, own: Lane, key: Key, peer: int, waking_ns: int) -> None:
        message, tag, label = (peer, node, key), self._tag(peer, node, key), self._label(key.what)
        if message not in self._awaited:
            own.add(RECEIVE, label=label, peer=peer, tag=tag, value=waking_ns)
            return
        # Its sender waits until it is there, whatever the receiver is doing: a lane of its own receives it.
        self._awaited.remove(message)
        name = f"from {self._nodes[peer]}"
        inbox = self._inboxes.setdefault((node, name), Lane(node, name))
        while len(inbox.starts) < len(own.starts):
            inbox.end_step()
        inbox.add(RECEIVE, label=label, peer=peer, tag=tag)
        inbox.add(SIGNAL, tag=self._event(message))
        own.add(WAIT, tag=self._event(message), value=1)

    def _lane(self, node: int, name: str) -> Lane:
        if (lane := self._lanes.get((node, name))) is None:
            shown = name if name != MAIN else "server" if self._nodes[node] == "server" else "compute"
            lane = self._lanes[node, name] = Lane(node, shown)
        return lane

    def _label(self, what: str) -> int:
        return self._labels.setdefault(what, len(self._labels))

    def _tag(self, source: int, target: int, key: Key) -> int:
        tags = self._tags[source, target]
        return tags.setdefault(key, len(tags))

    def _event(self, name: object) -> int:
        return self._events.setdefault(name, len(self._events))


def trace_job(
    job: Job, nodes: Sequence[Node], cost: Cost, labels: Sequence[str] = (), about: dict[str, Any] | None = None
) -> Trace:
    """Return the trace of a job: `nodes` know the sizes of its messages, `cost` how long work takes.

    TimingDecidesError where what the job does depends on when messages arrive.
    """
    tracer = Tracer(job.places, labels, cost, about or {})
    Loop([job.program(place) for place in range(len(job.places))], nodes, observers=[tracer]).run()
    return tracer.trace()
