"""Loss models: is packet number n lost? Asked once for every packet that is offered, in order, whatever else happens to it."""

from __future__ import annotations

from typing import Any, Protocol

from testbed.net.relay.draws import Draws, threshold

_EMISSION, _TRANSITION = 0, 1


class Loss(Protocol):
    """What a shaper asks."""

    def lost(self, number: int) -> bool:
        """Whether that packet is lost."""


class Bernoulli:
    """Each packet with the same probability."""

    __slots__ = ("_draws", "_threshold")

    def __init__(self, seed: int, stream: int, probability: float) -> None:
        self._draws, self._threshold = Draws(seed, stream, _EMISSION), threshold(probability)

    def lost(self, number: int) -> bool:
        """A draw that has no memory."""
        return self._draws.at(number) < self._threshold


class GilbertElliott:
    """A good and a bad state. A packet is drawn in the present state, then the state may change, as in the kernel's netem."""

    __slots__ = ("_emission", "_thresholds", "_transition", "bad")

    def __init__(
        self, seed: int, stream: int, *, enter_bad: float, leave_bad: float, lost_in_bad: float, lost_in_good: float
    ) -> None:
        """It begins in the good state. The four numbers are those of `testbed.profiles.GilbertElliott`."""
        self._emission, self._transition = Draws(seed, stream, _EMISSION), Draws(seed, stream, _TRANSITION)
        self._thresholds = (
            (threshold(lost_in_good), threshold(enter_bad)),
            (threshold(lost_in_bad), threshold(leave_bad)),
        )
        self.bad = False

    def lost(self, number: int) -> bool:
        """Moves the state on."""
        loses, moves = self._thresholds[self.bad]
        if self._transition.at(number) < moves:
            self.bad = not self.bad
        return self._emission.at(number) < loses


def loss_model(asked: dict[str, Any] | None, seed: int, stream: int, before: Loss | None = None) -> Loss | None:
    """The model of a record (`testbed.profiles.Loss` as a table), with the state of the one that was in place `before` it."""
    if asked is None:
        return None
    numbers = {name: value for name, value in asked.items() if name != "model"}
    if asked["model"] == "bernoulli":
        return Bernoulli(seed, stream, **numbers)
    model = GilbertElliott(seed, stream, **numbers)
    if isinstance(before, GilbertElliott):
        model.bad = before.bad
    return model
