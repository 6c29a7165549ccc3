"""Division of examples among workers that train separately, and into batches. No torch.

A shard is one worker's examples. Sizes follow data shares; classes are mixed equally, or skewed: each worker's mix is
drawn from a Dirichlet distribution, the usual model of label skew (Hsu, Qi and Brown, arXiv 1909.06335). Everything
depends only on the seed.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from testbed import keyed
from testbed.errors import SpecError
from testbed.workloads.windows import shuffled

Indices = npt.NDArray[np.int64]


def uniform(count: int, purpose: str) -> npt.NDArray[np.float64]:
    """Return `count` numbers in (0, 1) that depend only on `purpose`."""
    raw = np.random.Philox(key=keyed.key(purpose)).random_raw(count)
    return (np.asarray(raw >> np.uint64(11), np.float64) + 0.5) * 2.0**-53


def data_shares(workers: int, skew: float) -> tuple[float, ...]:
    """Return geometrically decreasing shares with the sum 1, the first `skew` times the last.

    SpecError for no workers, or a skew below 1.
    """
    if workers < 1 or skew < 1:
        raise SpecError(
            f"{workers} workers with a skew of {skew:g}: need at least one worker, and a skew of at least 1"
        )
    shares = np.geomspace(skew, 1.0, workers)
    return tuple((shares / shares.sum()).tolist())


def apportion(total: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Divide `total` in proportion to the shares, at least 1 each, by largest remainders; the first wins ties.

    SpecError if `total` is less than 1 each, or a share is not positive.
    """
    if total < len(shares) or not shares or min(shares) <= 0:
        raise SpecError(f"cannot divide {total} by shares {list(shares)}: each must be positive and get at least 1")
    exact = [(total - len(shares)) * share / sum(shares) for share in shares]
    parts = [int(part) for part in exact]
    rest = total - len(shares) - sum(parts)
    for part in sorted(range(len(shares)), key=lambda i: parts[i] - exact[i])[:rest]:
        parts[part] += 1
    return tuple(part + 1 for part in parts)


def class_mixes(workers: int, classes: int, alpha: float, seed: int) -> npt.NDArray[np.float64]:
    """Draw each worker's shares of the classes, (workers, classes), from a Dirichlet distribution of `alpha` for every
    class: a small alpha means few classes each. SpecError unless alpha is above 0.
    """
    if not alpha > 0:
        raise SpecError(f"alpha is {alpha:g}; it must be above 0, or unset to mix classes equally")
    from scipy.special import gammaincinv  # imported here: workers with texts do not need it

    gammas = gammaincinv(alpha, uniform(workers * classes, f"class mixes {seed}")).reshape(workers, classes)
    gammas = np.maximum(gammas, np.finfo(np.float64).tiny)
    return np.asarray(gammas / gammas.sum(axis=1, keepdims=True), np.float64)


def divide(labels: Indices, shares: Sequence[float], *, alpha: float | None, seed: int) -> tuple[Indices, ...]:
    """Divide examples, as indices into `labels`, among one worker per share; each shard is ascending, and together they
    have all examples.

    `alpha` None: classes are mixed randomly. Otherwise workers take turns in proportion to their shares, each drawing
    from its mix a class that is still available; sizes are exact, and the last examples go wherever there is room.
    Raises SpecError like `apportion` and `class_mixes`.
    """
    sizes = apportion(len(labels), shares)
    if alpha is None:
        order = shuffled(len(labels), f"shards {seed}")
        ends = list(itertools.accumulate(sizes))
        return tuple(np.sort(order[end - size : end]) for size, end in zip(sizes, ends, strict=True))
    classes = int(labels.max()) + 1
    mixes = class_mixes(len(shares), classes, alpha, seed)
    left = [list(np.flatnonzero(labels == each)) for each in range(classes)]
    left = [[places[i] for i in shuffled(len(places), f"class {each} {seed}")] for each, places in enumerate(left)]
    turns = np.repeat(np.arange(len(shares)), sizes)[shuffled(len(labels), f"turns {seed}")]
    taken: list[list[int]] = [[] for _ in shares]
    for worker, draw in zip(turns.tolist(), uniform(len(labels), f"classes {seed}").tolist(), strict=True):
        sums = list(itertools.accumulate(mixes[worker, each] if left[each] else 0.0 for each in range(classes)))
        chosen = bisect.bisect_right(sums, draw * sums[-1])
        taken[worker].append(int(left[chosen].pop()))
    return tuple(np.array(sorted(places), np.int64) for places in taken)


class ShardBatches:
    """The batches of one worker: its shard in a new order each epoch, epochs following without a gap."""

    def __init__(self, shard: Indices, batch_size: int, *, seed: int, worker: int) -> None:
        """SpecError for an empty shard or batch."""
        if not len(shard) or batch_size < 1:
            raise SpecError(
                f"worker {worker}: {len(shard)} examples in batches of {batch_size}; both must be at least 1"
            )
        self._shard, self._size, self._purpose = shard, batch_size, f"shard order {seed} {worker}"
        self._orders: dict[int, Indices] = {}

    def batch(self, step: int) -> Indices:
        """Return the examples of a step, (batch_size,): random access, always the same."""
        epochs, places = np.divmod(np.arange(step * self._size, (step + 1) * self._size), len(self._shard))
        wanted = range(int(epochs[0]), int(epochs[-1]) + 1)
        self._orders = {epoch: self._orders[epoch] if epoch in self._orders else self._order(epoch) for epoch in wanted}
        return np.concatenate([self._orders[epoch][places[epochs == epoch]] for epoch in wanted])

    def _order(self, epoch: int) -> Indices:
        return self._shard[shuffled(len(self._shard), f"{self._purpose} {epoch}")]
