"""DeCo-SGD: chooses ratio and staleness together, so that computation hides communication with the least noise.

Of the pairs whose iteration takes no longer than computing, choose the one with the smallest noise factor phi; if that
requires more compression than allowed, choose the pair with the least expected time. With staleness tau the largest
ratio that hides is `min(B Tc, B (tau Tc - b)) / (expansion S)` for rate B, delay b, computing time Tc and dense message
S; it need not be the least noisy one, because at high staleness some factors grow with the ratio.

Source: Lu et al., arXiv 2507.17346: the joint choice and its building blocks. The paper's theorem constants and its
exact optimisation were not available; the choice above is derived from its abstract and the time model. Its noise
factor is known second-hand; as printed it diverges without compression, so the factor is replaceable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

from testbed.policies.cycle import MessageSize, iteration_s
from testbed.policies.link_estimate import LinkEstimate

NoiseFactor: TypeAlias = Callable[[float, int], float]
"""Slow-down of convergence for a ratio and a staleness, by theory or measurement."""


class DecoChoice(NamedTuple):
    """The parameters of all workers from some iteration on."""

    staleness: int
    ratio: float


def exponential(ratio: float, staleness: int) -> float:
    """Return `(1 - d) / (d (1 - d/2)^tau)`: the usual recursion of error feedback contracts by 1 - d/2."""
    return (1 - ratio) / (ratio * (1 - ratio / 2) ** staleness)


def printed(ratio: float, staleness: int) -> float:
    """Return `(1 - d) / (d (1 - d)^tau)`, as a digest of the paper prints it; infinite at ratio 1 and staleness above
    1.
    """
    power = 1 - staleness
    if ratio >= 1:
        return 0.0 if power > 0 else 1.0 if power == 0 else math.inf
    return (1 - ratio) ** power / ratio


def additive(ratio: float, staleness: int) -> float:
    """Return `4 (1 - d) / d^2 + tau^2`: the two effects separately, each with its own bound for bounded second
    moments.
    """
    return 4 * (1 - ratio) / ratio**2 + staleness**2


NOISE_FACTORS: Final[Mapping[str, NoiseFactor]] = {"exp": exponential, "printed": printed, "additive": additive}


LEAST_RATIO: Final = 1e-3
MOST_STALENESS: Final = 16
_RATIOS = 31
"""Number of ratios tried per staleness, log-spaced from the least."""
_LARGEST_SPARSE = math.nextafter(1.0, 0.0)
"""Largest ratio sent sparse; a ratio of 1 is sent dense."""
_CUTS = 50
"""Number of cuts of the interval around a minimum, to two thirds each, which leaves 1e-9 of it."""


def choose(
    link: LinkEstimate,
    exchanged: MessageSize,
    compute_ns: int,
    *,
    noise: NoiseFactor = exponential,
    noise_weight: float,
) -> DecoChoice:
    """Choose for one link: the slowest, with the longest computing time.

    `noise_weight` is c in N0 (1 + c sqrt(phi)), the iterations to a target; it matters only if no pair hides
    communication.
    """
    hidden = [
        DecoChoice(staleness, ratio)
        for staleness in range(MOST_STALENESS + 1)
        for ratio in _hiding_ratios(link, exchanged, compute_ns, staleness, noise)
    ]
    if hidden:
        return min(hidden, key=lambda each: (noise(each.ratio, each.staleness), each.staleness))
    return fastest(link, exchanged, compute_ns, noise=noise, noise_weight=noise_weight)


def _hiding_ratios(
    link: LinkEstimate, exchanged: MessageSize, compute_ns: int, staleness: int, noise: NoiseFactor
) -> Iterator[float]:
    """Yield ratios whose message and delay hide behind computing, including the least noisy ones: grid points, and
    minima of the noise between neighbours.
    """
    time_s = min(compute_ns, staleness * compute_ns - link.delay_ns) / 1e9
    fits_bytes = link.rate_bps / 8 * time_s
    if exchanged.dense_bytes <= fits_bytes:
        yield 1.0
    most = min(_LARGEST_SPARSE, fits_bytes / (exchanged.expansion * exchanged.dense_bytes))
    if most < LEAST_RATIO:
        return
    ratios = _spaced_ratios(most)
    yield from ratios
    noises = [noise(ratio, staleness) for ratio in ratios]
    for at in range(len(ratios)):
        before, after = max(0, at - 1), min(at + 1, len(ratios) - 1)
        if noises[at] <= min(noises[before], noises[after]):
            high, low = ratios[before], ratios[after]
            for _ in range(_CUTS):
                third = (high - low) / 3
                if noise(low + third, staleness) <= noise(high - third, staleness):
                    high -= third
                else:
                    low += third
            yield (low + high) / 2


def _spaced_ratios(most: float) -> list[float]:
    """Return log-spaced ratios from the most to the least."""
    step = math.log(LEAST_RATIO / most) / (_RATIOS - 1)
    return [most * math.exp(step * place) for place in range(_RATIOS)]


def fastest(
    link: LinkEstimate, exchanged: MessageSize, compute_ns: int, *, noise: NoiseFactor, noise_weight: float
) -> DecoChoice:
    """Choose the pair of the grid with the least time to a target: the fall-back, and the oracle in figures."""
    ratios = _spaced_ratios(1.0)

    def expected(each: DecoChoice) -> float:
        cycle_s = iteration_s(
            exchanged,
            each.ratio,
            each.staleness,
            compute_s=compute_ns / 1e9,
            rate_bps=link.rate_bps,
            delay_s=link.delay_ns / 1e9,
        )
        return cycle_s * (1 + noise_weight * math.sqrt(noise(each.ratio, each.staleness)))

    return min(itertools.starmap(DecoChoice, itertools.product(range(MOST_STALENESS + 1), ratios)), key=expected)


def approach(before: DecoChoice, wanted: DecoChoice, *, most_change: int = 2) -> DecoChoice:
    """Return the wanted choice, with staleness changed by at most `most_change`, so that the queue of aggregates
    neither drains nor grows abruptly.
    """
    staleness = min(max(wanted.staleness, before.staleness - most_change), before.staleness + most_change)
    return DecoChoice(staleness, wanted.ratio)
