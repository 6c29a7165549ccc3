"""FedLuck: chooses local steps and ratio of each device separately, once.

Device i takes `step_s` for a local step and `full_s` to send a message of ratio 1; a round of k steps and ratio d then
takes `k step_s + d full_s`. The server aggregates every `period_s`. The objective to minimise is that of the released
code,

    ((k step_s + d full_s)^2 (2 - d) + period_s^2) / (k d^(1/2) period_s^2).

The appendix prints d without the root and omits the period; its minimum is at d = 1 for every device of the two
released configurations that were tried. The objective has two basins, so the search covers the whole grid.

Source: FedLuck, arXiv 2407.05125, Euro-Par 2024; github.com/Aegsteh-T/FedLuck_Euro_Par, AsyncClient.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from testbed.errors import SpecError

MOST_LOCAL_STEPS = 60
_LEAST_LOCAL_STEPS = 2
_RATIOS = 100


class DeviceChoice(NamedTuple):
    """The parameters of a device's rounds."""

    local_steps: int
    ratio: float


def objective(
    local_steps: npt.ArrayLike, ratio: npt.ArrayLike, *, step_s: float, full_s: float, period_s: float
) -> npt.NDArray[np.float64]:
    """Return the objective, for arrays that broadcast."""
    k, d = np.asarray(local_steps, np.float64), np.asarray(ratio, np.float64)
    round_s = k * step_s + d * full_s
    return np.asarray((round_s**2 * (2 - d) + period_s**2) / (k * d**0.5 * period_s**2))


def choose(step_s: float, full_s: float, period_s: float) -> DeviceChoice:
    """Choose among 2 to 60 local steps and ratios of 0.01 to 1.

    `full_s` is the time of a message of ratio 1 in the codec's sparse format, with positions. SpecError for a time that
    is not positive.
    """
    if min(step_s, full_s, period_s) <= 0:
        raise SpecError(f"FedLuck needs positive times, found {step_s:g}, {full_s:g} and {period_s:g} s")
    steps = np.arange(_LEAST_LOCAL_STEPS, MOST_LOCAL_STEPS + 1)
    ratios = np.arange(1, _RATIOS + 1) / _RATIOS
    values = objective(steps[:, None], ratios[None, :], step_s=step_s, full_s=full_s, period_s=period_s)
    step, ratio = np.unravel_index(int(values.argmin()), values.shape)
    return DeviceChoice(int(steps[step]), float(ratios[ratio]))


def staleness(choice: DeviceChoice, *, step_s: float, full_s: float, period_s: float) -> int:
    """Return the number of periods after which the server has a round's message."""
    return math.ceil((choice.local_steps * step_s + choice.ratio * full_s) / period_s)
