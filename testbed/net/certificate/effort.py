"""Plan a certificate's measurements of a link, in the quick and in the full form. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from testbed.directions import LinkDirection
from testbed.net.certificate.expect import outgrown, packets_for_a_tenth
from testbed.net.kernel.namespace import Namespace
from testbed.net.lab_plan import Link
from testbed.net.probe.job import ECHO_BYTES, SMALL_BYTES, DirectionShape, ProbeJob
from testbed.profiles import LinkProfile, Pipe
from testbed.profiles.link_profile import TCP_HEADER_BYTES
from testbed.profiles.timeline import timeline
from testbed.spec import Engine

Form = Literal["quick", "full"]


class FormEffort(NamedTuple):
    """The time budget of a form of certificate."""

    echoes: int
    echo_s: float
    """Time for sending echoes; wide spacing reduces their number."""
    repeats: int
    idle_s: float
    light_s: tuple[float, float]
    """Minimum time, and maximum for links that lose packets."""
    spaced_s: float
    rate_s: float
    bulk_s: float
    longest_message_s: float
    """Messages are shortened to take at most this long on a link."""
    limit_s: float
    """Time limit of the probe, plus a surcharge for long delays."""


_FORMS: dict[Form, FormEffort] = {
    "quick": FormEffort(
        echoes=20,
        echo_s=0.7,
        repeats=1,
        idle_s=0.25,
        light_s=(0.25, 0.25),
        spaced_s=1,
        rate_s=0.2,
        bulk_s=0,
        longest_message_s=0.25,
        limit_s=180,
    ),
    "full": FormEffort(
        echoes=100,
        echo_s=4,
        repeats=3,
        idle_s=1,
        light_s=(1, 10),
        spaced_s=6,
        rate_s=2,
        bulk_s=3,
        longest_message_s=5,
        limit_s=900,
    ),
}
_FEWEST_ECHOES = 8
_WARM_UP_S, _WARM_UP_ROUNDS = 3.0, 20
_LOSSY_WARM_UP_S = 0.3  # under loss a longer warm-up opens no window, and message times are informative only
_LIGHT_PPS, _LIGHT_LOAD = 10_000, 0.3
_FOLLOW_S = 20.0


def _light_pps(pipe: Pipe, profile: LinkProfile, engine: Engine) -> float:
    packet_bits = (SMALL_BYTES + profile.overhead_bytes) * 8
    light_pps = min(_LIGHT_PPS, _LIGHT_LOAD * pipe.rate_bps / packet_bits)
    if engine == "netem":  # its limit counts packets of any size, including those in flight
        held = (pipe.rate_bps * pipe.delay_ns / 8e9 + pipe.buffer_bytes) / profile.mtu
        light_pps = min(light_pps, _LIGHT_LOAD * held / ((pipe.delay_ns + pipe.jitter_ns) / 1e9 + 0.002))
    return max(light_pps, 20.0)


def _shape(pipe: Pipe | None, profile: LinkProfile, engine: Engine) -> DirectionShape | None:
    if pipe is None:
        return None
    steps = timeline(pipe).steps
    return DirectionShape(
        **pipe.model_dump(include={"rate_bps", "delay_ns", "jitter_ns", "buffer_bytes", "reorder", "duplicate"}),
        loss=pipe.mean_loss,
        overhead_bytes=profile.overhead_bytes,
        light_pps=_light_pps(pipe, profile, engine),
        peak_bps=max(step.rate_bps for step in steps),
        peak_loss=max(step.loss.mean if step.loss else 0.0 for step in steps),
    )


def _reach_bps(pipe: Pipe, profile: LinkProfile) -> float:
    """Return the rate that TCP reaches: with loss and a loss-based control, at most sqrt(3/2p) packets per round trip
    (Mathis et al., 1997).
    """
    round_trip_s = profile.round_trip_ns / 1e9
    if not pipe.mean_loss or profile.congestion_control == "bbr" or not round_trip_s:
        return pipe.rate_bps
    return min(pipe.rate_bps, (profile.mtu - TCP_HEADER_BYTES) * 8 * math.sqrt(1.5 / pipe.mean_loss) / round_trip_s)


def _sizes(
    message_bytes: Sequence[int], profile: LinkProfile, effort: FormEffort
) -> tuple[dict[LinkDirection, int], ...]:
    def cut(size: int, pipe: Pipe | None) -> int:
        return (
            size if pipe is None else min(size, max(1, int(_reach_bps(pipe, profile) * effort.longest_message_s / 8)))
        )

    sizes: list[dict[LinkDirection, int]] = []
    for size in sorted(set(message_bytes)):
        pair: dict[LinkDirection, int] = {"up": cut(size, profile.up), "down": cut(size, profile.down)}
        if pair not in sizes:
            sizes.append(pair)
    return tuple(sizes)


def _light_s(profile: LinkProfile, engine: Engine, effort: FormEffort) -> float:
    """Return the time to measure the loss and its burst length to within 10 %, within the form's budget."""
    least, most = effort.light_s
    wanted = [packets_for_a_tenth(p.loss) / _light_pps(p, profile, engine) for p in profile.pipes if p.loss]
    return min(most, max([least, *wanted]))


def plan(
    link: Link,
    namespaces: Mapping[str, Namespace],
    form: Form,
    message_bytes: Sequence[int],
    engine: Engine = "relay",
) -> ProbeJob:
    """Plan the probe's work on one link."""
    effort, profile = _FORMS[form], link.profile
    pipes, round_trip_s = profile.pipes, profile.round_trip_ns / 1e9
    slowest_bps = min((pipe.rate_bps for pipe in pipes), default=10**9)
    # Far enough apart that neither jitter nor the wire delays one echo behind another.
    spacing_s = max(0.005, 4 * 8 * ECHO_BYTES / slowest_bps, 2.2e-9 * sum(pipe.jitter_ns for pipe in pipes))
    idle_s = effort.idle_s
    if profile.slow_start_after_idle:  # starts after one retransmission timeout: a round trip and 200 ms
        idle_s = max(idle_s, 0.3 + 1.5 * round_trip_s)
    losing = any(pipe.loss or outgrown(profile, pipe) for pipe in pipes)
    return ProbeJob(
        link=link.name,
        near_fd=namespaces[link.near.namespace].fd,
        far_fd=namespaces[link.far.namespace].fd,
        near_address=link.near.address,
        far_address=link.far.address,
        mtu=profile.mtu,
        congestion_control=profile.congestion_control,
        up=_shape(profile.up, profile, engine),
        down=_shape(profile.down, profile, engine),
        echoes=max(_FEWEST_ECHOES, min(effort.echoes, int(effort.echo_s / spacing_s))),
        echo_spacing_ns=round(spacing_s * 1e9),
        messages=_sizes(message_bytes, profile, effort),
        repeats=effort.repeats,
        idle_s=idle_s,
        warm_up_s=_LOSSY_WARM_UP_S + 5 * round_trip_s if losing else max(_WARM_UP_S, _WARM_UP_ROUNDS * round_trip_s),
        light_s=_light_s(profile, engine, effort),
        spaced_s=effort.spaced_s if any(pipe.jitter_ns for pipe in pipes) else 0,
        rate_s=effort.rate_s,
        bulk_s=effort.bulk_s,
        follow_s=0,
    )


def follow_s(profile: LinkProfile) -> float:
    """Return the time for measuring a varying link: one period, within a bound."""
    periods = []
    for pipe in profile.pipes:
        if pipe.trace:
            periods.append(pipe.trace.length_ms * pipe.trace.stretch / 1000)
        elif pipe.schedule:
            last = pipe.schedule.changes[-1].at_ns / 1e9
            periods.append(pipe.schedule.repeat_ns / 1e9 if pipe.schedule.repeat_ns else last + 2)
    return min(_FOLLOW_S, max(periods))


def limit_s(jobs: Sequence[ProbeJob], form: Form) -> float:
    """Return the probe's time limit, which allows for turns on few CPUs and for long delays."""
    return _FORMS[form].limit_s + len(jobs) * max(
        (60e-9 * job.round_trip_ns + 3 * job.follow_s for job in jobs), default=0.0
    )
