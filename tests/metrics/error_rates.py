"""Simulates how often a verdict of two arms is wrong: `python tests/metrics/error_rates.py`, a minute.

The truth lies on the bound, so every "holds" and every "fails" is an error. A comparison stops at the first look that
resolves it; otherwise seeds are added up to the next look. Seeds of both arms go together with a correlation, and the
second arm may spread more than the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

Losses = NDArray[np.float64]
"""(trials, seeds)."""
Excludes = Callable[[Losses, Losses, float], NDArray[np.bool_]]
"""Whether the interval of each trial excludes the truth, which is 0, at this two-sided error."""
LOOKS = ((3,), (5,), (10,), (3, 5), (5, 10), (5, 30), (3, 5, 5), (5, 10, 30))
CORRELATIONS, SPREADS = (0.0, 0.3, 0.6, 0.9), (1.0, 4.0)
NOMINAL = 0.05


def _student(values: Losses) -> tuple[Losses, Losses, float]:
    return values.mean(1), values.std(1, ddof=1) / math.sqrt(values.shape[1]), values.shape[1] - 1.0


def paired(ours: Losses, base: Losses, error: float) -> NDArray[np.bool_]:
    """Student's t of the differences of each seed's pair."""
    centre, spread, freedom = _student(ours - base)
    return np.asarray(np.abs(centre) > stdtrit(freedom, 1 - error / 2) * spread)


def _halves(ours: Losses, base: Losses, error: float) -> tuple[Losses, Losses, Losses]:
    centre, spread, freedom = _student(ours - base)
    parts = [arm.var(1, ddof=1) / arm.shape[1] for arm in (ours, base)]
    whole = sum(parts)
    welch = whole**2 / sum(part**2 / (arm.shape[1] - 1) for part, arm in zip(parts, (ours, base), strict=True))
    return centre, stdtrit(freedom, 1 - error / 2) * spread, stdtrit(welch, 1 - error / 2) * np.sqrt(whole)


def narrower(ours: Losses, base: Losses, error: float) -> NDArray[np.bool_]:
    """The narrower of the paired interval and Welch's: the rule until November 2026."""
    centre, pairs, samples = _halves(ours, base, error)
    return np.asarray(np.abs(centre) > np.minimum(pairs, samples))


def wider(ours: Losses, base: Losses, error: float) -> NDArray[np.bool_]:
    """The wider of both."""
    centre, pairs, samples = _halves(ours, base, error)
    return np.asarray(np.abs(centre) > np.maximum(pairs, samples))


def error_rate(
    excludes: Excludes, looks: Sequence[int], errors: Sequence[float], alike: float, spread: float, trials: int
) -> float:
    """Return the share of comparisons that some look resolves. `looks`: seeds of each arm; `errors`: of each look."""
    rng = np.random.default_rng((*looks, round(100 * alike), round(spread)))
    shared, *own = rng.normal(size=(3, trials, max(looks)))
    ours, base = (math.sqrt(alike) * shared + math.sqrt(1 - alike) * each for each in own)
    resolved = np.zeros(trials, dtype=bool)
    for seeds, error in zip(looks, errors, strict=True):
        resolved |= excludes(ours[:, :seeds], spread * base[:, :seeds], error)
    return float(resolved.mean())


def worst(excludes: Excludes, looks: Sequence[int], errors: Sequence[float], trials: int) -> float:
    """Return the largest error over correlations and spreads."""
    return max(
        error_rate(excludes, looks, errors, alike, spread, trials)
        for alike, spread in itertools.product(CORRELATIONS, SPREADS)
    )


def main() -> None:
    print("largest error over correlations 0 to 0.9 and spreads 1 and 4, nominal 5 %")
    print("seeds at looks  before  now   wider/looks  first look at 5 %, last at 5 %/looks")
    for looks in LOOKS:
        each, shared = [NOMINAL] * len(looks), [NOMINAL / len(looks)] * len(looks)
        late = [NOMINAL, *shared[1:]]
        rules = ((narrower, each), (paired, shared), (wider, shared), (paired, late))
        rates = [worst(rule, looks, errors, 40_000) for rule, errors in rules]
        print(f"{', '.join(map(str, looks)):14}", "  ".join(f"{100 * rate:5.1f} %" for rate in rates))


if __name__ == "__main__":
    main()
