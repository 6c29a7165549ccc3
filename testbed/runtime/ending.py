"""Decides after which step a live job ends: the last one, or one soon after a user's request to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from testbed.message_key import Phase
from testbed.runtime.gather import Gather


class Ending:
    """One place's rule for the end of a job. This one ends after the step in which the user asks to stop; used by a
    server that all others follow.
    """

    def __init__(self, asked: Callable[[], bool]) -> None:
        """`asked` returns whether the user has asked to stop early."""
        self._asked = asked

    def tell(self) -> Any:
        """Return the value to share with the others when all meet: None, numbers, lists of these."""
        return None

    def met(self, line_ns: int, told: Sequence[Any]) -> None:
        """Receive the time at which all lines stand, and the value that each place shared."""

    def goes_on(self, number: int, phase: Phase, end_ns: int) -> bool | None:
        """Return the result of an `EndStep` that ended at `end_ns`."""
        return not self._asked()


class Announced(Ending):
    """For jobs without a barrier per step: place 0 decides, and announces it over the sockets of `runtime.gather`,
    which use no shaped link.

    It does so before it sends its message of the current step. No place starts a step before it has received all
    messages up to `furthest + 1` steps back, so every place knows of an early end before it starts the last step: all
    places end after the same step, and workers hold the same weights.
    """

    def __init__(self, asked: Callable[[], bool], gather: Gather, *, decides: bool, steps: int, furthest: int) -> None:
        """`decides`: whether this place acts on the user's request; `furthest`: the most steps by which one place may
        be ahead of another.
        """
        super().__init__(asked)
        self._gather, self._decides, self._steps, self._furthest = gather, decides, steps, furthest
        self.early = False
        """Whether training ends before its stated number of steps, as far as this place knows."""

    def goes_on(self, number: int, phase: Phase, end_ns: int) -> bool:
        """Return whether another step follows."""
        step = number + 1 if phase == "train" else number
        if not self.early:
            steps = self._asked_for(step) if self._decides else self._gather.announced()
            if steps is not None and steps < self._steps:
                self._steps, self.early = int(steps), True
        return step < self._steps

    def _asked_for(self, step: int) -> int | None:
        """Decide whether to stop early; the hub is about to start `step`."""
        if not self._asked():
            return None
        steps = step + self._furthest + 2
        if steps < self._steps:
            self._gather.announce(steps)
        return steps


class Stops(Ending):
    """For jobs whose places meet: all decide from the same shared values, and end after the same step."""

    def __init__(self, asked: Callable[[], bool], budget_s: float | None = None, dilation: int = 1) -> None:
        """The lab runs `dilation` times slower than the time in which the budget is stated."""
        super().__init__(asked)
        self._budget_ns = math.inf if budget_s is None else budget_s * 1e9 * dilation
        self._spent_ns = 0
        self._line_ns = self._left_ns = self._everybody_left_ns = 0
        self._counted_ns: int | None = None
        self._to_end = self._updating = False

    def tell(self) -> Any:
        """Return the time at which the preceding work ended here, and whether the user has asked to stop."""
        return [self._left_ns, self._counted_ns is not None and self._asked()]

    def met(self, line_ns: int, told: Sequence[Any]) -> None:
        """Receive the time at which the last place arrived, and the value that each place shared. The first meeting
        starts the job.
        """
        self._line_ns, self._everybody_left_ns = line_ns, max(left_ns for left_ns, _ in told)
        self._to_end = any(asked for _, asked in told)
        if self._counted_ns is None:
            self._counted_ns = self._left_ns = line_ns

    def goes_on(self, number: int, phase: Phase, end_ns: int) -> bool | None:
        """Return the result of an `EndStep`. Evaluations do not use up the budget."""
        assert self._counted_ns is not None
        self._left_ns = end_ns
        if phase == "train":
            self._spent_ns += self._line_ns - self._counted_ns
        elif self._updating:  # the previous step could not count this update
            self._spent_ns += max(0, self._everybody_left_ns - self._counted_ns)
        self._counted_ns, self._updating = self._line_ns, phase == "train"
        if self._to_end:
            return False
        return None if phase == "train" and self._spent_ns >= self._budget_ns else True
