"""Sites come and go: who is away when, and so who takes part in which step of a training.

A site stays for so long on average, and then is away for so long (scenarios.toml). Both are drawn from exponential
distributions, so that when it left says nothing of when it comes back; at the beginning it is away as likely as ever.
Everything depends on the seed and nothing else: the same seed, the same absences, whatever is trained meanwhile.

A step takes place with those replicas all of whose sites are there when it begins. Who leaves during a step ends it
first. Where no replica is whole, the others wait for one that is. A replica that missed a step lacks the weights that
this made, and returns (`hybrid.RoundTable`); where nobody missed one, whoever was away has kept its own.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from testbed.workloads.shards import uniform

_FEW = 64
"""Of a site's changes, how many are drawn at first."""


class Churn(NamedTuple):
    """How long a site stays, and how long it is away, on average, in seconds."""

    stays_s: float
    away_s: float

    @property
    def share(self) -> float:
        """The share of time in which it is there."""
        return self.stays_s / (self.stays_s + self.away_s)


class Presence:
    """When one site is there."""

    def __init__(self, churn: Churn | None, seed: int, site: int) -> None:
        """`churn` None: it is always there."""
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
        """Say whether it is there."""
        return (self._changed(at_s) % 2 == 0) == self._first

    def until_s(self, at_s: float) -> float:
        """Return when it leaves or comes next."""
        changed = self._changed(at_s)
        return self._changes_s[changed] if self._churn is not None else math.inf

    def _changed(self, at_s: float) -> int:
        while self._churn is not None and self._changes_s[-1] <= at_s:
            self._draw(2 * len(self._changes_s))
        return bisect.bisect_right(self._changes_s, at_s)


class ChurnRound(NamedTuple):
    """Who takes part in a step, by number of the replica."""

    away: tuple[int, ...] = ()
    returning: tuple[int, ...] = ()


class Held(NamedTuple):
    """A step that took place."""

    begin_s: float
    waited_s: float
    """For a replica to be whole, before it."""
    lasts_s: float
    who: ChurnRound


def rounds(
    replicas: Sequence[Sequence[int]],
    sites: Mapping[int, Presence],
    lasts: Callable[[ChurnRound], float],
    *,
    server: bool,
) -> Iterator[Held]:
    """Yield the steps of a training, without end. `replicas`: the sites that each is at; `lasts`: how long a step takes
    in seconds; `server`: there is one, which has the weights whoever is away.
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
