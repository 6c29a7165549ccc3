"""Loss models: independent losses, or bursts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from testbed.frozen import Frozen
from testbed.profiles.ranges import Chance, ShareBelowAll


class Bernoulli(Frozen):
    """Each packet is lost with the same probability, independent of all others. Probability 1 is an outage."""

    model: Literal["bernoulli"] = "bernoulli"
    probability: Chance

    @property
    def mean(self) -> float:
        """Share of lost packets."""
        return self.probability

    @property
    def mean_burst(self) -> float:
        """Mean number of packets lost in a row."""
        return 1 / (1 - self.probability) if self.probability < 1 else float("inf")


class GilbertElliott(Frozen):
    """Packets are lost in bursts: a two-state model, good and bad (Gilbert 1960, Elliott 1963).

    Each packet's loss is drawn in the current state, then the state may change. tc's `loss gemodel p r 1-h 1-k` and the
    kernel take the same four numbers in this order.
    """

    model: Literal["gilbert-elliott"] = "gilbert-elliott"
    enter_bad: Chance
    """p: probability per packet of a transition from good to bad."""
    leave_bad: Chance
    """r: probability per packet of a transition from bad to good."""
    lost_in_bad: Chance
    """1-h: share of packets lost in the bad state."""
    lost_in_good: ShareBelowAll
    """1-k: share of packets lost in the good state."""

    @property
    def _bad(self) -> float:
        return self.enter_bad / (self.enter_bad + self.leave_bad)

    @property
    def mean(self) -> float:
        """Long-run share of lost packets."""
        return self._bad * self.lost_in_bad + (1 - self._bad) * self.lost_in_good

    @property
    def mean_burst(self) -> float:
        """The mean number of packets lost in a row: share of lost packets / share of lost packets that follow a
        delivered one.
        """
        bad, b, g = self._bad, self.lost_in_bad, self.lost_in_good
        after_bad = (1 - self.leave_bad) * b + self.leave_bad * g
        after_good = (1 - self.enter_bad) * g + self.enter_bad * b
        both = bad * b * after_bad + (1 - bad) * g * after_good
        return self.mean / (self.mean - both) if self.mean > both else float("inf")


Loss = Annotated[Bernoulli | GilbertElliott, Field(discriminator="model")]
