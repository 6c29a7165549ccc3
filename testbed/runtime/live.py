"""Run the program of one place over sockets: in real time, or on the virtual clock. Independent of the kind of job; no
torch.

A lane is a thread; forked programs run one after another on the lane that they name. The lanes' `pacing.Line`s
determine durations; messages go through `transport.Connection`s and leave when they are ready by the line's time;
places meet over `gather`, which crosses no link. A lost connection raises at the action that needs it.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from testbed.errors import SpecError, TransportError
from testbed.jobs import actions
from testbed.jobs.actions import Key, Message, Node, Program
from testbed.jobs.loop import MAIN, Began, Ended, NodeLane, Observer
from testbed.runtime.carried import least_round_trip_ns
from testbed.runtime.ending import Ending
from testbed.runtime.gather import Gather
from testbed.runtime.pacing import Line
from testbed.runtime.transport import Arrival, Connection


class _WaitingProgram(NamedTuple):
    """A program queued for its lane."""

    key: Key
    program: Program
    step: int
    at_ns: int


class _Lane(NodeLane):
    """A lane, its time, and its queue of programs."""

    def __init__(self, node: int, name: str, number: int, line: Line) -> None:
        super().__init__(node, name, number)
        self.line = line
        self.sent: tuple[int, int] | None = None
        """The receiver of its last message, and the earliest time at which that may leave."""
        self.given: SimpleQueue[_WaitingProgram | None] = SimpleQueue()


class PlaceResting(NamedTuple):
    """What lies outside a place's node while all places pause, and outlives the step."""

    mail: Sequence[tuple[int, Key, Any, bytes]]
    """Messages that arrived but have not been received, in order of arrival: sender, key, payload and note."""
    results: Sequence[tuple[Key, Any]]
    """What a `Wait` can still return: key and result."""


class PlacePause(Protocol):
    """Stops a place at the end of a step, with all others, once nothing is on the way any more."""

    def due(self, step: int) -> bool:
        """Return whether to pause before this step."""
        ...

    def begin(self, step: int) -> None:
        """Prepare a checkpoint; all places save theirs once all are here."""
        ...

    def save(self, step: int, resting: PlaceResting) -> None:
        """Save this place's part."""
        ...

    def finish(self, step: int) -> None:
        """Complete the checkpoint: all places have saved theirs."""
        ...


class Live:
    """One place of a running job."""

    def __init__(
        self,
        place: int,
        node: Node,
        peers: MutableMapping[int, Connection],
        *,
        gather: Gather,
        ending: Ending,
        line: Callable[[], Line],
        timeout_s: float,
        observers: Sequence[Observer] = (),
        pause: PlacePause | None = None,
        resting: PlaceResting | None = None,
        computed: Callable[[], None] = lambda: None,
    ) -> None:
        """`peers`: connections, by place; connections to lost places that the program can do without are removed.
        `line` makes a lane's time. `timeout_s`: the longest wait for one message. `resting`: what lay here before the
        program's first step. `computed` waits until what the node began is done, so that times are those of the work.
        """
        self._place, self._node, self._peers = place, node, peers
        self._gather, self._ending, self._timeout_s, self._observers = gather, ending, timeout_s, observers
        self._line, self._computed = line, computed
        self._pause, self._resting = pause, resting or PlaceResting((), ())
        self._main = _Lane(place, MAIN, 0, line())
        self._lanes: dict[str, tuple[_Lane, threading.Thread]] = {}
        self._forked: dict[Key, Future[tuple[Any, int]]] = {}
        """Forks that have not been waited for: the result, and the line's time at the end."""
        self._broken: BaseException | None = None
        """An exception on another lane."""
        self._telling = threading.Lock()
        self._heard = threading.Condition()
        self._began_ns = 0
        self._does: Mapping[type, Callable[[_Lane, Any], Any]] = {
            actions.Begin: self._begin,
            actions.Work: self._work,
            actions.Encode: self._encode,
            actions.Decode: self._decode,
            actions.Send: self._send,
            actions.Receive: self._receive,
            actions.Collect: self._collect,
            actions.Fork: self._fork,
            actions.Wait: self._wait,
            actions.Meet: self._meet,
            actions.EndStep: self._end_step,
        }

    def run(self, program: Program) -> Any:
        """Run the program once all places are ready; returns its result.

        TransportError for a missing message; exceptions of node and program pass through. The caller must then abort
        the connections, which ends lanes that wait for them.
        """
        for connection in self._peers.values():
            connection.heard = self._hear
        self._main.line.came(self._main.line.now())
        self._meet(self._main, actions.Meet())
        self._began_ns = self._main.line.at_ns
        for key, result in self._resting.results:
            self._forked[key] = Future()
            self._forked[key].set_result((result, self._began_ns))
        for peer, key, payload, note in self._resting.mail:
            self._peer(peer).put_back(key, payload, note, self._began_ns)
        try:
            value = self._go_through(self._main, program)
        except TransportError:
            if self._broken is not None:
                raise self._broken from None
            raise
        finally:
            for lane, _ in self._lanes.values():
                lane.given.put(None)
        for _, thread in self._lanes.values():
            thread.join()
        return value

    def _go_through(self, lane: _Lane, program: Program) -> Any:
        value: Any = None
        lost: TransportError | None = None
        while True:
            try:
                action = program.send(value) if lost is None else program.throw(lost)
            except StopIteration as end:
                return end.value
            if lost is not None:
                self._go_on_without(lost)
            begin_ns, value, lost = lane.line.recorded_ns, None, None
            try:
                value = self._does[type(action)](lane, action)
            except TransportError as error:
                lost = error
            else:
                if type(action) is not actions.Fork:  # observers saw the fork before its lane started
                    self._tell(lane, action, value, begin_ns)
                if self._pause is not None and type(action) is actions.EndStep and value and action.phase == "train":
                    self._rest(self._pause, lane)

    def _go_on_without(self, lost: TransportError) -> None:
        sys.stdout.write(f"place {self._place} continues without a peer: {lost}\n")
        if lost.peer is not None:
            self._peers.pop(lost.peer, None)

    def _tell(self, lane: _Lane, action: Any, value: Any, begin_ns: int) -> None:
        end_ns = lane.line.recorded_ns
        with self._telling:
            for observer in self._observers:
                observer.did(lane, action, value, begin_ns, end_ns)

    # ------------------------------------------------------------------ work of the node
    def _begin(self, lane: _Lane, action: actions.Begin) -> None:
        lane.line.begin(action.kind is not None)

    def _work(self, lane: _Lane, action: actions.Work) -> Any:
        return self._spend(lane, action, lambda: self._node.work(*action))

    def _encode(self, lane: _Lane, action: actions.Encode) -> Message:
        made = self._spend(lane, action, lambda: self._node.encode(action.key, action.value))
        return Message(action.key, made.payload, raw_bytes=made.raw_bytes, choice=made.choice)

    def _decode(self, lane: _Lane, action: actions.Decode) -> Any:
        return self._spend(lane, action, lambda: self._node.decode(action.messages))

    def _spend(
        self, lane: _Lane, action: actions.Work | actions.Encode | actions.Decode, maths: Callable[[], Any]
    ) -> Any:
        began_ns = lane.line.now()
        value = maths()
        self._computed()
        if (paced := lane.line.spent(action, began_ns)) is not None:
            self._tell(lane, paced, None, lane.line.recorded_ns)
        return value

    # ------------------------------------------------------------------ messages
    def _send(self, lane: _Lane, action: actions.Send) -> None:
        if action.awaited:
            raise SpecError("cannot run live a job that waits for the delivery of its messages; play it")
        message, peer, note, _ = action
        payload: Any = message.payload
        free_ns = lane.line.free_ns
        if lane.sent is not None and peer != lane.sent[0] and free_ns == lane.sent[1]:
            lane.line.wait()  # two connections holding messages until the same moment would race
        lane.sent = peer, free_ns
        connection = self._peer(peer)
        try:
            connection.send(message.key, payload, note=note, not_before_ns=free_ns)
        except TransportError as error:
            raise _lost(peer, error) from error

    def _receive(self, lane: _Lane, action: actions.Receive) -> Message:
        message = self._take(action.key, action.peer)
        lane.line.came(message.last_byte_ns)
        return message

    def _peer(self, peer: int) -> Connection:
        if peer not in self._peers:
            raise SpecError(f"place {self._place} has no connection to place {peer}, only to {list(self._peers)}")
        return self._peers[peer]

    def _take(self, key: Key, peer: int) -> Message:
        connection = self._peer(peer)
        try:
            arrival: Arrival = connection.take(key, self._timeout_s)
        except TransportError as error:
            raise _lost(peer, error) from error
        return Message(
            key,
            arrival.value,
            peer,
            note=arrival.note,
            first_byte_ns=arrival.first_byte_ns,
            last_byte_ns=arrival.last_byte_ns,
            round_trip_ns=least_round_trip_ns(connection.socket),
        )

    def _collect(self, lane: _Lane, action: actions.Collect) -> Sequence[Message]:
        """Take the messages received by that time, in order of arrival, independent of which thread woke up
        first.
        """
        lane.line.wait()
        until_ns = self._began_ns + action.until_ns
        deadline_ns = time.monotonic_ns() + round(1e9 * self._timeout_s)
        with self._heard:
            while True:
                there = self._there(action.peers)
                times = sorted(there.values())
                due_ns = max(lane.line.at_ns, until_ns, *times[: action.at_least])
                if action.grace_ns and len(times) >= action.at_least:
                    every = len(action.peers)
                    due_ns = max(due_ns, min([times[action.at_least - 1] + action.grace_ns, *times[every - 1 : every]]))
                now_ns = time.monotonic_ns()
                if len(there) >= action.at_least and now_ns >= due_ns:
                    break
                if now_ns >= max(deadline_ns, until_ns, due_ns):
                    raise TransportError(
                        f"no message from any of the {len(action.peers)} remaining places within {self._timeout_s:g} s"
                    )
                self._heard.wait(((due_ns if now_ns < due_ns else max(deadline_ns, until_ns)) - now_ns) * 1e-9)
        # Look again: more may have arrived since.
        taken = sorted((at_ns, *asked) for asked, at_ns in self._there(action.peers).items() if at_ns <= due_ns)
        lane.line.came(due_ns)
        return [self._take(key, peer) for _, peer, key in taken]

    def _there(self, peers: Sequence[int]) -> dict[tuple[int, Key], int]:
        """Return the messages that have arrived, with their times."""
        arrived: dict[tuple[int, Key], int] = {}
        for peer in peers:
            try:
                arrived |= {(peer, key): at_ns for key, at_ns in self._peers[peer].arrived().items()}
            except TransportError as error:
                raise _lost(peer, error) from error
        return arrived

    def _hear(self) -> None:
        with self._heard:
            self._heard.notify_all()

    # ------------------------------------------------------------------ lanes and other places
    def _fork(self, lane: _Lane, action: actions.Fork) -> None:
        if action.lane not in self._lanes:
            new = _Lane(self._place, action.lane, 1 + len(self._lanes), self._line())
            thread = threading.Thread(target=self._run_lane, args=(new,), name=action.lane, daemon=True)
            self._lanes[action.lane] = new, thread
            thread.start()
        self._forked[action.key] = Future()
        self._tell(lane, action, None, lane.line.recorded_ns)
        self._lanes[action.lane][0].given.put(_WaitingProgram(action.key, action.program, lane.step, lane.line.at_ns))

    def _run_lane(self, lane: _Lane) -> None:
        while (given := lane.given.get()) is not None:
            future, lane.step = self._forked[given.key], given.step
            try:
                lane.line.came(given.at_ns)
                self._tell(lane, Began(given.key), None, lane.line.recorded_ns)
                value = self._go_through(lane, given.program)
                self._tell(lane, Ended(given.key), value, lane.line.recorded_ns)
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, TransportError):  # the place may be waiting for a lost message
                    self._broken = self._broken or error
                    for connection in list(self._peers.values()):
                        connection.abort()
            else:
                future.set_result((value, lane.line.at_ns))

    def _wait(self, lane: _Lane, action: actions.Wait) -> Any:
        value, ended_ns = self._forked[action.key].result()
        del self._forked[action.key]
        lane.line.came(ended_ns)
        return value

    def _meet(self, lane: _Lane, action: actions.Meet) -> Sequence[Any]:
        if action.places is not None:
            raise SpecError("cannot run live a job in which only some places meet; play it")
        told = self._gather.exchange([lane.line.at_ns, self._ending.tell(), action.value])
        line_ns = max(line_ns for line_ns, _, _ in told)
        lane.line.met(line_ns)
        self._ending.met(line_ns, [words for _, words, _ in told])
        return [value for _, _, value in told]

    def _end_step(self, lane: _Lane, action: actions.EndStep) -> Any:
        lane.step = action.number + 1
        lane.line.came(lane.line.at_ns)
        return self._ending.goes_on(action.number, action.phase, lane.line.recorded_ns)

    def _rest(self, pause: PlacePause, lane: _Lane) -> None:
        """Save a checkpoint with all other places, if one is due, once nothing is on the way any more. It belongs to no
        step: the next one begins when all have saved theirs. SpecError where they pause before different steps.
        """
        if not pause.due(lane.step):
            return
        results = [(key, future.result()[0]) for key, future in self._forked.items()]
        pause.begin(lane.step)
        counts = {str(peer): connection.sent_count for peer, connection in self._peers.items()}
        sent = self._gather.exchange({"step": lane.step, **counts})
        if steps := {each["step"] for each in sent} - {lane.step}:
            raise SpecError(
                f"cannot pause all places for a checkpoint: place {self._place} pauses before step {lane.step}, others "
                f"before {min(steps)}; remove training.checkpoint_every"
            )
        mail = [
            (peer, arrival.key, arrival.payload, arrival.note)
            for peer, connection in self._peers.items()
            for arrival in connection.unread(sent[peer][str(self._place)], self._timeout_s)
        ]
        pause.save(lane.step, PlaceResting(mail, results))
        self._gather.exchange(None)
        pause.finish(lane.step)
        lane.line.met(max(self._gather.exchange(max(lane.line.at_ns, time.monotonic_ns()))))


def _lost(peer: int, error: TransportError) -> TransportError:
    lost = TransportError(str(error))
    lost.peer = peer
    return lost
