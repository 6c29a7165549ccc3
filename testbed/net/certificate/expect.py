"""Compute what an exact link would show and how far chance may carry a count from it: arithmetic on a profile."""

from __future__ import annotations

import math

from testbed.profiles import Bernoulli, GilbertElliott, LinkProfile, Pipe

DEVIATIONS = 3.3
"""Standard deviations that a sampled quantity may be off: one good link in a thousand is refused."""


def serialisation_ns(pipe: Pipe | None, counted_bytes: float) -> float:
    """Return the time on the wire of `counted_bytes` of the profile's layer; 0 unshaped."""
    return counted_bytes * 8e9 / pipe.rate_bps if pipe else 0.0


def delay_ms(profile: LinkProfile, pipe: Pipe, packet_bytes: int) -> float:
    """Return the mean one-way time of an IP packet on an idle link; jitter is as often above as below."""
    return (pipe.delay_ns + serialisation_ns(pipe, packet_bytes + profile.overhead_bytes)) / 1e6


def rtt_ms(profile: LinkProfile, packet_bytes: int) -> float:
    """Return the round trip on an idle link of an IP packet that is answered by one of its size."""
    return sum(delay_ms(profile, pipe, packet_bytes) for pipe in profile.pipes)


def message_ms(profile: LinkProfile, pipe: Pipe, size: int, packet_payload_bytes: int) -> float:
    """Return the time from first byte sent to last byte read, where no congestion window makes the sender wait."""
    packets = -(-size // packet_payload_bytes)
    headers = profile.mtu - packet_payload_bytes + profile.overhead_bytes
    return (serialisation_ns(pipe, size + packets * headers) + pipe.delay_ns) / 1e6


def goodput_bps(profile: LinkProfile, pipe: Pipe, packet_payload_bytes: int) -> float:
    """Return the rate of TCP payload when all packets are full."""
    return pipe.rate_bps * packet_payload_bytes / (profile.mtu + profile.overhead_bytes)


def outgrown(profile: LinkProfile, pipe: Pipe) -> bool:
    """Tell whether a congestion control that backs off at losses must keep more under way than the buffer takes at
    once: then the control, not the link, decides how long a message takes.
    """
    product_bytes = pipe.rate_bps * profile.round_trip_ns / 8e9
    return profile.congestion_control != "bbr" and pipe.buffer_bytes < product_bytes


def wilson_interval(count: int, samples: float, deviations: float = DEVIATIONS) -> tuple[float, float]:
    """Return the lowest and the highest share that explain `count` of `samples` within `deviations` (Wilson, 1927)."""
    share, square = count / samples, deviations**2 / samples
    centre = (share + square / 2) / (1 + square)
    half = math.sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
    return max(0.0, centre - half), min(1.0, centre + half)


def inflation(loss: Bernoulli | GilbertElliott | None) -> float:
    """Return the variance of a count of losses over that of a binomial one of the same mean: bursts make neighbours
    alike.

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
    """Return how far the share of a counted event may lie from its probability; a count may be off by one event."""
    return DEVIATIONS * math.sqrt(share * (1 - share) * inflated / samples) + 1 / samples


def burst_deviation(mean_burst: float, bursts: int) -> float:
    """Return how far the mean of `bursts` lengths may lie from `mean_burst`; the lengths are close to geometric."""
    return DEVIATIONS * mean_burst * math.sqrt(max(0.0, 1 - 1 / mean_burst)) / math.sqrt(bursts)


def packets_for_a_tenth(loss: Bernoulli | GilbertElliott) -> float:
    """Return the number of packets that shows the loss, and the length of its bursts, to a tenth (two standard
    deviations).
    """
    for_mean = 400 * (1 - loss.mean) * inflation(loss) / loss.mean
    if not isinstance(loss, GilbertElliott) or math.isinf(loss.mean_burst):
        return for_mean
    return max(for_mean, 400 * (1 - 1 / loss.mean_burst) * loss.mean_burst / loss.mean)


def spread(values_ns: list[int]) -> float:
    """Half the width of the uniform distribution that would deviate as much from its median: the jitter, in ns.

    Twice the mean deviation of the nearest 95 %: what a busy host does to the rest is not the link's.
    """
    ordered = sorted(values_ns)
    middle = ordered[len(ordered) // 2]
    kept = sorted(abs(value - middle) for value in ordered)[: max(1, round(0.95 * len(ordered)))]
    return 2 / 0.95 * sum(kept) / len(kept)


def spread_deviation(jitter_ns: float, samples: int) -> float:
    """Return how far `spread` of `samples` draws may lie from the jitter: deviations are uniform between 0 and it."""
    return DEVIATIONS * jitter_ns / math.sqrt(3 * samples)


def middle_deviation(jitter_ns: float, samples: int) -> float:
    """Return how far the median of `samples` uniform draws within +-`jitter_ns` may lie from their middle."""
    return DEVIATIONS * jitter_ns / math.sqrt(samples)
