"""What actions do over sockets, and that they do it at the emulated device's times."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from testbed.errors import TestbedError, TransportError
from testbed.jobs.actions import (
    Begin,
    Collect,
    Encode,
    Encoded,
    EndStep,
    Fork,
    Key,
    Meet,
    Message,
    Program,
    Receive,
    Send,
    Wait,
    Work,
)
from testbed.runtime.pacing import Takes
from tests.jobs.recording import Recording
from tests.over_loopback import PATIENCE_S, Ran, over_loopback

NAMES = ("data",)
MS = 1_000_000


class Bare:
    """A node that computes nothing."""

    def work(self, what: str, key: Key, value: Any) -> Any:
        return None

    def encode(self, key: Key, value: Any) -> Encoded:
        return Encoded(bytes(32))

    def decode(self, messages: Sequence[Message]) -> Sequence[None]:
        return [None] * len(messages)


class Jobs:
    """A job that is nothing but its programs."""

    def __init__(self, *programs: Callable[[], Program]) -> None:
        self.places = [f"node {number}" for number in range(len(programs))]
        self._programs = programs

    def program(self, place: int, first_step: int = 0) -> Program:
        return self._programs[place]()


def run(*programs: Callable[[], Program], **options: Any) -> tuple[Ran, list[Recording]]:
    recordings = [Recording() for _ in programs]
    ran = over_loopback(
        Jobs(*programs),
        [Bare()] * len(programs),
        names=NAMES,
        observers=recordings,
        **options,
    )
    return ran, recordings


def sender(peer: int, count: int, note: bytes = b"") -> Program:
    for number in range(count):
        yield Begin("L", number)
        yield Work("step", Key("step", number))
        message = yield Encode(Key("data", number), number)
        yield Send(message, peer, note=note)
    yield EndStep(0)


def held(ns: int) -> Callable[[int], Takes]:
    return lambda place: lambda action: ns if isinstance(action, Work) else 0


def test_work_lasts_as_long_as_stated_and_messages_leave_when_it_is_done() -> None:
    def receiver() -> Program:
        yield Begin("A", 0)
        for number in range(3):
            message = yield Receive(Key("data", number), 0)
        yield Work("step", Key("step", 0))
        return message

    ran, (sent, received) = run(lambda: sender(1, 3, b"a note"), receiver, takes=held(20 * MS), dilation=2)
    assert ran.errors == [None, None]
    ends = [end for *_, end in sent.of(Work)]
    assert [after - before for before, after in itertools.pairwise(ends)] == [20 * MS] * 2
    message = ran.returned[1]
    assert (message.key, message.source, message.note) == (Key("data", 2), 0, b"a note")
    assert message.round_trip_ns > 0
    assert ends[2] <= message.first_byte_ns <= message.last_byte_ns
    assert received.of(Work)[0][-1] == message.last_byte_ns + 20 * MS


def test_a_forked_program_goes_on_beside_the_place_and_takes_its_time_along() -> None:
    def forked(number: int) -> Program:
        message = yield Receive(Key("data", number), 0)
        return message.last_byte_ns

    def forking() -> Program:
        for number in range(3):
            yield Fork("other", Key("fork", number), forked(number))
        yield Begin("L", 0)
        yield Work("step", Key("step", 0))
        yield Begin("A", 0)
        came = []
        for number in range(3):
            came.append((yield Wait(Key("fork", number))))
        return came

    ran, (_, recorded) = run(lambda: sender(1, 3), forking, takes=held(15 * MS))
    assert ran.errors == [None, None]
    assert ran.returned[1] == sorted(ran.returned[1])
    assert [end for *_, end in recorded.of(Wait)] == ran.returned[1]


def test_a_place_computes_beside_what_it_has_forked() -> None:
    class Waiting(Bare):
        forked = threading.Event()

        def work(self, what: str, key: Key, value: Any) -> Any:
            if what == "forked":
                self.forked.set()
                return None
            return self.forked.wait(PATIENCE_S)

    def forked() -> Program:
        yield Work("forked", Key("forked", 0))

    def forking() -> Program:
        yield Fork("other", Key("fork", 0), forked())
        came = yield Work("own", Key("own", 0))
        yield Wait(Key("fork", 0))
        return came

    ran = over_loopback(Jobs(forking), [Waiting()], names=NAMES)
    assert ran.returned == [True]


def test_what_fails_on_another_lane_is_raised_where_it_is_waited_for() -> None:
    def forked() -> Program:
        yield Work("step", Key("step", 0))
        raise TestbedError("enough")

    def forking() -> Program:
        yield Fork("other", Key("fork", 0), forked())
        yield Wait(Key("fork", 0))

    ran, _ = run(forking)
    assert str(ran.errors[0]) == "enough"


def test_who_is_lost_is_raised_at_the_action_that_needs_it() -> None:
    def leaving() -> Program:
        yield Work("step", Key("step", 0))
        raise TestbedError("it has had enough")

    def patient() -> Program:
        try:
            yield Receive(Key("data", 0), 0)
        except TransportError as error:
            lost = error.peer
        message = yield Receive(Key("data", 0), 2)
        return lost, message.source

    def third() -> Program:
        yield Send((yield Encode(Key("data", 0), 1)), 1)

    ran, _ = run(leaving, patient, third)
    assert str(ran.errors[0]) == "it has had enough"
    assert ran.returned[1] == (0, 2)


def _sends_after(ms: int) -> Callable[[], Program]:
    def program() -> Program:
        yield Begin("L", 0)
        yield Work(str(ms), Key("step", 0))
        yield Send((yield Encode(Key("data", ms), 0)), 0)
        yield Meet()  # who leaves is lost

    return program


def _stated(place: int) -> Takes:
    """Each piece of work takes the milliseconds that name it."""
    return lambda action: int(action.what) * MS if isinstance(action, Work) else 0


@pytest.mark.virtual_clock
def test_all_that_had_arrived_is_collected_whoever_woke_up_first() -> None:
    """Of four, two are waited for; the collector is busy until three have come."""

    def collector() -> Program:
        yield Begin("A", 0)
        yield Work("100", Key("step", 0))
        first = yield Collect((1, 2, 3, 4), at_least=2)
        yield Begin("A", 1)
        yield Work("1", Key("step", 1))
        second = yield Collect((1, 2, 3, 4), until_ns=150 * MS)
        yield Meet()
        return [message.source for message in first], [message.source for message in second]

    ran, (recorded, *_) = run(collector, *map(_sends_after, (90, 10, 130, 20)), takes=_stated)
    assert ran.errors == [None] * 5
    assert ran.returned[0] == ([2, 4, 1], [3])
    begin = recorded.of(Begin)[0][-1]
    assert [end - begin for *_, end in recorded.of(Collect)] == [100 * MS, 150 * MS]


@pytest.mark.virtual_clock
def test_a_grace_counts_from_the_arrival_that_fills_the_quorum_or_ends_with_the_last_one() -> None:
    def collector() -> Program:
        yield Begin("A", 0)
        first = yield Collect((1, 2, 3), at_least=2, grace_ns=50 * MS)
        yield Begin("A", 1)
        second = yield Collect((3,), at_least=1, grace_ns=50 * MS)
        yield Meet()
        return first, second

    ran, (recorded, *_) = run(collector, *map(_sends_after, (30, 10, 90)), takes=_stated)
    assert ran.errors == [None] * 4
    first, second = ran.returned[0]
    assert [[message.source for message in each] for each in (first, second)] == [[2, 1], [3]]
    ends = [end for *_, end in recorded.of(Collect)]
    assert ends == [first[1].last_byte_ns + 50 * MS, second[0].last_byte_ns]


@pytest.mark.virtual_clock
def test_messages_of_one_moment_leave_in_the_order_of_the_program() -> None:
    handed_over = list[int]()

    def sends() -> Program:
        yield Begin("L", 0)
        yield Work("forward", Key("forward", 0))
        message = yield Encode(Key("data", 0))
        for peer in (2, 1):
            yield Send(message, peer)
            handed_over.append(time.monotonic_ns())

    def receives() -> Program:
        yield Receive(Key("data", 0), 0)

    began_ns = time.monotonic_ns()
    ran = over_loopback(Jobs(sends, receives, receives), [Bare()] * 3, names=NAMES, takes=held(300 * MS))
    assert ran.errors == [None] * 3
    first_ns, second_ns = handed_over
    assert first_ns - began_ns < 300 * MS <= second_ns - began_ns  # the first one waits in its connection
