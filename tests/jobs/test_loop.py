"""The event loop: what actions return and when, in time and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from testbed.errors import SpecError
from testbed.jobs import loop
from testbed.jobs.actions import (
    Action,
    Collect,
    Decode,
    Encode,
    EndStep,
    Fork,
    Key,
    Meet,
    Program,
    Receive,
    Send,
    Sizes,
    Wait,
    Work,
)
from tests.jobs.recording import DelayedLinks, Recording


def works_for(ns: int) -> loop.Cost:
    def cost(node: int, action: Action) -> int | None:
        return ns if isinstance(action, Work | Encode | Decode) else None

    return cost


def run(programs: Sequence[Program], **options: Any) -> Recording:
    seen = Recording()
    loop.Loop(programs, [Sizes(lambda key: 10)] * len(programs), observers=[seen], **options).run()
    return seen


def sender(peer: int, count: int, *, awaited: bool = False) -> Program:
    for number in range(count):
        message = yield Encode(Key("data", number))
        yield Send(message, peer, note=b"note", awaited=awaited)
        if awaited:
            yield Wait(message.key, peer)
    return "sent"


def receiver(peer: int, count: int) -> Program:
    for number in range(count):
        message = yield Receive(Key("data", number), peer)
        yield Decode((message,))


def test_a_message_takes_what_links_and_codecs_take() -> None:
    seen = run([sender(1, 2), receiver(0, 2)], cost=works_for(5), links=DelayedLinks(100))
    received = seen.of(Receive)
    assert [end for *_, end in received] == [105, 110]
    assert [end for *_, end in seen.of(Decode)] == [110, 115]
    message = received[0][3]
    assert (message.source, message.note, message.first_byte_ns, message.last_byte_ns) == (0, b"note", 5, 105)


def test_who_waits_for_a_delivery_goes_on_when_it_is_there() -> None:
    seen = run([sender(1, 2, awaited=True), receiver(0, 2)], cost=works_for(5), links=DelayedLinks(100))
    assert [end for *_, end in seen.of(Wait)] == [105, 210]


def test_without_time_nothing_takes_any() -> None:
    seen = run([sender(1, 3, awaited=True), receiver(0, 3)])
    assert len(seen.of(Decode)) == 3
    assert all(end == 0 for *_, end in seen.done)


@pytest.mark.parametrize("waited_ns", [0, 1_000_000, 5_000_000, 60_000_000])
def test_who_waited_long_works_longer_once(waited_ns: int) -> None:
    def cost(node: int, action: Action) -> int | None:
        return 400_000 if isinstance(action, Receive) else 5

    seen = run([sender(1, 2), receiver(0, 2)], cost=cost, links=DelayedLinks(waited_ns))
    longer_ns = 400_000 * min(5 + waited_ns, 5_000_000) // 5_000_000
    assert [end - begin for *_, begin, end in seen.of(Decode)] == [5 + longer_ns, 5]


def test_meeting_ends_with_the_last_and_tells_everybodys_values() -> None:
    def place(number: int) -> Program:
        for _ in range(number):
            yield Work("wait", Key("wait", 0))
        met = yield Meet(number)
        yield Work("after", Key("after", 0), tuple(met))

    seen = run([place(0), place(2), place(1)], cost=works_for(5))
    assert [(value, end) for _, _, _, value, _, end in seen.of(Meet)] == [([0, 2, 1], 10)] * 3


def test_a_lane_runs_what_it_is_given_in_turn_beside_the_node() -> None:
    def forked(number: int) -> Program:
        yield Work("forked", Key("forked", number))
        return number * 10

    def place() -> Program:
        for number in range(2):
            yield Fork("other", Key("fork", number), forked(number))
        yield Work("own", Key("own", 0))
        results = []
        for number in range(2):
            results.append((yield Wait(Key("fork", number))))
        yield Meet(results)

    seen = run([place()], cost=works_for(5))
    assert seen.of(Meet)[0][3] == [[0, 10]]
    assert [(lane, end) for _, lane, _, _, _, end in seen.of(Work)] == [("main", 5), ("other", 5), ("other", 10)]


def collector(busy: int = 1, **asked: int) -> Program:
    for number in range(busy):
        yield Work("busy", Key("busy", number))
    came = yield Collect((0, 1), **asked)
    yield Meet([message.source for message in came])


def late_sender(works: int) -> Program:
    for number in range(works):
        yield Work("busy", Key("busy", number))
    yield Send((yield Encode(Key("data", 0))), 2)
    yield Meet()


@pytest.mark.parametrize(
    ("asked", "came", "at_ns"),
    [
        ({"at_least": 1}, [1], 35),
        ({"at_least": 2}, [1, 0], 45),
        ({"until_ns": 34}, [], 34),
        ({"until_ns": 35}, [1], 35),
        ({"until_ns": 60}, [1, 0], 60),
        ({}, [], 10),
        ({"busy": 5, "at_least": 1}, [1, 0], 50),  # who is late takes all that came meanwhile
        ({"at_least": 1, "grace_ns": 9}, [1], 44),
        ({"at_least": 1, "grace_ns": 10}, [1, 0], 45),
        ({"at_least": 1, "grace_ns": 30}, [1, 0], 45),  # nobody else can come
        ({"busy": 4, "at_least": 1, "grace_ns": 9}, [1], 44),  # it begins with the arrival, not with the waiting
    ],
)
def test_collecting_takes_all_that_had_arrived(asked: dict[str, int], came: list[int], at_ns: int) -> None:
    programs = [late_sender(3), late_sender(2), collector(**asked)]
    seen = run(programs, cost=works_for(10), links=DelayedLinks(5))
    assert [end for *_, end in seen.of(Collect)] == [at_ns]
    assert seen.of(Meet)[0][3][2] == came


def test_without_time_nobody_can_say_what_has_arrived() -> None:
    with pytest.raises(loop.TimingDecidesError, match="its results depend on the network"):
        run([late_sender(1), late_sender(1), collector(at_least=1)])


def test_a_circle_of_waiting_is_told() -> None:
    with pytest.raises(SpecError, match=r"2 lanes .* node 0 main: Receive"):
        run([receiver(1, 1), receiver(0, 1)])


def test_the_end_of_a_step_says_whether_the_job_goes_on() -> None:
    def place() -> Program:
        step = 0
        while (yield EndStep(step)):
            step += 1

    seen = run([place()], goes_on=lambda place, step: step < 3)
    assert [value for _, _, _, value, _, _ in seen.of(EndStep)] == [True, True, True, False]
