"""After which step a job ends whose places do not meet: the last one, or a few after a person asked for it.

They do not meet at the end of a step, so node 0 decides, and announces it over the sockets of `pipeline.gather`,
which use no shaped link. It does so before it sends its message of the step that it is in. Nobody begins a step before
it has the messages of all up to `staleness + 1` steps before, so whoever begins the last step of an early end, or after
it, has heard of it: all nodes end after the same step, and workers hold the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from testbed.message_key import Phase
from testbed.pipeline.gather import Gather


class Ending:
    """One node's view of when training ends."""

    def __init__(self, gather: Gather, asked: Callable[[], bool], *, decides: bool, steps: int, furthest: int) -> None:
        """`asked` says whether a person wants training to end early, and `decides` whether this node heeds it.
        `furthest`: the most steps that one node may be ahead of another.
        """
        self._gather, self.asked, self._decides = gather, asked, decides
        self.steps = steps
        """Steps that training has, as far as is known here."""
        self.early = False
        """Whether these are fewer than were stated."""
        self._furthest = furthest

    def tell(self) -> None:
        """Tell nothing where places meet."""

    def met(self, line_ns: int, told: Sequence[Any]) -> None:
        """Learn nothing there."""

    def goes_on(self, number: int, phase: Phase, end_ns: int) -> bool:
        """Return what an `EndStep` returns: whether there is such a step as comes next."""
        step = number + 1 if phase == "train" else number
        if not self.early:
            steps = self._asked_for(step) if self._decides else self._gather.announced()
            if steps is not None and steps < self.steps:
                self.steps, self.early = int(steps), True
        return step < self.steps or not self.early

    def _asked_for(self, step: int) -> int | None:
        """Decide, where a person has asked: the hub is about to begin `step`."""
        if not self.asked():
            return None
        steps = step + self._furthest + 2
        if steps < self.steps:
            self._gather.announce(steps)
        return steps


class ServersEnding:
    """A server's view where all others follow it: training ends after the step in which a person asks for it."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self._asked = asked

    def tell(self) -> None:
        """Tell nothing where places meet."""

    def met(self, line_ns: int, told: Sequence[Any]) -> None:
        """Learn nothing there."""

    def goes_on(self, number: int, phase: Phase, end_ns: int) -> bool:
        """Return what an `EndStep` returns."""
        return not self._asked()
