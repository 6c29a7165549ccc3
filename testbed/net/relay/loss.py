"""Loss models: is packet number n lost? They are asked once about every packet that is offered, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.net.relay.draws import Draws, threshold

_EMISSION, _TRANSITION = 0, 1


class LossModel:
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
        if moves and self._transition.at(number) < moves:
            self.bad = not self.bad
        return self._emission.at(number) < loses


def loss_model(
    asked: Mapping[str, Any] | None, seed: int, stream: int, before: LossModel | None = None
) -> LossModel | None:
    """Make the model of a `testbed.profiles.Loss` (as a table), with the state of `before`, which it replaces.

    Independent losses are those of a good state that is never left.
    """
    if asked is None:
        return None
    if asked["model"] == "bernoulli":
        return LossModel(seed, stream, enter_bad=0, leave_bad=0, lost_in_bad=0, lost_in_good=asked["probability"])
    model = LossModel(seed, stream, **{name: value for name, value in asked.items() if name != "model"})
    model.bad = before is not None and before.bad
    return model
