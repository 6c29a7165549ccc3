"""Loss models: decide whether packet number n is lost. Called once per offered packet, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
CERTAIN = 1 << 64
"""A threshold above every draw."""


def mix(value: int) -> int:
    """Mix 64 bits well: splitmix64's finaliser (Steele, Lea, Flood: Fast splittable generators, 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def threshold(probability: float) -> int:
    """Convert a probability to a threshold for draws."""
    return round(probability * CERTAIN)


class Draws:
    """One sequence of draws, for one kind of effect on one direction of one link."""

    def __init__(self, seed: int, stream: int, kind: int) -> None:
        """`stream` distinguishes directions with the same seed, `kind` the effects on one of them."""
        self._key = mix(mix(mix(seed & _MASK) + stream * _GOLDEN & _MASK) + kind * _GOLDEN & _MASK)

    def at(self, number: int) -> int:
        """Return the draw of packet `number`, uniform in 0 .. 2**64 - 1."""
        return mix(self._key + number * _GOLDEN & _MASK)


_EMISSION, _TRANSITION = 0, 1


class LossModel:
    """A two-state model, good and bad.

    A packet's loss is drawn in the current state, then the state may change, as in the kernel's netem.
    """

    def __init__(
        self, seed: int, stream: int, *, enter_bad: float, leave_bad: float, lost_in_bad: float, lost_in_good: float
    ) -> None:
        """Start in the good state. The four numbers are those of `testbed.profiles.GilbertElliott`."""
        self._emission, self._transition = Draws(seed, stream, _EMISSION), Draws(seed, stream, _TRANSITION)
        self._thresholds = (
            (threshold(lost_in_good), threshold(enter_bad)),
            (threshold(lost_in_bad), threshold(leave_bad)),
        )
        self.bad = False

    def lost(self, number: int) -> bool:
        """Draw in the current state, and advance the state."""
        loses, moves = self._thresholds[self.bad]
        if moves and self._transition.at(number) < moves:
            self.bad = not self.bad
        return self._emission.at(number) < loses


def loss_model(
    asked: Mapping[str, Any] | None, seed: int, stream: int, before: LossModel | None = None
) -> LossModel | None:
    """Make the model of a `testbed.profiles.Loss` (as a table), taking over the state of `before`.

    Independent losses are a model that never leaves the good state.
    """
    if asked is None:
        return None
    if asked["model"] == "bernoulli":
        return LossModel(seed, stream, enter_bad=0, leave_bad=0, lost_in_bad=0, lost_in_good=asked["probability"])
    model = LossModel(seed, stream, **{name: value for name, value in asked.items() if name != "model"})
    model.bad = before is not None and before.bad
    return model
