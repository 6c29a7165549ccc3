"""After which step a job over links ends: the last one, or one soon after a person asked for the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from testbed.message_key import Phase
from testbed.pipeline.gather import Gather


class Ending:
    """One place's view of when a job ends. This one ends after the step in which a person asks for it: a server's,
    where all others follow it.
    """

    def __init__(self, asked: Callable[[], bool]) -> None:
        """`asked` says whether a person wants the job to end before its time."""
        self._asked = asked

    def tell(self) -> Any:
        """Return what the others are to be told when all meet: None, numbers, lists of these."""
        return None

    def met(self, line_ns: int, told: Sequence[Any]) -> None:
        """Hear where the lines of all are, and what each has told."""

    def goes_on(self, number: int, phase: Phase, end_ns: int) -> bool | None:
        """Return what an `EndStep` returns that ended then."""
        return not self._asked()


class Announced(Ending):
    """Where places do not meet at the end of a step place 0 decides, and announces it over the sockets of
    `pipeline.gather`, which use no shaped link.

    It does so before it sends its message of the step that it is in. Nobody begins a step before it has the messages of
    all up to `furthest + 1` steps before, so whoever begins the last step of an early end, or after it, has heard of
    it: all places end after the same step, and workers hold the same weights.
    """

    def __init__(self, asked: Callable[[], bool], gather: Gather, *, decides: bool, steps: int, furthest: int) -> None:
        """`decides` says whether this place heeds what is asked; `furthest`: the most steps that one place may be ahead
        of another.
        """
        super().__init__(asked)
        self._gather, self._decides, self._steps, self._furthest = gather, decides, steps, furthest
        self.early = False
        """Whether the steps are fewer than were stated, as far as is known here."""

    def goes_on(self, number: int, phase: Phase, end_ns: int) -> bool:
        """Return whether there is such a step as comes next."""
        step = number + 1 if phase == "train" else number
        if not self.early:
            steps = self._asked_for(step) if self._decides else self._gather.announced()
            if steps is not None and steps < self._steps:
                self._steps, self.early = int(steps), True
        return step < self._steps

    def _asked_for(self, step: int) -> int | None:
        """Decide, where a person has asked: the hub is about to begin `step`."""
        if not self._asked():
            return None
        steps = step + self._furthest + 2
        if steps < self._steps:
            self._gather.announce(steps)
        return steps


class Stops(Ending):
    """Where places meet all of them decide from what they then know alike, and end after the same step."""

    def __init__(self, asked: Callable[[], bool], budget_s: float | None = None, dilation: int = 1) -> None:
        """The lab takes `dilation` times as long as the world that the budget is for."""
        super().__init__(asked)
        self._budget_ns = math.inf if budget_s is None else budget_s * 1e9 * dilation
        self._spent_ns = 0
        self._line_ns = self._left_ns = self._everybody_left_ns = 0
        self._counted_ns: int | None = None
        self._to_end = self._updating = False

    def tell(self) -> Any:
        """Return when what came before was over here, and whether somebody wants the job to end."""
        return [self._left_ns, self._counted_ns is not None and self._asked()]

    def met(self, line_ns: int, told: Sequence[Any]) -> None:
        """Hear when the last place was there, and what each has told. The first meeting begins the job."""
        self._line_ns, self._everybody_left_ns = line_ns, max(left_ns for left_ns, _ in told)
        self._to_end = any(asked for _, asked in told)
        if self._counted_ns is None:
            self._counted_ns = self._left_ns = line_ns

    def goes_on(self, number: int, phase: Phase, end_ns: int) -> bool | None:
        """Return what an `EndStep` returns. Evaluations are not paid for."""
        assert self._counted_ns is not None
        self._left_ns = end_ns
        if phase == "train":
            self._spent_ns += self._line_ns - self._counted_ns
        elif self._updating:  # which the step before it could not count
            self._spent_ns += max(0, self._everybody_left_ns - self._counted_ns)
        self._counted_ns, self._updating = self._line_ns, phase == "train"
        if self._to_end:
            return False
        return None if phase == "train" and self._spent_ns >= self._budget_ns else True
