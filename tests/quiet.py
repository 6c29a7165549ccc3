"""Measurements on the real clock, for tests marked `quiet`: a deviation counts only if the host kept time.

A test measures through its fixture `quiet`. A measurement without deviation passes. A deviation is measured again, a
few times. When it stays, the test fails, unless the host itself was late in each attempt: such a machine can show
nothing about a link, so the test is skipped, with the lateness in its reason; it fails where TESTBED_REQUIRE names
`quiet`.

Run as a program, this module is the watch: a real-time sleeper on each processor, late only if the machine is.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from testbed.records import Certificate

Measured = TypeVar("Measured")

ATTEMPTS = 3
"""How often a deviation is measured before it counts."""
LATE_P99_MS = 1.0
LATE_WORST_MS = 10.0
STOLEN = 0.01
OTHERS = 0.10
"""From these on the host was late: a sleeper's 99th percentile, its worst, the share of the processor time that the
hypervisor took, and the share that programs outside of this test run used."""
_NAP_S = 0.001


class Host(NamedTuple):
    """What the host did during one attempt. Shares are of all processors' time."""

    p99_ms: float
    worst_ms: float
    stolen: float
    others: float

    def __str__(self) -> str:
        return (
            f"a real-time sleeper was {self.p99_ms:.2f} ms late (p99), {self.worst_ms:.1f} ms at worst; "
            f"{self.stolen:.1%} of the processor time was stolen, other programs used {self.others:.0%}"
        )

    @property
    def late(self) -> bool:
        """Whether this alone may explain a deviation."""
        return (
            self.p99_ms > LATE_P99_MS or self.worst_ms > LATE_WORST_MS or self.stolen > STOLEN or self.others > OTHERS
        )


@dataclass(frozen=True)
class Attempt:
    """One measurement that deviated."""

    deviations: tuple[str, ...]
    host: Host
    lateness: tuple[str, ...]
    """What the measurement itself says about a late host."""

    def __str__(self) -> str:
        return "; ".join((*self.deviations, *self.lateness, str(self.host)))


class Deviates(Exception):
    """A deviation remained in every attempt. `late`: the host did not keep time in any of them."""

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self.late = all(attempt.host.late or attempt.lateness for attempt in attempts)
        why = "the host was late in every attempt, so nothing is shown" if self.late else "the host kept time"
        told = "\n".join(f"  attempt {number}: {attempt}" for number, attempt in enumerate(attempts, start=1))
        super().__init__(f"deviates, and {why}:\n{told}")


class Quiet:
    """Measures until nothing deviates, at most ATTEMPTS times; `said` keeps what was found."""

    def __init__(self, watch: Callable[[], contextlib.AbstractContextManager[Callable[[], Host]]]) -> None:
        self._watch = watch
        self.said: list[str] = []

    def measure(
        self,
        once: Callable[[], Measured],
        deviations: Callable[[Measured], Iterable[object]],
        lateness: Callable[[Measured], Iterable[str]] = lambda _: (),
        told: Callable[[Measured], str] = lambda _: "nothing deviates",
    ) -> Measured:
        """Call `once` until `deviations` of its result are none; Deviates when the last attempt still has some.

        `lateness` gives what the result itself knows about a late host, `told` what is said of a good one.
        """
        attempts: list[Attempt] = []
        while True:
            with self._watch() as seen:
                result = once()
            attempt = Attempt(tuple(map(str, deviations(result))), seen(), tuple(lateness(result)))
            self.said.append(str(attempt) if attempt.deviations else f"{told(result)}; {attempt}")
            if not attempt.deviations:
                return result
            attempts.append(attempt)
            if len(attempts) == ATTEMPTS:
                raise Deviates(attempts)

    def certify(self, once: Callable[[], Certificate]) -> Certificate:
        """Measure certificates until one passes."""
        return self.measure(once, failures, certified_lateness, nearest_to_failing)


def failures(certificate: Certificate) -> list[str]:
    """Say what a certificate refuses."""
    return [
        f"{m.link} {m.direction} {m.quantity} ({m.detail}): "
        f"{m.measured} {m.unit}, not {m.expected} within {m.tolerance}; {m.note}"
        for m in certificate.measurements
        if m.verdict == "FAIL"
    ]


def nearest_to_failing(certificate: Certificate) -> str:
    """Say which measurement of a certificate used most of its tolerance."""
    shares = [
        (abs(m.measured - m.expected) / m.tolerance, f"{m.link} {m.direction} {m.quantity}")
        for m in certificate.measurements
        if m.measured is not None and m.expected is not None and m.tolerance
    ]
    share, name = max(shares, default=(0.0, "nothing"))
    return f"{name} used {share:.0%} of its tolerance"


def certified_lateness(certificate: Certificate) -> list[str]:
    """Say by how much the probe, which measures, was late, where that is too much.

    The relay's own lateness is no excuse: the relay is what is tested, and where the host is the reason the watch sees
    it too.
    """
    return [
        f"CPU contention: the probe was {m.measured:.2f} ms late (p99)"
        for m in certificate.measurements
        if (m.link, m.quantity) == ("host", "lateness") and m.measured is not None and m.measured > LATE_P99_MS
    ]


@contextlib.contextmanager
def watch() -> Iterator[Callable[[], Host]]:
    """Watch the host during the block; afterwards the yielded function says what it did."""
    result: list[Host] = []
    sleeper = subprocess.Popen([sys.executable, "-S", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert sleeper.stdin is not None
    assert sleeper.stdout is not None
    try:
        sleeper.stdout.readline()
        before, began = ticks_of_others(), time.monotonic()
        stolen = _stolen_ticks()
        yield lambda: result[0]
        possible = (time.monotonic() - began) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        others = max(0, sum(ticks_of_others().values()) - sum(before.values()))
        told, _ = sleeper.communicate(b"\n", timeout=30)
        p99_ms, worst_ms = json.loads(told)
        result.append(Host(p99_ms, worst_ms, (_stolen_ticks() - stolen) / possible, others / possible))
    finally:
        sleeper.kill()
        sleeper.communicate()


def _stolen_ticks() -> int:
    from testbed.processors import read_processors  # here, because as a program this module has no packages

    return read_processors()["cpu"].stolen


def ticks_of_others() -> dict[int, int]:
    """What each process outside of this test run has used, in clock ticks, with the children that it has waited for.

    A process that ends moves its ticks to its parent, so the sum only grows.
    """
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(folder.name)], used[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))

    def is_ours(pid: int) -> bool:
        while pid and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid != 0

    return {pid: ticks for pid, ticks in used.items() if not is_ours(pid)}


def lateness_ms(late_s: float) -> list[float]:
    """How late a nap ended, and after it the naps that would have begun and ended meanwhile.

    A packet may be due at any of these moments, so one halt of 20 ms counts as twenty late naps, not as one.
    """
    return [1e3 * (late_s - missed * _NAP_S) for missed in range(max(1, int(late_s / _NAP_S)))]


def _sleep_until_told() -> None:
    """Sleep on every processor until a line comes in; print the 99th percentile and the worst lateness in ms."""
    late_ms: list[float] = []
    ended = threading.Event()

    def nap(cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_max(os.SCHED_FIFO)))
        while not ended.is_set():
            due = time.monotonic() + _NAP_S
            time.sleep(_NAP_S)
            late_ms.extend(lateness_ms(time.monotonic() - due))

    sleepers = [threading.Thread(target=nap, args=(cpu,)) for cpu in sorted(os.sched_getaffinity(0))]
    for sleeper in sleepers:
        sleeper.start()
    print(flush=True)
    sys.stdin.readline()
    ended.set()
    for sleeper in sleepers:
        sleeper.join()
    late_ms.sort()
    print(json.dumps([late_ms[len(late_ms) * 99 // 100], late_ms[-1]] if late_ms else [0.0, 0.0]))


if __name__ == "__main__":
    _sleep_until_told()
