"""Bounds the step-time error caused by link deviations. Certificates are judged by this bound.

A step is simulated (`metrics.ideal`; of data parallel training `replay.worker_steps`) over the links as specified and
as measured, and the bound is their relative difference. Each measurement becomes a deviation of a wire:

rate, goodput, schedule   the wire's rate, measured / specified
delay                     additional delay on every message
rtt                       the same, half of it each way
message                   the same, minus the part that the direction's rate explains
jitter, lateness          the same: the late packet may be the last one of every message
queue                     the difference, added to each message that waits longer than the smaller of both queues
loss, burst               a round trip for each packet, or burst, lost more or less often than specified, and a
                          retransmission timeout if it is among a message's last three packets
reordered, duplicated     a round trip for each packet
Deviations explained by chance have no bound, nor do effects of TCP's own decisions.

In combination: each direction of each link gets the slowest measured rate (at most the specified one), the longest
deviation among delay, round trip, messages and lateness, and the sum of all others. The step over these links, and the
step over links with all favourable deviations, bound the step from both sides; the larger difference counts. Several
measurements of one quantity are not added; different quantities are, although they seldom coincide, so the bound is
conservative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

from testbed.directions import LINK_DIRECTIONS, LinkDirection
from testbed.metrics.ideal import ideal_step_s, recorded_kind, trained_steps
from testbed.metrics.links import Queues
from testbed.metrics.steps import align, steady
from testbed.metrics.wires import WireDeviation, Wires
from testbed.profiles import LinkProfile
from testbed.records import BOUND, Certificate, DuringRecord, Measurement, StepRecord
from testbed.spec import Cell

_TIMER_NS = 200_000_000
"""Linux's minimum TCP retransmission timeout."""
_TAIL_PACKETS = 3
"""Packets needed after a lost one for TCP to detect the loss (three duplicate acknowledgements, RFC 5681)."""
_APART_LINKS = 8
"""With more links, a measurement gets the bound of its quantity on all links at once, which is at least as large."""
STEPS, MANY_ACTIONS = 3, 2000
"""Number of steps examined per run, and the number of actions above which only one is: each is simulated several
times."""
_Sign = Literal["slow", "fast"]
_Step = TypeVar("_Step")
Deviations = dict[tuple[int, str], WireDeviation]
StepDurations = Callable[[Deviations], list[float]]
"""Durations of one or more steps over deviating wires, in seconds of the lab."""


class BoundedStep:
    """The step to which bounds are relative."""

    def __init__(self, cell: Cell, seconds: StepDurations, said: str, *, alike: bool = False) -> None:
        """Use one or more steps of the cell; the bound is the worst of them. `said` describes their origin.

        `alike`: one link was measured, and represents all of the cell's.
        """
        self.cell, self.alike = cell, alike
        self._seconds, self._asked_s = seconds, seconds({})
        shortest, longest = (pick(self._asked_s, default=0.0) * 1e3 for pick in (min, max))
        took = f"{longest:.4g} ms" if shortest == longest else f"{shortest:.4g} to {longest:.4g} ms"
        self.said = f"{said}, {took} long over the links as specified"

    @property
    def seconds(self) -> float:
        """Duration of the longest of them over the links as specified."""
        return max(self._asked_s, default=0.0)

    def moved(self, deviations: Deviations) -> float:
        """Return the relative change of the step caused by these deviations."""
        # Without them three of four simulations are left out: most measurements are exact, or deviate one way.
        changed = {wire: deviation for wire, deviation in deviations.items() if deviation.matters}
        if not changed:
            return 0.0
        times = zip(self._seconds(changed), self._asked_s, strict=True)
        return max((abs(moved / asked - 1) for moved, asked in times), default=0.0)

    def assess(self, certificate: Certificate) -> Certificate:
        """Judge a certificate by this step. Links are numbered as in the step's cell.

        On the virtual clock nothing excuses a deviation, so any value out of tolerance also fails there.
        """
        measurements, bound = _assess(certificate.measurements, self, exact=certificate.clock == "virtual")
        return certificate.model_copy(update={"measurements": measurements, "bound": bound, "step": self.said})

    def assess_during(self, during: DuringRecord) -> DuringRecord:
        """Return the verdict on lateness during the run: the longer step if every message is late by the mean on every
        shaped wire.
        """
        late = WireDeviation(delay_ns=during.mean_ms * 1e6)
        crossed: Deviations = {
            (link, side): late
            for link, profile in enumerate(self.cell.links if self.cell.nodes > 1 else ())
            for side in LINK_DIRECTIONS
            if profile.pipe(side) is not None
        }
        return during.model_copy(update={"bound": self.moved(crossed) if crossed and during.samples else None})


def pipeline_step(cell: Cell, stages: Sequence[Sequence[StepRecord]], played_at_ns: int | None) -> BoundedStep | None:
    """Return up to three steps of a pipeline that count (one if they are large); None without such steps."""
    chosen = steady(align(stages))
    if not chosen:
        return None
    actions = sum(len(record.actions) for record in chosen[-1].records)
    some = spread_out(chosen, 1 if actions > MANY_ACTIONS else STEPS)

    def seconds(deviations: Deviations) -> list[float]:
        wires = Wires(cell, played_at_ns, deviations)
        return [ideal_step_s(wires, step.records, step.free_ns, cell.compute) for step in some]

    return BoundedStep(cell, seconds, "the run's own steps")


def spread_out(steps: Sequence[_Step], count: int) -> list[_Step]:
    """Return at most `count` of the steps, evenly spread, including the last."""
    if count == 1:
        return [steps[-1]]
    return list(dict.fromkeys(steps[round(place * (len(steps) - 1) / (count - 1))] for place in range(count)))


def kind_step(cell: Cell, nodes: Sequence[Sequence[StepRecord]], played_at_ns: int | None) -> BoundedStep | None:
    """Return the mean step of a job from a `job` table; None without steps."""
    trained = trained_steps(nodes)
    if not all(trained):
        return None
    steps = recorded_kind(cell, trained)
    return BoundedStep(
        cell,
        lambda deviations: [fmean(steps.seconds(Queues(Wires(cell, played_at_ns, deviations))))],
        "the mean of the run's own steps",
    )


# ------------------------------------------------------------------ from measurements to deviations
class _Effect(NamedTuple):
    """The effect of one measurement on one direction of one link."""

    measurement: Measurement
    link: int
    way: LinkDirection
    deviation: WireDeviation


def counts(measurement: Measurement) -> bool:
    """Return whether a measurement has a specified value, and a measured one that chance alone does not explain."""
    if measurement.measured is None or measurement.expected is None or measurement.tolerance is None:
        return False
    return not measurement.chance or abs(measurement.measured - measurement.expected) > measurement.chance


def _effects(step: BoundedStep, measurements: Iterable[Measurement]) -> list[_Effect]:
    counted = [m for m in measurements if counts(m)]
    links = step.cell.links
    rates = _rates(counted)
    effects = []
    for measurement in counted:
        numbers = range(len(links))
        if measurement.link != "relay" and not step.alike:
            number = step.cell.link_names.index(measurement.link)
            numbers = range(number, number + 1)
        for number in numbers:
            shaped = [way for way in LINK_DIRECTIONS if links[number].pipe(way) is not None]
            for way in shaped:
                if measurement.direction in (way, "both"):
                    deviation = _deviation(
                        measurement,
                        links[number],
                        way,
                        rate=rates.get((measurement.link, way), 1.0),
                        shaped=len(shaped),
                        star=step.cell.topology == "star",
                    )
                    effects.append(_Effect(measurement, number, way, deviation))
    return effects


def _rates(counted: Iterable[Measurement]) -> dict[tuple[str, str], float]:
    """Return the slowest measured rate of each direction, as a share of the specified one; at most 1."""
    rates: dict[tuple[str, str], float] = {}
    for m in counted:
        if m.quantity in ("rate", "goodput", "schedule") and m.measured is not None and m.expected:
            key = (m.link, m.direction)
            rates[key] = min(rates.get(key, 1.0), m.measured / m.expected)
    return rates


_LEAST_RATE = 0.001
"""Lower limit of a wire's share of its rate: a slower wire is effectively broken, and the simulation must end."""


def _deviation(
    m: Measurement, profile: LinkProfile, way: LinkDirection, *, rate: float, shaped: int, star: bool
) -> WireDeviation:
    assert m.measured is not None
    assert m.expected is not None
    more = m.measured - m.expected
    pipe = profile.pipe(way)
    assert pipe is not None
    # In a star a packet and its acknowledgement cross two links, assumed to be alike.
    round_trip_ns = sum(p.delay_ns for p in (profile.up, profile.down) if p) * (2 if star else 1)
    match m.quantity:
        case "rate" | "goodput" | "schedule":
            return WireDeviation(rate=max(_LEAST_RATE, m.measured / m.expected))
        case "delay":
            return WireDeviation(delay_ns=more * 1e6)
        case "rtt":
            return WireDeviation(delay_ns=more * 1e6 / shaped)
        case "message":
            wire_ms = max(0.0, m.expected - pipe.delay_ns / 1e6)
            explained = wire_ms * (1 / max(_LEAST_RATE, rate) - 1)
            return WireDeviation(delay_ns=(max(0.0, more - explained) if more > 0 else more) * 1e6)
        case "jitter" | "lateness":
            return WireDeviation(delay_ns=abs(more) * 1e6)
        case "queue":
            return WireDeviation(overflow_ns=abs(more) * 1e6, buffer_ns=min(m.measured, m.expected) * 1e6)
        case "loss":
            return WireDeviation(packet_ns=abs(more) * round_trip_ns, delay_ns=abs(more) * _TAIL_PACKETS * _TIMER_NS)
        case "burst":
            fewer = abs(1 / max(1.0, m.measured) - 1 / max(1.0, m.expected)) * pipe.mean_loss
            return WireDeviation(packet_ns=fewer * round_trip_ns, delay_ns=fewer * _TAIL_PACKETS * _TIMER_NS)
        case "reordered" | "duplicated":
            return WireDeviation(packet_ns=abs(more) * round_trip_ns)


_LATENCY = ("delay", "rtt", "message", "lateness")
"""Four measurements of one quantity: the latency of a message."""


def _together(effects: Iterable[_Effect], sign: _Sign) -> Deviations:
    """Combine the effects on each wire: all that slow it down, or all that speed it up."""
    longest, slowest = (max, min) if sign == "slow" else (min, max)
    parts: dict[tuple[int, LinkDirection], list[_Effect]] = {}
    for effect in effects:
        parts.setdefault((effect.link, effect.way), []).append(effect)
    together: Deviations = {}
    for key, wire_effects in parts.items():
        rate = slowest([1.0, *(e.deviation.rate for e in wire_effects)])
        latency = longest([0.0, *(e.deviation.delay_ns for e in wire_effects if e.measurement.quantity in _LATENCY)])
        if sign == "fast":
            together[key] = WireDeviation(rate=rate, delay_ns=latency)
            continue
        others = sum(_worst_delays(e for e in wire_effects if e.measurement.quantity not in _LATENCY))
        together[key] = WireDeviation(
            rate=rate,
            delay_ns=latency + others,
            packet_ns=sum(e.deviation.packet_ns for e in wire_effects),
            overflow_ns=max(e.deviation.overflow_ns for e in wire_effects),
            buffer_ns=min(e.deviation.buffer_ns for e in wire_effects),
        )
    return together


def _worst_delays(effects: Iterable[_Effect]) -> Iterable[float]:
    """Return the longest delay of each quantity."""
    longest: dict[str, float] = {}
    for effect in effects:
        name = effect.measurement.quantity
        longest[name] = max(longest.get(name, 0.0), effect.deviation.delay_ns)
    return longest.values()


def _both_ways(step: BoundedStep, effects: Sequence[_Effect]) -> float:
    return max(step.moved(_together(effects, sign)) for sign in ("slow", "fast")) if effects else 0.0


# ------------------------------------------------------------------ verdicts
def _assess(
    measurements: Sequence[Measurement], step: BoundedStep, *, exact: bool
) -> tuple[tuple[Measurement, ...], float | None]:
    """Assign each measurement its bound and verdict; also return the combined bound.

    Links are numbered as in the step's cell. The combined bound is None if a value is missing.
    """
    effects = _effects(step, measurements)
    groups: dict[object, list[_Effect]] = {}
    for effect in effects:
        apart = id(effect.measurement) if len(step.cell.links) <= _APART_LINKS else effect.measurement.quantity
        groups.setdefault(apart, []).append(effect)
    bounds: dict[int, float] = {}
    for group in groups.values():
        bound = _both_ways(step, group)
        bounds |= {id(effect.measurement): bound for effect in group}
    assessed = [_judged(measurement, bounds.get(id(measurement)), exact=exact) for measurement in measurements]
    complete = all(m.measured is not None for m in measurements)
    return tuple(assessed), _both_ways(step, effects) if complete else None


_UNSAID = "out of tolerance"


def _judged(measurement: Measurement, bound: float | None, *, exact: bool) -> Measurement:
    moves = (bound or 0.0) > BOUND
    notes = [note for note in measurement.note.split("; ") if note not in ("", _UNSAID)]
    if moves:
        notes.insert(0, f"moves the step by up to {bound:.1%}".replace("%", " %"))
    failed = moves or measurement.fault or measurement.measured is None or (exact and measurement.verdict == "FAIL")
    return measurement.model_copy(
        update={"bound": bound, "verdict": "FAIL" if failed else "PASS", "note": "; ".join(notes)}
    )
