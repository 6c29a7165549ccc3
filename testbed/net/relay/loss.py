"""Loss models: is packet number n lost? They are asked once about every packet that is offered, in order."""

from __future__ import annotations

from typing import Any, Protocol

from testbed.net.relay.draws import Draws, threshold

_EMISSION, _TRANSITION = 0, 1


class LossModel(Protocol):
    """What a shaper asks."""

    def lost(self, number: int) -> bool:
        """Say whether that packet is lost."""


class BernoulliLoss:
    """Each packet is lost with the same probability."""

    def __init__(self, seed: int, stream: int, probability: float) -> None:
        self._draws, self._threshold = Draws(seed, stream, _EMISSION), threshold(probability)

    def lost(self, number: int) -> bool:
        """Draw without memory."""
        return self._draws.at(number) < self._threshold


class GilbertElliottLoss:
    """A good and a bad state.

    A packet is drawn in the present state, then the state may change, as in the kernel's netem.
    """

    def __init__(
        self, seed: int, stream: int, *, enter_bad: float, leave_bad: float, lost_in_bad: float, lost_in_good: float
    ) -> None:
        """Begin in the good state. The four numbers are those of `testbed.profiles.GilbertElliott`."""
        self._emission, self._transition = Draws(seed, stream, _EMISSION), Draws(seed, stream, _TRANSITION)
        self._thresholds = (
            (threshold(lost_in_good), threshold(enter_bad)),
            (threshold(lost_in_bad), threshold(leave_bad)),
        )
        self.bad = False

    def lost(self, number: int) -> bool:
        """Draw in the present state, and move the state on."""
        loses, moves = self._thresholds[self.bad]
        if self._transition.at(number) < moves:
            self.bad = not self.bad
        return self._emission.at(number) < loses


def loss_model(
    asked: dict[str, Any] | None, seed: int, stream: int, before: LossModel | None = None
) -> LossModel | None:
    """Make the model of a `testbed.profiles.Loss` (as a table), with the state of `before`, which it replaces."""
    if asked is None:
        return None
    numbers = {name: value for name, value in asked.items() if name != "model"}
    if asked["model"] == "bernoulli":
        return BernoulliLoss(seed, stream, **numbers)
    model = GilbertElliottLoss(seed, stream, **numbers)
    if isinstance(before, GilbertElliottLoss):
        model.bad = before.bad
    return model
