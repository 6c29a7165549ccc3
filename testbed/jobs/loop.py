"""Run all places of a job in one process, an event at a time; the clock is a number.

Four parts define a run. `nodes` do maths, know sizes, or replay a recording. `cost` gives the duration of each action,
and `links` the arrival time of each message; without both, time stands still. `observers` see every action that ends,
to make a trace, records or figures.

Events of the same nanosecond happen in this order: messages arrive, lanes resume (by number), deadlines expire.
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
"""The lane that runs a place's main program."""


class Signal(NamedTuple):
    """Increment an event's count. A replayed trace (`trace.simulate.replay`) uses it in place of Meet, Fork and
    Wait.
    """

    event: int


class Await(NamedTuple):
    """Wait until an event's count reaches a value."""

    event: int
    times: int


class Began(NamedTuple):
    """Tells observers that a lane has started a forked program."""

    key: Key


class Ended(NamedTuple):
    """Tells observers that a lane has ended a forked program."""

    key: Key


Done = Action | Began | Ended | Signal | Await


class Clock(Protocol):
    """The part of the loop that links may use."""

    now_ns: int

    def at(self, when_ns: int, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function at a given time."""
        ...


class Links(Protocol):
    """Carries messages; a formula that schedules their arrivals."""

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Send a message of `size` bytes now; call `deliver` when its last byte arrives."""
        ...


class TakingLinks(Links, Protocol):
    """Links that a message crosses once its receiver asks for it."""

    def take(self, clock: Clock, target: int, size: int, came_ns: int, deliver: Callable[[], None]) -> None:
        """Transfer a message that arrived at `came_ns` to the receiver that asks for it; then call `deliver`."""
        ...


class NoLinks:
    """Links that take no time."""

    def carry(self, clock: Clock, source: int, target: int, size: int, deliver: Callable[[], None]) -> None:
        """Deliver at once."""
        deliver()


class NodeLane:
    """The programs of one node that run one after another. Forked programs may use other lanes."""

    __slots__ = ("began_ns", "doing", "name", "node", "number", "programs", "step", "waking_ns")

    def __init__(self, node: int, name: str, number: int) -> None:
        self.node, self.name, self.number = node, name, number
        self.programs: deque[tuple[Key | None, Program, int]] = deque()
        """Current and queued programs, each with its key and the step that forked it."""
        self.doing: Any = None
        self.began_ns = self.waking_ns = self.step = 0


class Observer(Protocol):
    """Sees actions in the order in which they end."""

    def did(self, lane: NodeLane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Note that a lane has ended an action (`Done`), with the value returned to the program."""
        ...


Cost = Callable[[int, Action], int | None]
"""Duration in ns of a Work, Encode or Decode; None: no time, and not recorded. For Receive: the extra duration of the
next of these after a long wait (`waking`)."""
MayGoOn = Callable[[int, int], bool | None]
"""By place and step: the value of `EndStep`, whether the job continues."""


class Pause(Protocol):
    """Stops all places at the end of a step, once nothing is on the way any more."""

    def due(self, step: int) -> bool:
        """Return whether to pause before this step."""
        ...

    def paused(self, step: int, resting: Resting) -> None:
        """Do something while all places pause."""
        ...


class Resting(NamedTuple):
    """What lies outside nodes while all places pause, and outlives the step."""

    mail: Sequence[Sequence[tuple[int, Message]]]
    """By place: messages that arrived but have not been received, with their senders, in order of arrival."""
    results: Sequence[tuple[int, Key, int | None, Any]]
    """What a `Wait` can still return: place, key, the peer of a message, and the result."""


class TimingDecidesError(UserError):
    """The job's results depend on arrival times, but the run has no time."""


class StuckError(SpecError):
    """Lanes wait for an event that never happens."""

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
        pause: Pause | None = None,
        resting: Resting | None = None,
    ) -> None:
        """`programs` and `nodes` are by place. Without `cost` and `links` (None) nothing takes time. `resting`: what
        lay there before the programs' first step.
        """
        self.now_ns = 0
        self._nodes, self._observers, self._goes_on = nodes, observers, goes_on
        self._places = tuple(range(len(nodes)))
        self._cost, self._links, self._timed = cost, links or NoLinks(), cost is not None or links is not None
        self._queue: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._lanes: dict[tuple[int, str], NodeLane] = {}
        self._mail: list[dict[tuple[int, Key], Message]] = [{} for _ in nodes]
        """By place: messages that arrived but have not been received, by sender and key, in order of arrival."""
        self._asking: list[dict[tuple[int, Key], NodeLane]] = [{} for _ in nodes]
        self._collecting: dict[int, NodeLane] = {}
        self._met: dict[tuple[int, ...], dict[int, NodeLane]] = defaultdict(dict)
        """By the places of a barrier: the lanes that have reached it."""
        self._results: dict[tuple[int, Key, int | None], Any] = {}
        """Results that a `Wait` can return: by place, key, and the peer of a message."""
        self._pause, self._pausing = pause, list[tuple[NodeLane, int, bool | None]]()
        if resting is not None:
            self._mail = [{(source, each.key): each for source, each in mail} for mail in resting.mail]
            self._results = {tuple(of): result for *of, result in resting.results}  # type: ignore[misc]
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
        """Queue a program on a lane of a place."""
        self._run_on(place, lane, None, program)

    def run(self) -> list[Any]:
        """Run to the end; returns the programs' results, by place. StuckError if lanes wait forever; exceptions of
        nodes pass through.
        """
        queue = self._queue
        while queue or self._paused():
            self.now_ns, _, _, call, arguments = heapq.heappop(queue)
            call(*arguments)
        if stuck := [lane for lane in self._lanes.values() if lane.programs]:
            waits = "; ".join(f"node {lane.node} {lane.name}: {lane.doing}" for lane in stuck[:4])
            raise StuckError(f"{len(stuck)} lanes of the job wait for events that never happen: {waits}", stuck)
        return [self._returned.get(place) for place in range(len(self._nodes))]

    @property
    def untaken(self) -> list[tuple[int, int, Key]]:
        """Messages that no program received: receiver, sender and key."""
        return [(place, *of) for place, mail in enumerate(self._mail) for of in mail]

    def at(self, when_ns: int, call: Callable[..., None], *arguments: Any, order: int = _ARRIVALS) -> None:
        """Call a function at a given time, ordered as in the module's docstring."""
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
        """Resume a waiting lane."""
        self.at(self.now_ns, self._go_on, lane, value, order=lane.number)

    def _go_on(self, lane: NodeLane, value: Any) -> None:
        """End a lane's current action, and run on while actions take no time or nothing else can happen."""
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
                raise TypeError(f"the program of node {lane.node} yielded {action!r}, which is not an action")
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

    # ------------------------------------------------------------------ actions: each returns its result, or _PENDING
    # if it takes time
    def _work(self, lane: NodeLane, action: actions.Work) -> Any:
        return self._spend(lane, action, self._nodes[lane.node].work(*action))

    def _encode(self, lane: NodeLane, action: actions.Encode) -> Any:
        payload, raw_bytes, choice = self._nodes[lane.node].encode(action.key, action.value)
        return self._spend(lane, action, Message(action.key, payload, raw_bytes=raw_bytes, choice=choice))

    def _decode(self, lane: NodeLane, action: actions.Decode) -> Any:
        return self._spend(lane, action, self._nodes[lane.node].decode(action.messages))

    def _spend(self, lane: NodeLane, action: Action, value: Any) -> Any:
        """Keep a lane busy for the duration of an action."""
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

    def _end_step(self, lane: NodeLane, action: actions.EndStep) -> Any:
        if action.phase == "train":
            lane.step = action.number + 1
        goes_on = self._goes_on(lane.node, action.number)
        if self._pause is None or not goes_on or action.phase != "train" or not self._pause.due(lane.step):
            return goes_on
        for observer in self._observers:
            observer.did(lane, action, goes_on, lane.began_ns, self.now_ns)
        lane.doing = None  # observed
        self._pausing.append((lane, lane.step, goes_on))
        return _PENDING

    def _paused(self) -> bool:
        """Let all go on that pause, if any. SpecError if others do not come to rest, or pause before another step."""
        if (pause := self._pause) is None or not (pausing := self._pausing):
            return False
        step = pausing[0][1]
        lanes = [lane for lane, _, _ in pausing]
        busy = [each.doing for each in self._lanes.values() if each.programs and each not in lanes]
        if busy or len(pausing) < len(self._nodes) or any(each != step for _, each, _ in pausing):
            raise SpecError(
                f"cannot pause all places before step {step} for a checkpoint: {len(lanes)} of {len(self._nodes)} wait "
                f"there, others for {busy[:2] or 'another step'}; remove training.checkpoint_every"
            )
        mail = [[(source, message) for (source, _), message in each.items()] for each in self._mail]
        pause.paused(step, Resting(mail, [(*of, result) for of, result in self._results.items()]))
        self._pausing = []
        for lane, _, goes_on in pausing:
            self._later(lane, goes_on)
        return True

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
        """Store a result and resume the lane that waits for it."""
        if (lane := self._waiting.pop((node, key, peer), None)) is not None:
            self._later(lane, value)
        else:
            self._results[node, key, peer] = value

    # ------------------------------------------------------------------ messages
    def _send(self, lane: NodeLane, action: actions.Send) -> None:
        (key, payload, _, raw_bytes, choice, *_), peer, note, awaited = action
        # Constructed directly, at half the cost of _replace.
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
                f"node {lane.node} collects messages as they arrive, so its results depend on the network; run "
                'the job with timing = "live"'
            )
        self._collecting[lane.node] = lane
        self.at(max(self.now_ns, action.until_ns), self._try_collecting, lane, order=_DEADLINES)
        return _PENDING

    def _try_collecting(self, lane: NodeLane) -> None:
        """End a Collect whose time and number of messages have been reached."""
        if self._collecting.get(lane.node) is not lane:
            return
        action, mail = lane.doing, self._mail[lane.node]
        there = [asked for asked in mail if asked[0] in action.peers]
        if len(there) < action.at_least or self.now_ns < action.until_ns:
            return
        if action.grace_ns and len(there) < len(action.peers):
            ends_ns = mail[there[action.at_least - 1]].last_byte_ns + action.grace_ns
            if self.now_ns < ends_ns:
                self.at(ends_ns, self._try_collecting, lane, order=_DEADLINES)
                return
        # Later arrivals of this nanosecond count, too.
        del self._collecting[lane.node]
        self.at(self.now_ns, self._end_collecting, lane, order=_DEADLINES)

    def _end_collecting(self, lane: NodeLane) -> None:
        mail = self._mail[lane.node]
        there = [asked for asked in mail if asked[0] in lane.doing.peers]
        self._go_on(lane, [mail.pop(asked) for asked in there])
