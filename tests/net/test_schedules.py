"""Links that vary under netem: what is due when, and what becomes of errors. The qdiscs are real only in the guest."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from testbed.errors import ShapingError
from testbed.net import schedules
from testbed.net.kernel import shaping
from testbed.net.kernel.namespace import Namespace
from testbed.net.kernel.netlink import Netlink
from testbed.net.kernel.queue_plan import Shaping, plan_shaping
from testbed.net.lab_plan import ShapedDevice
from testbed.net.schedules import ScheduleDriver
from testbed.profiles import Bernoulli, Change, Pipe, Schedule
from testbed.profiles.timeline import timeline
from tests import synthetic

PIPE = synthetic.pipe(80_000_000, 10_000_000, buffer_bytes=1_000_000)
_MS = 1_000_000


def _varying(*changes: tuple[float, int], repeat_ms: int | None = None) -> Pipe:
    """A pipe with these (ms, Mbit/s) changes; the losses vary, too."""
    made = tuple(
        Change(
            at_ns=round(at * _MS),
            rate_bps=rate * 10**6,
            delay_ns=10 * _MS,
            jitter_ns=0,
            loss=Bernoulli(probability=1 / (1 + rate)),
        )
        for at, rate in changes
    )
    schedule = Schedule(changes=made, repeat_ns=None if repeat_ms is None else repeat_ms * _MS)
    return PIPE.model_copy(update={"schedule": schedule})


def _device(pipe: Pipe, link: str = "node-0") -> ShapedDevice:
    return ShapedDevice(link=link, direction="up", namespace="bench", device="x", pipe=pipe, mtu=1500, layer="ip")


class Kernel:
    """Stands in for netem: notes what is asked for, and when it has been done."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Shaping | None, Shaping]] = []
        self.done_ns: list[int] = []
        self.refuses: str | None = None
        self.takes_s = 0.0
        self.threads: set[str] = set()

    def change(self, netlink: object, device: str, before: Shaping | None, wanted: Shaping, *, link: str) -> Shaping:
        self.threads.add(threading.current_thread().name)
        time.sleep(self.takes_s)
        if self.refuses:
            raise ShapingError(f"{link}: {self.refuses}")
        self.asked.append((link, before, wanted))
        self.done_ns.append(time.monotonic_ns())
        return wanted

    def rates(self, link: str = "node-0 up") -> list[int]:
        """In Mbit/s, in their order."""
        changed = [
            plan.children[0]
            for name, before, plan in self.asked
            if name == link and (before is None or before.children != plan.children)
        ]
        return [dict(child.stated)["rate_bytes"] * 8 // 10**6 for child in changed]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    monkeypatch.setattr(shaping, "change_shaping", made.change)
    monkeypatch.setattr(schedules, "Netlink", contextlib.nullcontext)
    return made


@pytest.fixture
def playing(kernel: Kernel) -> Iterator[Any]:
    """Makes drivers that are closed in the end."""
    made = []

    def make(*devices: ShapedDevice) -> ScheduleDriver:
        made.append(ScheduleDriver(devices, {"bench": None}))
        return made[-1]

    yield make
    for one in made:
        one.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "netem schedules"]


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.virtual_clock
def test_every_step_is_made_in_its_order_and_never_early(kernel: Kernel, playing: Any) -> None:
    pipe = _varying((30, 40), (60, 20), (100, 80))
    made = playing(_device(pipe))
    time.sleep(0.05)
    assert kernel.asked == []
    start = time.monotonic_ns() + 100 * _MS
    made.play(start)
    _until(lambda: len(kernel.asked) == 6)
    asked = [plan for _, _, plan in kernel.asked]
    wanted = [plan_shaping(pipe, mtu=1500, layer="ip", step=step) for step in timeline(pipe).steps]
    assert [plan.netem for plan in asked[::2]] == [plan.netem for plan in wanted[1:]]
    assert [plan.children for plan in asked[::2]] == [plan.children for plan in wanted[:-1]], "the rate comes later"
    assert asked[1::2] == wanted[1:]
    due = [at * _MS for at in (30, 40, 60, 70, 100, 110)]
    assert all(done_ns - start >= due_ns for done_ns, due_ns in zip(kernel.done_ns, due, strict=True))
    assert kernel.threads == {"netem schedules"}


def test_a_rate_may_be_due_when_the_next_change_is(kernel: Kernel, playing: Any) -> None:
    """What a packet takes, 10.15 ms here, lies between them: the heap could not compare the two (chaos, over geo)."""
    made = playing(_device(_varying((30, 40), (60, 20), (70.15, 80))))
    made.play(time.monotonic_ns())
    _until(lambda: made.fault is not None or len(kernel.rates()) == 3)
    assert (made.fault, kernel.rates()) == (None, [40, 20, 80])


def test_after_a_delay_has_fallen_no_earlier_rate_comes_last(kernel: Kernel, playing: Any) -> None:
    """Packets keep their order, so a rate is not due before those of the packets ahead."""
    pipe = _varying((30, 40), (60, 20), (100, 80))
    first, *others = pipe.schedule.changes
    slow = pipe.schedule.model_copy(update={"changes": (first.model_copy(update={"delay_ns": 300 * _MS}), *others)})
    made = playing(_device(pipe.model_copy(update={"schedule": slow})))
    made.play(time.monotonic_ns())
    _until(lambda: made.fault is not None or len(kernel.rates()) == 3)
    assert (made.fault, kernel.rates()) == (None, [40, 20, 80])


@pytest.mark.virtual_clock
def test_a_schedule_repeats_until_it_is_held(kernel: Kernel, playing: Any) -> None:
    made = playing(_device(_varying((0, 40), (20, 20), repeat_ms=40)))
    made.play(time.monotonic_ns())
    _until(lambda: len(kernel.rates()) >= 6)
    made.hold()
    played = kernel.rates()
    assert played[:6] == [40, 20, 40, 20, 40, 20]
    assert played[-1] == 80
    time.sleep(0.08)
    assert kernel.rates() == played


@pytest.mark.virtual_clock
def test_steps_that_were_overslept_are_left_out(kernel: Kernel, playing: Any) -> None:
    kernel.takes_s = 0.1
    made = playing(_device(_varying((0, 10), (20, 20), (40, 30), (60, 40))))
    made.play(time.monotonic_ns())
    _until(lambda: len(kernel.rates()) == 2)
    assert kernel.rates() == [10, 40]


@pytest.mark.virtual_clock
def test_links_are_played_side_by_side(kernel: Kernel, playing: Any) -> None:
    first, second = _varying((0, 10), (40, 20)), _varying((20, 30), (60, 40))
    made = playing(_device(first, "a"), _device(second, "b"), _device(PIPE, "constant"))
    made.play(time.monotonic_ns())
    _until(lambda: len(kernel.rates("a up")) == len(kernel.rates("b up")) == 2)
    made.hold()
    assert (kernel.rates("a up"), kernel.rates("b up")) == ([10, 20, 80], [30, 40, 80])
    assert kernel.rates("constant up") == []


@pytest.mark.virtual_clock
def test_the_first_error_is_kept_and_ends_the_play(kernel: Kernel, playing: Any) -> None:
    made = playing(_device(_varying((0, 40), (20, 20), (40, 80))))
    assert made.fault is None
    kernel.refuses = "asked for this, the kernel has that"
    made.play(time.monotonic_ns())
    _until(lambda: made.fault)
    assert made.fault == "node-0 up: asked for this, the kernel has that"
    kernel.refuses = None
    time.sleep(0.06)
    assert kernel.asked == []
    made.hold()  # what the device holds after an error is not known
    assert kernel.rates() == [80]


def test_who_holds_is_told_when_it_fails(kernel: Kernel, playing: Any) -> None:
    made = playing(_device(_varying((0, 40))))
    made.play(time.monotonic_ns())
    _until(lambda: kernel.asked)
    kernel.refuses = "no"
    with pytest.raises(ShapingError, match="node-0 up: no"):
        made.hold()


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_the_kernel_holds_each_step_and_in_the_end_the_constant_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[Shaping] = []
    change = shaping.change_shaping
    monkeypatch.setattr(shaping, "change_shaping", lambda *asked, **link: changes.append(change(*asked, **link)))
    shaped = _device(_varying((0, 40), (100, 20), (200, 60)))
    with Namespace("bench") as namespace, Netlink(namespace) as netlink:
        netlink.add_veth("x", "02:77:00:00:00:00", 1500, namespace, "y", "02:77:00:00:00:01")
        shaping.apply_shaping(netlink, "x", shaped.plan(), link="node-0 up")
        with contextlib.closing(ScheduleDriver([shaped], {"bench": namespace})) as made:
            made.play(time.monotonic_ns())
            for number, step in enumerate(timeline(shaped.pipe).steps, start=1):
                _until(lambda expected=number: len(changes) == 2 * expected)
                shaping.check_shaping(netlink, "x", shaped.plan(step), link="node-0 up")
            made.hold()
            shaping.check_shaping(netlink, "x", shaped.plan(), link="node-0 up")
            assert made.fault is None
