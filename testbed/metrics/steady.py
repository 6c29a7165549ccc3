"""Where the steady state begins: which of the measured steps count.

The rule: the cell's warm-up steps are out. Of the others the first d are out when they are not of one piece with those after
them: d is the cut at which the ranks of the steps before and after differ most (a maximally selected rank statistic, Miller and
Siegmund 1982), and they differ if a Mann-Whitney test says so with p < 0.01, divided by the number of possible cuts (Bonferroni).
The rule is used again on what remains. Ranks are blind to how far an outlier lies out, so no single step is ever taken out.

A cut behind the middle is not made: a run that changes so late has no steady state that it reached, and all its steps count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from testbed.metrics.steps import Step, measured

SIGNIFICANCE = 0.01


def _cut(seconds: Sequence[float]) -> int:
    """Before which of these steps they change most, and not by chance; 0: they do not."""
    from scipy.stats import mannwhitneyu, rankdata

    count = len(seconds)
    if count < 2:
        return 0
    before = np.arange(1, count)
    excess = np.cumsum(rankdata(seconds))[:-1] - before * (count + 1) / 2
    cut = int(np.argmax(np.abs(excess) / np.sqrt(before * (count - before)))) + 1
    chance = float(mannwhitneyu(seconds[:cut], seconds[cut:]).pvalue)
    # All values equal: the test has nothing to rank.
    return cut if math.isfinite(chance) and chance * (count - 1) < SIGNIFICANCE else 0


def first_steady(seconds: Sequence[float]) -> int:
    """How many of the first of these measured steps are before the steady state; never more than half of them."""
    begin = 0
    while (cut := _cut(seconds[begin:])) and begin + cut <= len(seconds) / 2:
        begin += cut
    return begin


def steady(steps: Iterable[Step]) -> list[Step]:
    """Of all steps of a run those that count for its times."""
    chosen = measured(steps)
    return chosen[first_steady([step.seconds for step in chosen]) :]
