"""Compute the readings of an exact link and their chance deviations: arithmetic on a profile."""

from __future__ import annotations

import math

from testbed.profiles import Bernoulli, GilbertElliott, LinkProfile, Pipe

DEVIATIONS = 3.3
"""Tolerance of sampled quantities in standard deviations: rejects one good link in a thousand."""


def serialisation_ns(pipe: Pipe | None, counted_bytes: float) -> float:
    """Return the wire time of `counted_bytes` of the profile's layer; 0 if unshaped."""
    return counted_bytes * 8e9 / pipe.rate_bps if pipe else 0.0


def delay_ms(profile: LinkProfile, pipe: Pipe, packet_bytes: int) -> float:
    """Return the mean one-way time of an IP packet on an idle link; jitter averages out. With a queue behind netem, any
    packet arrives as late as a full one (`queue_plan`).
    """
    if pipe.queue is not None:
        packet_bytes = profile.mtu
    return (pipe.delay_ns + serialisation_ns(pipe, packet_bytes + profile.overhead_bytes)) / 1e6


def rtt_ms(profile: LinkProfile, packet_bytes: int) -> float:
    """Return the round trip on an idle link of an IP packet and a reply of its size."""
    return sum(delay_ms(profile, pipe, packet_bytes) for pipe in profile.pipes)


def message_ms(profile: LinkProfile, pipe: Pipe, size: int, packet_payload_bytes: int) -> float:
    """Return the time from the first byte sent to the last byte read, without limits by the congestion window."""
    packets = -(-size // packet_payload_bytes)
    headers = profile.mtu - packet_payload_bytes + profile.overhead_bytes
    less = packets * packet_payload_bytes - size if pipe.queue is not None else 0  # than full is the last packet
    return (serialisation_ns(pipe, size + packets * headers + less) + pipe.delay_ns) / 1e6


def goodput_bps(profile: LinkProfile, pipe: Pipe, packet_payload_bytes: int) -> float:
    """Return the rate of TCP payload when all packets are full."""
    return pipe.rate_bps * packet_payload_bytes / (profile.mtu + profile.overhead_bytes)


def outgrown(profile: LinkProfile, pipe: Pipe) -> bool:
    """Return whether a loss-based congestion control must keep more in flight than the buffer holds: then the control,
    not the link, determines message times.
    """
    product_bytes = pipe.rate_bps * profile.round_trip_ns / 8e9
    return profile.congestion_control != "bbr" and pipe.buffer_bytes < product_bytes


def wilson_interval(count: int, samples: float, deviations: float = DEVIATIONS) -> tuple[float, float]:
    """Return the lowest and the highest share compatible with `count` of `samples` within `deviations` (Wilson,
    1927).
    """
    share, square = count / samples, deviations**2 / samples
    centre = (share + square / 2) / (1 + square)
    half = math.sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)


def inflation(loss: Bernoulli | GilbertElliott | None) -> float:
    """Return the variance of a loss count relative to a binomial one of the same mean: bursts correlate neighbours.

    For Gilbert and Elliott's chain the covariance of packets k apart is bad * good * (b - g)^2 * (1 - enter - leave)^k.
    """
    if not isinstance(loss, GilbertElliott):
        return 1.0
    bad = loss.enter_bad / (loss.enter_bad + loss.leave_bad)
    persistence = 1 - loss.enter_bad - loss.leave_bad
    covariance = bad * (1 - bad) * (loss.lost_in_bad - loss.lost_in_good) ** 2
    variance = loss.mean * (1 - loss.mean)
    if variance <= 0 or persistence >= 1:
        return 1.0
    return max(0.01, 1 + 2 * covariance * persistence / (1 - persistence) / variance)


def share_deviation(share: float, samples: int, *, inflated: float = 1.0) -> float:
    """Return the tolerance of a counted share around its probability; a count may be off by one event."""
    return DEVIATIONS * math.sqrt(share * (1 - share) * inflated / samples) + 1 / samples


def burst_deviation(mean_burst: float, bursts: int) -> float:
    """Return the tolerance of the mean of `bursts` lengths around `mean_burst`; lengths are nearly geometric."""
    return DEVIATIONS * mean_burst * math.sqrt(max(0.0, 1 - 1 / mean_burst)) / math.sqrt(bursts)


def packets_for_a_tenth(loss: Bernoulli | GilbertElliott) -> float:
    """Return the number of packets that determines the loss and its burst length to within 10 % (two standard
    deviations).
    """
    for_mean = 400 * (1 - loss.mean) * inflation(loss) / loss.mean
    if not isinstance(loss, GilbertElliott) or math.isinf(loss.mean_burst):
        return for_mean
    return max(for_mean, 400 * (1 - 1 / loss.mean_burst) * loss.mean_burst / loss.mean)


def spread(values_ns: list[int]) -> float:
    """Return half the width of the uniform distribution with the same deviation from its median: the jitter, in ns.

    It is twice the mean deviation of the nearest 95 %, which excludes effects of a busy host.
    """
    ordered = sorted(values_ns)
    middle = ordered[len(ordered) // 2]
    kept = sorted(abs(value - middle) for value in ordered)[: max(1, round(0.95 * len(ordered)))]
    return 2 / 0.95 * sum(kept) / len(kept)


def spread_deviation(jitter_ns: float, samples: int) -> float:
    """Return the tolerance of `spread` over `samples` draws: deviations are uniform between 0 and the jitter."""
    return DEVIATIONS * jitter_ns / math.sqrt(3 * samples)


def middle_deviation(jitter_ns: float, samples: int) -> float:
    """Return the tolerance of the median of `samples` uniform draws within +-`jitter_ns`."""
    return DEVIATIONS * jitter_ns / math.sqrt(samples)
