"""gamma-FedHT: a hard threshold on model updates that follows the stepsize, so that the ratio stays what it was.

Updates shrink with a decaying stepsize, so a fixed threshold keeps ever less of them. What error feedback holds back is
below the threshold in each of d places, at most d t^2 squared, and enters the analysis as the clients' drift does, of
order gamma^2; so a threshold in proportion to gamma keeps FedAvg's rate.

Source: arXiv 2505.12479, INFOCOM 2025, of which the abstract was at hand: the formula is derived from its published
properties. Thresholds from an expected count: Sahu et al., NeurIPS 2021.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from testbed.errors import SpecError


def threshold(first: float, stepsize: float, first_stepsize: float, *, power: float = 1.0) -> float:
    """Return the threshold at a stepsize: `first` at the first one, and in proportion from there on.

    `power` 0 is the fixed threshold. SpecError unless thresholds and stepsizes are positive.
    """
    if min(first, stepsize, first_stepsize) <= 0:
        raise SpecError(f"thresholds and stepsizes are positive, not {first:g}, {stepsize:g} and {first_stepsize:g}")
    return float(first * (stepsize / first_stepsize) ** power)


def first_threshold(update: npt.NDArray[np.float32], ratio: float) -> float:
    """Return the threshold that this share of an update's values reaches: what a first round is calibrated with.

    SpecError for an empty update, one of zeros, or a ratio that is not above 0 and at most 1.
    """
    if not update.size or not 0 < ratio <= 1 or not (sizes := np.abs(update)).any():
        raise SpecError(
            f"a threshold for a ratio of {ratio:g} follows from an update that is not zero, of {update.size} values"
        )
    return max(float(np.quantile(sizes, 1 - ratio)), float(np.finfo(np.float32).tiny))
