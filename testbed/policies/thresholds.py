"""gamma-FedHT: a hard threshold on model updates that follows the stepsize, so that the ratio stays constant.

Updates shrink with a decaying stepsize, so a fixed threshold keeps ever fewer values. The residual of error feedback is
below the threshold t in each of d places, with a squared norm of at most d t^2, and enters the analysis like the
clients' drift, of order gamma^2; so a threshold proportional to gamma preserves FedAvg's rate.

Source: arXiv 2505.12479, INFOCOM 2025, of which only the abstract was available: the formula is derived from its
published properties. Thresholds from an expected count: Sahu et al., NeurIPS 2021.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from testbed.errors import SpecError


def threshold(first: float, stepsize: float, first_stepsize: float, *, power: float = 1.0) -> float:
    """Return the threshold at a stepsize: `first` at the first one, then proportional to the stepsize.

    `power` 0 is the fixed threshold. SpecError unless thresholds and stepsizes are positive.
    """
    if min(first, stepsize, first_stepsize) <= 0:
        raise SpecError(f"thresholds and stepsizes must be positive: {first:g}, {stepsize:g}, {first_stepsize:g}")
    return float(first * (stepsize / first_stepsize) ** power)


def first_threshold(update: npt.NDArray[np.float32], ratio: float) -> float:
    """Return the threshold reached by this share of an update's values, to calibrate on a first round.

    SpecError for an empty update, one of zeros, or a ratio that is not above 0 and at most 1.
    """
    if not update.size or not 0 < ratio <= 1 or not (sizes := np.abs(update)).any():
        raise SpecError(
            f"cannot compute a threshold for a ratio of {ratio:g} from an empty or zero update ({update.size} values)"
        )
    return max(float(np.quantile(sizes, 1 - ratio)), float(np.finfo(np.float32).tiny))
