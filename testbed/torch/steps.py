"""Detects where the steps of a job end: for the observer, for paces, and for codecs whose state is from the same
position in the previous step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

from torch.optim.optimizer import register_optimizer_step_post_hook

from testbed.errors import CodecError

MOST: Final = 1 << 16
"""Limit of messages of one kind in a step: with more, the end of a step was probably never marked."""
_ended = 0
_listeners: list[Callable[[], object]] = []


def step() -> None:
    """Mark the end of a step of the job. Codecs do not need this in a job with an optimiser of torch, whose `step()`
    marks it.
    """
    global _ended
    _ended += 1
    for listener in _listeners:
        listener()


def listen(listener: Callable[[], object]) -> None:
    """Call `listener` whenever the job marks the end of a step."""
    _listeners.append(listener)


@functools.cache
def follow_optimisers() -> None:
    """End a step at each step of an optimiser."""

    def stepped(*_: object) -> None:
        global _ended
        _ended += 1

    register_optimizer_step_post_hook(stepped)


class Position:
    """Counts messages of one kind by step. Both ends count alike: steps without such a message do not count."""

    def __init__(self, steps: int = 0) -> None:
        """`steps`: the number of earlier steps with such messages."""
        follow_optimisers()
        self._seen, self._step, self._next = _ended, steps, 0

    @property
    def steps(self) -> int:
        """The number of steps with such messages, valid between two steps."""
        return self._step + (self._next > 0)

    def advance(self) -> tuple[int, int]:
        """Return the step of the next message, and its number in the step. CodecError if steps never end."""
        if self._seen != _ended:
            self._seen, self._step, self._next = _ended, self.steps, 0
        if self._next >= MOST:
            raise CodecError(
                f"{MOST} messages of one kind, and no step has ended; call testbed.torch.step() at the end of each step"
            )
        self._next += 1
        return self._step, self._next - 1
