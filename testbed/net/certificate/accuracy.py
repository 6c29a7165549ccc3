"""Determine the accuracy of links: build a grid of rates, delays and losses as one-link labs, and certify them in full.

A point's verdict is that of its certificate, in the quantities of the grid. Results of two engines can be compared.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

from testbed import units
from testbed.errors import LabError
from testbed.frozen import Frozen
from testbed.net.lab import Lab, LabSpec
from testbed.process import ROOT, start_program
from testbed.profiles import Bernoulli, GilbertElliott, LinkProfile, Loss, Pipe
from testbed.records import Certificate, Measurement
from testbed.spec import Engine

MESSAGE_BYTES = (256 * 1024, 4 * 1024 * 1024)
QUANTITIES = ("rtt", "goodput", "message", "queue")
"""Quantities that decide the verdict on a point without loss."""
LOSS_QUANTITIES = ("loss", "burst")
"""Quantities that decide the verdict on a point with loss, where the transport determines times."""
AGREEMENT = 0.02
"""Maximum difference between two engines, as a share of the larger value ..."""
AGREEMENT_MS = 0.3
"""... or, for a time, in absolute terms: certificates always allow this much."""

_MBIT, _MS = 1_000_000, 1_000_000
_RATES, _NETEM_RATE = (10 * _MBIT, 80 * _MBIT, 300 * _MBIT), 1000 * _MBIT
_DELAYS = (5 * _MS, 25 * _MS, 100 * _MS)
_QUICK = ((10 * _MBIT, 100 * _MS), (80 * _MBIT, 25 * _MS), (300 * _MBIT, 5 * _MS))
_LOSSY = (80 * _MBIT, 25 * _MS)
_LOSSES: tuple[Loss, ...] = (
    Bernoulli(probability=0.01),
    GilbertElliott(enter_bad=0.005, leave_bad=0.25, lost_in_bad=1, lost_in_good=0),
)
_LEAST_BUFFER_NS = 50 * _MS


class GridPoint(Frozen):
    """One symmetric link of the grid."""

    rate_bps: int
    delay_ns: int
    """One-way delay."""
    loss: Loss | None
    busy: bool
    """Whether every processor also runs a program that never sleeps."""

    @property
    def name(self) -> str:
        parts = [units.format_rate(self.rate_bps), units.format_time(self.delay_ns)]
        if self.loss:
            parts.append(f"{self.loss.model} loss {self.loss.mean:.3g}")
        return ", ".join([*parts, *(["busy processors"] if self.busy else [])])

    def profile(self) -> LinkProfile:
        """Describe the link.

        Its transport delays no message: no slow start after idle, and a buffer that holds a whole window. (bbr needs
        less, but pauses for 200 ms every ten seconds, and paces at an outdated estimate of the rate.)
        """
        buffer_ns = max(4 * self.delay_ns, _LEAST_BUFFER_NS)  # two round trips
        buffer_bytes = self.rate_bps * buffer_ns // 8_000_000_000
        pipe = Pipe.plain(rate_bps=self.rate_bps, delay_ns=self.delay_ns, buffer_bytes=buffer_bytes, loss=self.loss)
        return LinkProfile(
            name="accuracy",
            summary=self.name,
            source="the accuracy grid",
            layer="ip",
            mtu=1500,
            congestion_control="cubic",
            slow_start_after_idle=False,
            up=pipe,
            down=pipe,
        )

    def seconds(self) -> float:
        """Return the approximate time of the point if it passes at once; twice that otherwise.

        Ten messages of each size dominate.
        """
        messages = sum(size * 8 / self.rate_bps + self.delay_ns / 1e9 for size in MESSAGE_BYTES)
        return 25 + 12 * messages


class PointResult(Frozen):
    """The certificate of one point, or the reason for a missing one."""

    point: GridPoint
    certificate: Certificate | None
    error: str
    """The reason for a missing certificate; empty otherwise."""

    def measurements(self) -> tuple[Measurement, ...]:
        """Return the measurements that decide the verdict on the point."""
        wanted = LOSS_QUANTITIES if self.point.loss else QUANTITIES
        return tuple(m for m in self.certificate.measurements if m.quantity in wanted) if self.certificate else ()

    @property
    def passed(self) -> bool:
        measurements = self.measurements()
        return bool(measurements) and all(m.verdict == "PASS" for m in measurements)


class Accuracy(Frozen):
    """One engine's results on one machine, as written by `bench links -o`."""

    engine: Engine
    engine_reason: str
    machine: dict[str, Any]
    """The machine at the start of the first point, as in a run's environment.json."""
    results: tuple[PointResult, ...]

    def ordered(self) -> tuple[PointResult, ...]:
        """Return the results in the grid's order, regardless of the order of measurement."""
        place = {point: number for number, point in enumerate(grid(self.engine, busy=True))}
        return tuple(sorted(self.results, key=lambda result: place.get(result.point, len(place))))


def grid(engine: Engine, *, quick: bool = False, busy: bool = False) -> tuple[GridPoint, ...]:
    """List the points; with `busy`, each once more on busy processors. Rates too high for the relay, which is Python,
    are for netem only.
    """
    pairs: Sequence[tuple[int, int]] = _QUICK
    if not quick:
        rates = (*_RATES, _NETEM_RATE) if engine == "netem" else _RATES
        pairs = [(rate, delay) for rate in rates for delay in _DELAYS]
    links = [(rate, delay, None) for rate, delay in pairs] + [(*_LOSSY, loss) for loss in (() if quick else _LOSSES)]
    return tuple(
        GridPoint(rate_bps=rate, delay_ns=delay, loss=loss, busy=work)
        for work in ((False, True) if busy else (False,))
        for rate, delay, loss in links
    )


@contextmanager
def _busy_processors() -> Iterator[None]:
    """Run a program that never sleeps on every processor that this process may use."""
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            busy = start_program("timeit", "-n", str(10**18), "pass", attempt="keep the processors busy", cwd=ROOT)
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        yield


def measure_point(point: GridPoint, engine: Engine, engine_reason: str) -> PointResult:
    """Build the point's link and certify it, from the main thread. An error becomes the result, so that a long grid
    continues.
    """
    spec = LabSpec(topology="star", profiles=(point.profile(),), nodes=1, engine=engine, engine_reason=engine_reason)
    with ExitStack() as stack:
        try:
            lab = stack.enter_context(Lab(spec))
            if point.busy:
                stack.enter_context(_busy_processors())
            return PointResult(point=point, certificate=lab.certify("full", MESSAGE_BYTES), error="")
        except LabError as error:
            return PointResult(point=point, certificate=None, error=str(error))


class Agreement(NamedTuple):
    """One quantity of one point, measured under two engines."""

    point: GridPoint
    direction: str
    quantity: str
    detail: str
    unit: str
    first: float
    second: float

    @property
    def share(self) -> float:
        """Their difference as a share of the larger one."""
        return abs(self.first - self.second) / max(abs(self.first), abs(self.second), 1e-12)

    @property
    def holds(self) -> bool:
        """Whether they agree within AGREEMENT or, for a time, within AGREEMENT_MS."""
        return self.share <= AGREEMENT or (self.unit == "ms" and abs(self.first - self.second) <= AGREEMENT_MS)


def agreement(first: Accuracy, second: Accuracy) -> tuple[Agreement, ...]:
    """Compare all times and rates of links that both engines have certified, but not losses, which are random samples.

    Failed links are excluded: their own rows report the failure.
    """
    theirs = {result.point: readings(result) for result in second.results if result.passed}
    return tuple(
        Agreement(result.point, direction, quantity, detail, unit, value, theirs[result.point][key][1])
        for result in first.ordered()
        if result.passed and result.point in theirs
        for key, (unit, value) in readings(result).items()
        if key in theirs[result.point]
        for direction, quantity, detail in [key]
    )


def readings(result: PointResult) -> Mapping[tuple[str, str, str], tuple[str, float]]:
    """Return units and values by direction, quantity and detail."""
    return {  # details: a message's size; for others, the length of a stream
        (m.direction, m.quantity, m.detail if m.quantity == "message" else ""): (m.unit, m.measured)
        for m in result.measurements()
        if m.measured is not None and m.quantity in QUANTITIES
    }


AccuracyColumn = Literal["rtt", "goodput", "256 KiB", "4 MiB", "queue", "loss", "burst"]


def column_measurements(result: PointResult, column: AccuracyColumn) -> tuple[Measurement, ...]:
    """Return a point's measurements in one column of the table, in both directions."""
    sizes = {"256 KiB": MESSAGE_BYTES[0], "4 MiB": MESSAGE_BYTES[1]}
    if column in sizes:
        start = f"{sizes[column]} bytes"
        return tuple(m for m in result.measurements() if m.quantity == "message" and m.detail.startswith(start))
    return tuple(m for m in result.measurements() if m.quantity == column)
