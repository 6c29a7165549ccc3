"""When training ends. Every stage decides for itself, from what all of them know alike, so all end after the same step."""

from __future__ import annotations

from testbed.pipeline.control import Ended
from testbed.pipeline.gather import Met
from testbed.spec import TrainingSpec


class Stops:
    """To be told of every step and evaluation, in order."""

    def __init__(self, training: TrainingSpec, *, dilation: int, start_ns: int) -> None:
        """Training begins at `start_ns`; in the lab everything takes `dilation` times as long as in the budget's world."""
        self._training = training
        self._budget_ns = None if training.budget_s is None else training.budget_s * 1e9 * dilation
        self._spent_ns = 0
        self._counted_ns = start_ns
        self._updating = False

    def after_step(self, done: int, met: Met) -> Ended | None:
        """Why training ends with the step that is number `done`, counted from 1; None: it does not."""
        self._spent_ns += met.line_ns - self._counted_ns
        self._counted_ns, self._updating = met.line_ns, True
        if met.asked:
            return "asked"
        if done == self._training.steps:
            return "steps"
        return "budget" if self._budget_ns is not None and self._spent_ns >= self._budget_ns else None

    def evaluation_due(self, done: int) -> bool:
        """Whether one follows that step, though training goes on."""
        return self._training.evaluate_every > 0 and done % self._training.evaluate_every == 0

    def after_evaluation(self, met: Met) -> Ended | None:
        """Why training ends with an evaluation."""
        if self._updating:  # which `after_step` could not count
            self._spent_ns += max(0, met.left_ns - self._counted_ns)
        self._counted_ns, self._updating = met.line_ns, False
        if self._training.target_loss is not None and met.loss <= self._training.target_loss:
            return "target"
        return "asked" if met.asked else None
