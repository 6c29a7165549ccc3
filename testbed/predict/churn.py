"""Churn: when sites are away, and hence which replicas take part in which step of a training.

A site alternately stays and is away, for exponentially distributed times whose means are in scenarios.toml; so its
return does not depend on when it left. At the beginning it is away with its stationary probability. The absences depend
only on the seed, not on the training.

A step takes place with the replicas whose sites are all present at its beginning. A site that leaves during a step
completes it first. If no replica is complete, the others wait for one. A replica that missed a step lacks the weights
of that step, and must be restored when it returns (`jobs.hybrid.RoundTable`); if no step took place in its absence, it
still has the current weights.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from testbed.workloads.shards import uniform

_FEW = 64
"""Number of a site's changes that are drawn initially."""


class Churn(NamedTuple):
    """Mean times for which a site stays and is away, in seconds."""

    stays_s: float
    away_s: float

    @property
    def share(self) -> float:
        """Share of time in which the site is present."""
        return self.stays_s / (self.stays_s + self.away_s)


class Presence:
    """Presence of one site over time."""

    def __init__(self, churn: Churn | None, seed: int, site: int) -> None:
        """`churn` None: the site is always present."""
        self._churn, self._purpose = churn, f"absences {seed} site {site}"
        self._changes_s: list[float] = []
        self._first = True
        if churn is not None:
            self._draw(_FEW)

    def _draw(self, count: int) -> None:
        assert self._churn is not None
        first, *rest = uniform(1 + count, self._purpose).tolist()
        self._first, now, there = first < self._churn.share, 0.0, first < self._churn.share
        self._changes_s.clear()
        for draw in rest:
            now -= math.log(draw) * (self._churn.stays_s if there else self._churn.away_s)
            there = not there
            self._changes_s.append(now)

    def there(self, at_s: float) -> bool:
        """Return whether the site is present."""
        return (self._changed(at_s) % 2 == 0) == self._first

    def until_s(self, at_s: float) -> float:
        """Return when it next leaves or returns."""
        changed = self._changed(at_s)
        return self._changes_s[changed] if self._churn is not None else math.inf

    def _changed(self, at_s: float) -> int:
        while self._churn is not None and self._changes_s[-1] <= at_s:
            self._draw(2 * len(self._changes_s))
        return bisect.bisect_right(self._changes_s, at_s)


class ChurnRound(NamedTuple):
    """Participants of a step, by number of the replica."""

    away: tuple[int, ...] = ()
    returning: tuple[int, ...] = ()


class Held(NamedTuple):
    """A step of a training."""

    begin_s: float
    waited_s: float
    """Time spent waiting for a complete replica before the step."""
    lasts_s: float
    who: ChurnRound


def rounds(
    replicas: Sequence[Sequence[int]],
    sites: Mapping[int, Presence],
    lasts: Callable[[ChurnRound], float],
    *,
    server: bool,
) -> Iterator[Held]:
    """Yield the steps of a training, endlessly. `replicas`: the sites of each; `lasts`: returns the duration of a step
    in seconds; `server`: whether there is a server, which always has the weights.
    """
    now, missed = 0.0, frozenset[int]()
    while True:
        begin = now
        while True:
            whole = [each for each, own in enumerate(replicas) if all(sites[site].there(begin) for site in own)]
            if any(server or each not in missed for each in whole):
                break
            begin = min(sites[site].until_s(begin) for own in replicas for site in own)
        away = frozenset(range(len(replicas))) - set(whole)
        who = ChurnRound(tuple(sorted(away)), tuple(sorted(missed - away)))
        yield Held(begin, begin - now, lasts(who), who)
        now, missed = begin + lasts(who), away
