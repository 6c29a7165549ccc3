"""Which packets are lost: independently of each other, or in bursts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from testbed.frozen import Frozen
from testbed.profiles.ranges import Chance, ShareBelowAll, SomeShare


class Bernoulli(Frozen):
    """Each packet is lost with the same probability, independent of all others."""

    model: Literal["bernoulli"] = "bernoulli"
    probability: SomeShare

    @property
    def mean(self) -> float:
        """The share of packets that is lost."""
        return self.probability

    @property
    def mean_burst(self) -> float:
        """The mean number of packets lost in a row."""
        return 1 / (1 - self.probability)


class GilbertElliott(Frozen):
    """Packets are lost in bursts: there is a good and a bad state (Gilbert 1960, Elliott 1963).

    Each packet is drawn in the present state, then the state may change. tc's `loss gemodel p r 1-h 1-k` takes the same
    four numbers in this order, and so does the kernel.
    """

    model: Literal["gilbert-elliott"] = "gilbert-elliott"
    enter_bad: Chance
    """p: probability, at each packet, to go from good to bad."""
    leave_bad: Chance
    """r: probability, at each packet, to go from bad to good."""
    lost_in_bad: Chance
    """1-h: share of packets lost in the bad state."""
    lost_in_good: ShareBelowAll
    """1-k: share of packets lost in the good state."""

    @property
    def _bad(self) -> float:
        return self.enter_bad / (self.enter_bad + self.leave_bad)

    @property
    def mean(self) -> float:
        """The share of packets that is lost in the long run."""
        return self._bad * self.lost_in_bad + (1 - self._bad) * self.lost_in_good

    @property
    def mean_burst(self) -> float:
        """The mean number of packets lost in a row: share lost / share that is lost and follows one that was not."""
        bad, b, g = self._bad, self.lost_in_bad, self.lost_in_good
        after_bad = (1 - self.leave_bad) * b + self.leave_bad * g
        after_good = (1 - self.enter_bad) * g + self.enter_bad * b
        both = bad * b * after_bad + (1 - bad) * g * after_good
        return self.mean / (self.mean - both) if self.mean > both else float("inf")


Loss = Annotated[Bernoulli | GilbertElliott, Field(discriminator="model")]
