"""Run all places of a job in one process, an event at a time; the clock is a number.

Four parts decide what a run is. `nodes` do maths, know sizes, or replay a recording. `cost` says how long a node takes
for what; `links` say when messages arrive; without both, time stands still. `observers` are told of everything that
ends: a trace, records, figures.

Several things of one nanosecond happen in this order: messages arrive, lanes go on (by number), deadlines expire.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from testbed.errors import SpecError, UserError
from testbed.jobs import actions
from testbed.jobs.actions import Action, Key, Message, Node, Program
from testbed.waking import waking_ns

_ARRIVALS, _DEADLINES = -1, 1 << 30
_PENDING: Final[Any] = object()
MAIN: Final = "main"
"""The lane that a place's own program runs on."""


class Signal(NamedTuple):
    """Count an event up by one: how a replayed trace (`play.replay`) does what Meet, Fork and Wait do."""

    event: int


class Await(NamedTuple):
    """Wait until an event was counted up so often."""

    event: int
    times: int


class Began(NamedTuple):
    """A lane has begun with a program that was forked; observers are told."""

    key: Key


class Ended(NamedTuple):
    """A lane has ended such a program."""

    key: Key


Done = Action | Began | Ended | Signal | Await


class Clock(Protocol):
    """What links see of the loop."""

    now_ns: int

    def at(self, when_ns: int, call: Callable[..., None], *arguments: Any) -> None:
        """Call something at a time."""
        ...


class Links(Protocol):
    """What carries messages, as formulas that are sources of events."""

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Let a message of `size` bytes leave now; call `deliver` when its last byte is there."""
        ...


class TakingLinks(Links, Protocol):
    """Links that a message crosses when its receiver asks for it."""

    def take(self, clock: Clock, target: int, size: int, came_ns: int, deliver: Callable[[], None]) -> None:
        """The receiver asks for a message that came then; call `deliver` when it has it."""
        ...


class NoLinks:
    """Messages take no time."""

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Deliver at once."""
        deliver()


class NodeLane:
    """What one node does in order. Forked programs have lanes of their own."""

    __slots__ = ("began_ns", "doing", "name", "node", "number", "programs", "step", "waking_ns")

    def __init__(self, node: int, name: str, number: int) -> None:
        self.node, self.name, self.number = node, name, number
        self.programs: deque[tuple[Key | None, Program, int]] = deque()
        """What it runs and is to run: how it is called, the program, the step that forked it."""
        self.doing: Any = None
        self.began_ns = self.waking_ns = self.step = 0


class Observer(Protocol):
    """Is told of what ends, in the order in which it ends."""

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note that a lane has ended an action (`Done`), and what the program got for it."""
        ...


Cost = Callable[[int, Action], int | None]
"""How many ns a node takes for Work, Encode, Decode; None: no time, and nothing to note. For Receive: how much longer
the next of these takes after a long wait (`waking`)."""
MayGoOn = Callable[[int, int], bool | None]
"""By place and step: whether the job goes on after it, as `EndStep` returns it."""


class TimingDecidesError(UserError):
    """What a job computes depends on when messages arrive, and time stands still."""


class StuckError(SpecError):
    """Lanes wait for what never comes."""

    def __init__(self, message: str, lanes: Sequence[NodeLane]) -> None:
        super().__init__(message)
        self.lanes = lanes


class Loop:
    """One run of a job. Its `now_ns` is the time since the job began."""

    def __init__(
        self,
        programs: Iterable[Program],
        nodes: Sequence[Node],
        *,
        cost: Cost | None = None,
        links: Links | None = None,
        observers: Sequence[Observer] = (),
        goes_on: MayGoOn = lambda place, step: True,
    ) -> None:
        """`programs` and `nodes`: by place. `cost` and `links`: None, for no time at all."""
        self.now_ns = 0
        self._nodes, self._observers, self._goes_on = nodes, observers, goes_on
        self._places = tuple(range(len(nodes)))
        self._cost, self._links, self._timed = cost, links or NoLinks(), cost is not None or links is not None
        self._queue: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._lanes: dict[tuple[int, str], NodeLane] = {}
        self._mail: list[dict[tuple[int, Key], Message]] = [{} for _ in nodes]
        """By place: what has arrived and was not asked for yet, by sender and key, in the order of arrival."""
        self._asking: list[dict[tuple[int, Key], NodeLane]] = [{} for _ in nodes]
        self._collecting: dict[int, NodeLane] = {}
        self._met: dict[tuple[int, ...], dict[int, NodeLane]] = defaultdict(dict)
        """By who is to meet: who is there."""
        self._results: dict[tuple[int, Key, int | None], Any] = {}
        """What is done and can be waited for: by place, key, and the peer of a message."""
        self._waiting: dict[tuple[int, Key, int | None], NodeLane] = {}
        self._signals: dict[int, int] = defaultdict(int)
        self._awaiting: dict[int, list[NodeLane]] = defaultdict(list)
        self._returned: dict[int, Any] = {}
        self._asks: Callable[[Clock, int, int, int, Callable[[], None]], None] | None = getattr(links, "take", None)
        self._does: dict[type, Callable[[NodeLane, Any], Any]] = {
            actions.Work: self._work,
            actions.Encode: self._encode,
            actions.Decode: self._decode,
            actions.Send: self._send,
            actions.Receive: self._receive,
            actions.Begin: lambda lane, action: None,
            actions.EndStep: self._end_step,
            actions.Meet: self._meet,
            actions.Fork: self._fork,
            actions.Wait: self._wait,
            actions.Collect: self._collect,
            Signal: self._signal,
            Await: self._await,
        }
        for place, program in enumerate(programs):
            self.run_on(place, MAIN, program)

    def run_on(self, place: int, lane: str, program: Program) -> None:
        """Have a lane of a place run a program, when it has run what it was given before."""
        self._run_on(place, lane, None, program)

    def run(self) -> list[Any]:
        """Run to the end; returns what the programs returned, by place. StuckError where lanes wait for what never
        comes; what nodes raise, as it comes.
        """
        queue = self._queue
        while queue:
            self.now_ns, _, _, call, arguments = heapq.heappop(queue)
            call(*arguments)
        if stuck := [lane for lane in self._lanes.values() if lane.programs]:
            waits = "; ".join(f"node {lane.node} {lane.name}: {lane.doing}" for lane in stuck[:4])
            raise StuckError(f"{len(stuck)} lanes of the job wait for what never comes: {waits}", stuck)
        return [self._returned.get(place) for place in range(len(self._nodes))]

    @property
    def untaken(self) -> list[tuple[int, int, Key]]:
        """Messages that arrived and that no program asked for: to whom, from whom, and what."""
        return [(place, *of) for place, mail in enumerate(self._mail) for of in mail]

    def at(self, when_ns: int, call: Callable[..., None], *arguments: Any, order: int = _ARRIVALS) -> None:
        """Call something at a time, in the order of the module's docstring."""
        self._count += 1
        heapq.heappush(self._queue, (when_ns, order, self._count, call, arguments))

    # ------------------------------------------------------------------ lanes
    def _run_on(self, node: int, name: str, key: Key | None, program: Program, step: int = 0) -> None:
        lane = self._lanes.get((node, name))
        if lane is None:
            lane = self._lanes[node, name] = NodeLane(node, name, len(self._lanes))
        lane.programs.append((key, program, step))
        if len(lane.programs) == 1:
            self._begin(lane)

    def _begin(self, lane: NodeLane) -> None:
        key, _, step = lane.programs[0]
        if key is not None:
            lane.step = step
        lane.doing, lane.began_ns = None if key is None else Began(key), self.now_ns
        self.at(self.now_ns, self._go_on, lane, None, order=lane.number)

    def _later(self, lane: NodeLane, value: Any = None) -> None:
        """Let a lane that waited go on."""
        self.at(self.now_ns, self._go_on, lane, value, order=lane.number)

    def _go_on(self, lane: NodeLane, value: Any) -> None:
        """End what a lane is doing, and do all that takes no time, or during which nothing else happens."""
        key, program, _ = lane.programs[0]
        observers, does = self._observers, self._does
        while value is not _PENDING:
            if observers and lane.doing is not None:
                for observer in observers:
                    observer.did(lane, lane.doing, value, lane.began_ns, self.now_ns)
            try:
                action = lane.doing = program.send(value)
            except StopIteration as end:
                return self._end(lane, key, end.value)
            lane.began_ns = self.now_ns
            if (do := does.get(type(action))) is None:
                raise TypeError(f"node {lane.node} yielded {action!r}, which is no action")
            value = do(lane, action)
        return None

    def _end(self, lane: NodeLane, key: Key | None, value: Any) -> None:
        lane.programs.popleft()
        if key is None:
            self._returned[lane.node] = value
        else:
            for observer in self._observers:
                observer.did(lane, Ended(key), value, self.now_ns, self.now_ns)
            self._finish(lane.node, key, None, value)
        if lane.programs:
            self._begin(lane)

    # ------------------------------------------------------------------ actions: each returns what it returns, or
    # _PENDING where it takes time
    def _work(self, lane: NodeLane, action: actions.Work) -> Any:
        return self._spend(lane, action, self._nodes[lane.node].work(*action))

    def _encode(self, lane: NodeLane, action: actions.Encode) -> Any:
        payload, raw_bytes, choice = self._nodes[lane.node].encode(action.key, action.value)
        return self._spend(lane, action, Message(action.key, payload, raw_bytes=raw_bytes, choice=choice))

    def _decode(self, lane: NodeLane, action: actions.Decode) -> Any:
        return self._spend(lane, action, self._nodes[lane.node].decode(action.messages))

    def _spend(self, lane: NodeLane, action: Action, value: Any) -> Any:
        """Let a lane be busy for as long as an action costs."""
        took_ns = (self._cost(lane.node, action) or 0) if self._cost is not None else 0
        took_ns += lane.waking_ns
        lane.waking_ns = 0
        if not took_ns:
            return value
        later_ns = self.now_ns + took_ns
        if not self._queue or self._queue[0][0] > later_ns:
            self.now_ns = later_ns
            return value
        self.at(later_ns, self._go_on, lane, value, order=lane.number)
        return _PENDING

    def _end_step(self, lane: NodeLane, action: actions.EndStep) -> bool | None:
        if action.phase == "train":
            lane.step = action.number + 1
        return self._goes_on(lane.node, action.number)

    def _fork(self, lane: NodeLane, action: actions.Fork) -> None:
        self._run_on(lane.node, action.lane, action.key, action.program, lane.step)

    def _wait(self, lane: NodeLane, action: actions.Wait) -> Any:
        done = (lane.node, action.key, action.peer)
        if done in self._results:
            return self._results.pop(done)
        self._waiting[done] = lane
        return _PENDING

    def _signal(self, lane: NodeLane, action: Signal) -> None:
        self._signals[action.event] += 1
        for other in self._awaiting.pop(action.event, ()):
            if self._signals[action.event] >= other.doing.times:
                self._later(other)
            else:
                self._awaiting[action.event].append(other)

    def _await(self, lane: NodeLane, action: Await) -> Any:
        if self._signals[action.event] >= action.times:
            return None
        self._awaiting[action.event].append(lane)
        return _PENDING

    def _meet(self, lane: NodeLane, action: actions.Meet) -> Any:
        places = self._places if action.places is None else action.places
        there = self._met[places]
        there[lane.node] = lane
        if len(there) < len(places):
            return _PENDING
        del self._met[places]
        values = [there[place].doing.value for place in places]
        for place in places:
            self._later(there[place], values)
        return _PENDING

    def _finish(self, node: int, key: Key, peer: int | None, value: Any = None) -> None:
        """Note that something is done that can be waited for."""
        if (lane := self._waiting.pop((node, key, peer), None)) is not None:
            self._later(lane, value)
        else:
            self._results[node, key, peer] = value

    # ------------------------------------------------------------------ messages
    def _send(self, lane: NodeLane, action: actions.Send) -> None:
        (key, payload, _, raw_bytes, choice, *_), peer, note, awaited = action
        # Made anew, which costs half of what _replace does.
        sent = Message(key, payload, lane.node, raw_bytes, choice, note, self.now_ns)
        size = len(payload) + len(note)
        self._links.carry(self, lane.node, peer, size, lambda: self._arrive(peer, sent, awaited=awaited))

    def _arrive(self, node: int, sent: Message, *, awaited: bool) -> None:
        key, payload, source, raw_bytes, choice, note, first_byte_ns, *_ = sent
        message = Message(key, payload, source, raw_bytes, choice, note, first_byte_ns, self.now_ns)
        if awaited:
            self._finish(source, key, node)
        asked = (source, key)
        if (lane := self._asking[node].pop(asked, None)) is not None:
            self._take(lane, message)
            return
        self._mail[node][asked] = message
        if (lane := self._collecting.get(node)) is not None:
            self._try_collecting(lane)

    def _receive(self, lane: NodeLane, action: actions.Receive) -> Any:
        asked = (action.peer, action.key)
        message = self._mail[lane.node].pop(asked, None)
        if message is None:
            self._asking[lane.node][asked] = lane
        elif self._asks is None:
            return message
        else:
            self._take(lane, message)
        return _PENDING

    def _take(self, lane: NodeLane, message: Message) -> None:
        if self._asks is None:
            return self._received(lane, message)
        size = len(message.payload) + len(message.note)
        return self._asks(self, lane.node, size, message.last_byte_ns, lambda: self._received(lane, message))

    def _received(self, lane: NodeLane, message: Message) -> None:
        waited_ns = self.now_ns - lane.began_ns
        if waited_ns and self._cost is not None and (most_ns := self._cost(lane.node, lane.doing)):
            lane.waking_ns = waking_ns(most_ns, waited_ns)
        self._later(lane, message)

    def _collect(self, lane: NodeLane, action: actions.Collect) -> Any:
        if not self._timed:
            raise TimingDecidesError(
                f"node {lane.node} takes messages as they arrive, so the network takes part in the maths and the job "
                'cannot be run without one; run it with timing = "live"'
            )
        self._collecting[lane.node] = lane
        self.at(max(self.now_ns, action.until_ns), self._try_collecting, lane, order=_DEADLINES)
        return _PENDING

    def _try_collecting(self, lane: NodeLane) -> None:
        """End a Collect whose time has come and whose messages are there."""
        if self._collecting.get(lane.node) is not lane:
            return
        action, mail = lane.doing, self._mail[lane.node]
        there = [asked for asked in mail if asked[0] in action.peers]
        if len(there) < action.at_least or self.now_ns < action.until_ns:
            return
        # What else arrives in this nanosecond has arrived, too.
        del self._collecting[lane.node]
        self.at(self.now_ns, self._end_collecting, lane, order=_DEADLINES)

    def _end_collecting(self, lane: NodeLane) -> None:
        mail = self._mail[lane.node]
        there = [asked for asked in mail if asked[0] in lane.doing.peers]
        self._go_on(lane, [mail.pop(asked) for asked in there])
