"""Makes a trace of an observed job (observations.py): each rank's computing, messages and waits, as with gloo.

A rank has a lane for its program, and for each of its groups lanes that reproduce gloo's two threads: they take the
group's collectives in order and exchange their messages (gloo.py). The thread of a collective is not observed; it is
assigned to the one that would be free first if both sent in turn. A message is sent in a lane of its channel as soon as
its sender has posted it and the receiver's 48 bytes have arrived, in parallel to its sender's other actions.

The program works between logged lines, minus the time for which it was blocked. A collective whose wait was not
observed, because DistributedDataParallel's reducer waits in C++, is waited for at the end of the backward pass or, if
no modules were logged, in the gap between two lines in which it ended.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Final, NamedTuple

from testbed.errors import SpecError
from testbed.trace import gloo
from testbed.trace.check import check_trace
from testbed.trace.format import RECEIVE, SEND, SIGNAL, WAIT, WORK, Lane, Trace
from testbed.trace.gloo import PREAMBLE_BYTES, GlooCall
from testbed.trace.observations import MESSAGES, Line, ObservedRank

_THREADS: Final = 2
"""Number of threads of each of gloo's process groups."""
_POST_ANY: Final = -1
"""Be ready to receive from any rank: the sender is notified once it has announced a message."""


class _Channel(NamedTuple):
    """Distinguishes the messages of an operation; those with the same ends are received in the order of sending."""

    group: str
    key: Hashable
    lane: str
    """The lane that sends them."""
    members: tuple[int, ...]


def join(job: Sequence[ObservedRank]) -> Trace:
    """Make the trace. SpecError if ranks have marked different steps, if a message was observed at one end only, for
    operations whose messages are unknown, and for a job with codecs.
    """
    if any(rank.lowest_level for rank in job):
        raise SpecError(
            "the job was coded, so its messages are those of codecs, whose waits were not observed; observe it without "
            "--codec"
        )
    steps = {len(rank.steps) for rank in job}
    if len(steps) > 1:
        counts = ", ".join(f"rank {rank.rank}: {len(rank.steps)}" for rank in job)
        raise SpecError(f"the ranks have marked different numbers of steps: {counts}")
    joint = _Joint(job)
    for rank in job:
        _Program(joint, rank).run()
    trace = joint.trace(max(1, steps.pop()))
    check_trace(trace, "the job")
    return trace


class _LaneRow(NamedTuple):
    """An operation of a lane; its step and tag are determined when all ranks are known."""

    step: int | Hashable
    """Its number, or the key of the message or collective that determines it."""
    kind: int
    label: str
    peer: int = 0
    name: Hashable = 0
    """The name of the message or event."""
    value: int = 0


class _Joint:
    """The common part of all ranks' lanes."""

    def __init__(self, job: Sequence[ObservedRank]) -> None:
        self.job = job
        self.lanes: dict[tuple[int, str], list[_LaneRow]] = defaultdict(list)
        self.posted: dict[Hashable, int] = defaultdict(int)
        """The step in which the last participant of a message or collective posted it."""

    def post(self, key: Hashable, step: int) -> None:
        """Record that a participant has posted a message or collective."""
        self.posted[key] = max(self.posted[key], step)

    def trace(self, steps: int) -> Trace:
        """Number steps, labels and tags."""
        labels: dict[str, int] = {"work": 0}
        tags: dict[Hashable, int] = {}
        fresh: Counter[Hashable] = Counter()
        lanes = []
        for (rank, name), rows in self.lanes.items():
            lane = Lane(rank, name)
            for row in rows:
                step = row.step if isinstance(row.step, int) else self.posted[row.step]
                while len(lane.starts) <= step:
                    lane.end_step()
                space: Hashable = "events"
                if row.kind in (SEND, RECEIVE):
                    space = (rank, row.peer) if row.kind == SEND else (row.peer, rank)
                tag = 0
                if row.kind != WORK:
                    key = (space, row.name if space != "events" else (rank, row.name))
                    if key not in tags:
                        tags[key], fresh[space] = fresh[space], fresh[space] + 1
                    tag = tags[key]
                lane.add(row.kind, labels.setdefault(row.label, len(labels)), row.peer, tag, row.value)
            lanes.append(lane)
        steps = max(steps, *(len(lane.starts) for lane in lanes))
        for lane in lanes:
            while len(lane.starts) <= steps:
                lane.end_step()
        names = tuple(f"rank {rank.rank}" for rank in self.job)
        return Trace(names, tuple(labels), tuple(lanes), {"from": "observed job"})


class _Program:
    """Walks through the log of one rank."""

    def __init__(self, joint: _Joint, rank: ObservedRank) -> None:
        level = rank.lowest_level
        operations = {line["number"] for line in rank.of("op") if line["level"] == level}
        waited = {line["number"] for line in rank.of("wait")}
        self._joint, self._rank, self._steps = joint, rank, set(rank.steps)
        self._lines = [line for line in rank.lines if _concerns(line, operations)]
        self._unseen = operations - waited
        self._marked = any(True for _ in rank.of("backward_end"))
        self._rows, self._step = joint.lanes[rank.rank, "program"], 0
        self._now = _moment(self._lines[0]) if self._lines else 0
        self._waits: dict[int, list[_LaneRow]] = {}
        """By the number of an operation, the rows that wait for it."""
        self._open: dict[int, int] = {}
        """When each pending collective ended whose wait was not observed."""
        self._counts: Counter[Hashable] = Counter()
        self._left: dict[str, list[deque[int]]] = {}
        """The sizes of the messages that each of a group's threads still has to send, if the network is slow."""
        self._done: dict[str, list[Hashable]] = defaultdict(list)

    def run(self) -> None:
        """Make the rank's lanes."""
        for line, following in zip(self._lines, [*self._lines[1:], None], strict=True):
            at = _moment(line)
            if not self._marked:
                self._wait_unseen(at)
            self._work(at)
            if line["kind"] == "op":
                self._begin(line)
                self._now = max(self._now, line["called"])
            elif line["kind"] == "wait":
                self._wait(line["number"])
                self._now = max(self._now, line["end"])
            elif line["kind"] == "backward_end":
                self._wait_unseen(_moment(following) if following else at)
            elif line["at"] in self._steps:
                self._step += 1
        for number in list(self._waits):
            self._wait(number)

    def _work(self, until: int) -> None:
        if until > self._now:
            self._rows.append(_LaneRow(self._step, WORK, "work", value=until - self._now))
            self._now = until

    def _wait(self, number: int) -> None:
        self._open.pop(number, None)
        self._rows += [row._replace(step=self._step) for row in self._waits.pop(number, ())]

    def _wait_unseen(self, until: int) -> None:
        """Wait for collectives that ended by then and whose wait was not observed; it took until their end."""
        for number, end in [item for item in self._open.items() if item[1] <= until]:
            self._wait(number)
            self._now = max(self._now, end)

    def _begin(self, line: Line) -> None:
        name, what = line["group"], line["what"]
        members = self._rank.groups[name]
        if what in MESSAGES:
            channel = _Channel(name, ("tag", line["tag"]), f"{name} tag {line['tag']}", members)
            self._message(line, channel)
            return
        made = gloo.calls(line, members.index(self._rank.rank), len(members))
        self._counts[name] += 1
        key = (name, self._counts[name])
        self._joint.post(key, self._step)
        channel = _Channel(name, key, "", members)
        if what == "monitored_barrier":  # the program itself sends and receives
            self._exchange(self._rows, made, channel._replace(lane=f"{name} monitored barrier"), what, self._step)
            return
        lane = (
            f"{name} thread {self._thread(name, [call.size for call in made if call.kind in (gloo.SEND, gloo.POST)])}"
        )
        rows = self._joint.lanes[self._rank.rank, lane]
        self._rows.append(_LaneRow(self._step, SIGNAL, what, name=(key, "begun")))
        rows.append(_LaneRow(key, WAIT, what, name=(key, "begun"), value=1))
        if what == "barrier":
            rows += [_LaneRow(key, WAIT, what, name=done, value=1) for done in self._done[name]]
        self._exchange(rows, made, channel._replace(lane=lane), what, key)
        rows.append(_LaneRow(key, SIGNAL, what, name=(key, "done")))
        self._done[name] = [*self._done[name], (key, "done")][-8:]
        self._waits[line["number"]] = [_LaneRow(0, WAIT, what, name=(key, "done"), value=1)]
        if line["number"] in self._unseen and line["end"] is not None:
            self._open[line["number"]] = line["end"]

    def _thread(self, group: str, messages: Iterable[int]) -> int:
        """Return the thread of a collective: one that is free, or would be first if both sent in turn."""
        awaited = {row.name for rows in self._waits.values() for row in rows}
        left = self._left.setdefault(group, [])
        if not left or not any(done in awaited for done in self._done[group]):
            left[:] = [deque() for _ in range(_THREADS)]
        while all(left):
            for queue in left:
                queue.popleft()
                if not queue:
                    break
        thread = next(number for number, queue in enumerate(left) if not queue)
        left[thread].extend(messages)
        return thread

    def _message(self, line: Line, channel: _Channel) -> None:
        if line["peer"] is None:
            raise SpecError(f"rank {self._rank.rank} did not wait for a message from any rank; its sender is unknown")
        kind, size = (gloo.SEND, line["bytes"]) if line["what"] == "send" else (gloo.POST, 0)
        if line["call"] == "recv_anysource":
            kind = _POST_ANY
        sink: list[_LaneRow] = []
        self._exchange(self._rows, [GlooCall(kind, line["peer"], size)], channel, line["what"], self._step, sink)
        self._waits[line["number"]] = sink

    def _exchange(
        self,
        rows: list[_LaneRow],
        made: Iterable[GlooCall],
        channel: _Channel,
        label: str,
        step: int | Hashable,
        left: list[_LaneRow] | None = None,
    ) -> None:
        """Add to a lane what gloo does for these calls. `left` receives the waits that the calls do not include."""
        waits: dict[tuple[int, int], deque[list[_LaneRow]]] = defaultdict(deque)
        own = self._rank.rank
        for call in made:
            peer = channel.members[call.peer]
            if call.kind in (gloo.AWAIT_SENT, gloo.AWAIT_RECEIVED):
                rows += waits[call.kind, peer].popleft()
                continue
            ends = (own, peer) if call.kind == gloo.SEND else (peer, own)
            place = (channel.group, channel.key, *ends)
            self._counts[place] += 1
            message = (place, self._counts[place])
            self._joint.post(message, self._step)
            # A message is sent, or requested, in parallel to its rank's other actions.
            beside = self._joint.lanes[own, f"{channel.lane} {'to' if call.kind == gloo.SEND else 'from'} rank {peer}"]
            at = step if not isinstance(step, int) else message
            posted = _LaneRow(step, SIGNAL, label, name=(message, "posted"))
            begun = _LaneRow(at, WAIT, label, name=(message, "posted"), value=1)
            opening = _LaneRow(step, RECEIVE, label, peer, (message, "opening"))
            ready = _LaneRow(step, SEND, label, peer, (message, "ready"), PREAMBLE_BYTES)
            payload = _LaneRow(step, RECEIVE, label, peer, (message, "payload"))
            if call.kind == gloo.SEND:
                rows += [_LaneRow(step, SEND, label, peer, (message, "opening"), PREAMBLE_BYTES), posted]
                beside += [
                    begun,
                    ready._replace(step=at, kind=RECEIVE, value=0),
                    payload._replace(step=at, kind=SEND, value=PREAMBLE_BYTES + call.size),
                    posted._replace(step=at, name=(message, "sent")),
                ]
                wait = (gloo.AWAIT_SENT, [_LaneRow(step, WAIT, label, name=(message, "sent"), value=1)])
            elif call.kind == _POST_ANY:
                rows.append(posted)
                beside += [begun, opening._replace(step=at), ready._replace(step=at)]
                wait = (gloo.AWAIT_RECEIVED, [payload])
            else:
                rows.append(ready)
                wait = (gloo.AWAIT_RECEIVED, [opening, payload])
            waits[wait[0], peer].append(wait[1])
        if left is not None:
            left += [row for queue in waits.values() for each in queue for row in each]


def _concerns(line: Line, operations: Container[int]) -> bool:
    """Return whether a line is about the program, or an operation of gloo for it."""
    return line["kind"] in ("step", "backward_end") or (line["kind"] in ("op", "wait") and line["number"] in operations)


def _moment(line: Line) -> int:
    return int(line["begin"] if "begin" in line else line["at"])
