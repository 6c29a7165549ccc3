"""Pipeline training: layers are cut into stages, and a batch into micro-batches.

For each action of its schedule a stage waits for its input, decodes it, computes, encodes the output and sends it; then
it clips, meets the others and updates. Activations go to the next stage, gradients to the previous one. An evaluation
is forward passes through all stages, then a meeting at which the last stage shares its loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from testbed.jobs.actions import Begin, Decode, Encode, EndStep, Key, Meet, Program, Receive, Send, Wait, Work
from testbed.jobs.recorder import Named
from testbed.jobs.schedule import Action, all_actions
from testbed.message_key import Phase
from testbed.spec import PipelineSpec, TrainingSpec

MESSAGES = {"F": "activation", "B": "gradient"}
"""The message that each action of a schedule sends."""
MATHS = {"F": "forward", "B": "backward"}
_FURTHER = {"F": 1, "B": -1}
Ended = Literal["steps", "target", "budget", "asked"]
"""Why training ended: all steps done, target loss reached, budget spent, stop requested."""


@dataclass(frozen=True)
class Evaluations:
    """When a pipeline evaluates, and on how many batches."""

    batches: int
    """Validation batches, each of as many micro-batches as a step has."""
    every: int = 0
    """Evaluate after every this many steps and after the last; 0: only after the last."""
    phases: Sequence[Phase] = ("evaluation",)
    """An evaluation for each of these."""
    target_loss: float | None = None
    """Training ends once an evaluation reaches this loss."""


@dataclass(frozen=True)
class PipelineJob:
    """Stages that train together, and their actions in a step."""

    orders: Sequence[Sequence[Action]]
    """The actions of a step, by stage."""
    steps: int
    blocking: bool = False
    """A stage continues only after its neighbour has received the whole message, as in a program that cannot overlap
    sending and computing."""
    evaluations: Evaluations | None = None
    """None: no evaluations."""
    first: int | None = None
    """The place of the first stage, if this is one of several pipelines of a job."""

    @property
    def places(self) -> Sequence[str]:
        """The names of the stages."""
        return tuple(f"stage {stage}" for stage in range(len(self.orders)))

    @staticmethod
    def named(key: Key) -> Named:
        """Return the name of a message in the records of training steps."""
        return Named("forward" if key.what == MESSAGES["F"] else "backward", key.part, with_peer=False)

    def program(self, place: int, first_step: int = 0) -> Program:
        """Return the program of a stage, from right after the end of the step before that one, so with its evaluation;
        it returns why training `Ended`.
        """
        plan, ended, goes_on = self.evaluations, None, True
        for done in range(first_step or 1, self.steps + 1):
            if done > first_step:
                yield from self.batch(place, done - 1)
                goes_on = yield EndStep(done - 1)
            if goes_on is False:
                return "asked"
            ended = "steps" if done == self.steps else "budget" if goes_on is None else None
            if plan is not None and (ended or (plan.every and done % plan.every == 0)):
                reached = yield from self._evaluate(place, done, plan)
                ended = "target" if reached == "target" else ended or reached
            if ended:
                break
        return ended

    def batch(self, place: int, step: int, first_part: int = 0) -> Program:
        """Run the schedule once, then update. `first_part`: the number of the first micro-batch."""
        yield Work("start", Key("start", step, first_part))
        for kind, part in self.orders[place - (self.first or 0)]:
            yield from self.action(place, kind, Key(MESSAGES[kind], step, first_part + part))
        yield Begin()
        squares = yield Work("clip", Key("clip", step, first_part))
        met = yield Meet(squares, None if self.first is None else tuple(self._stages))
        yield Work("update", Key("update", step, first_part), met)

    @property
    def _stages(self) -> range:
        first = self.first or 0
        return range(first, first + len(self.orders))

    def _evaluate(self, place: int, done: int, plan: Evaluations) -> Program:
        """Evaluate after `done` steps; returns why training ends here, or None."""
        reached: Ended | None = None
        parts = sum(kind == "F" for kind, _ in self.orders[place])
        before = (done - 1) // plan.every if plan.every else 0
        for phase in plan.phases:
            yield Work("start", Key("start", done, phase=phase))
            for batch in range(plan.batches):
                for part in range(parts):
                    # Codecs see each batch as a step, so that their state is as old as in training.
                    key = Key("activation", before * plan.batches + batch, part, phase=phase)
                    yield from self.action(place, "F", key, batch * parts + part)
            yield Begin()
            loss = yield Work("loss", Key("loss", done, phase=phase))
            met = yield Meet(loss)
            goes_on = yield EndStep(done, phase)
            if phase == "evaluation" and _reaches(met[-1], plan.target_loss):
                reached = "target"
            elif goes_on is False:
                return "asked"
        return reached

    def action(self, place: int, kind: str, key: Key, number: int | None = None) -> Program:
        """Run one micro-batch forward or backward through a stage; `number`: its number in the records, if not
        `part`.
        """
        yield Begin(kind, key.part if number is None else number)
        stages, source, target, value = self._stages, place - _FURTHER[kind], place + _FURTHER[kind], None
        if source in stages:
            message = yield Receive(key, source)
            (value,) = yield Decode((message,))
        value = yield Work(MATHS[kind], key, value)
        if target in stages:
            message = yield Encode(key, value)
            yield Send(message, target, awaited=self.blocking)
            if self.blocking:
                yield Wait(key, target)


def orders_of(pipeline: PipelineSpec) -> list[tuple[Action, ...]]:
    """Return the actions of a step, by stage."""
    numbers = pipeline.model_dump(include={"stages", "microbatches", "in_flight", "accumulation"})
    return all_actions(pipeline.schedule, **numbers)


def training_job(pipeline: PipelineSpec, training: TrainingSpec, validation_batches: int) -> PipelineJob:
    """Return the job that trains and evaluates as specified."""
    evaluations = Evaluations(
        batches=validation_batches,
        every=training.evaluate_every,
        phases=("evaluation", "uncompressed") if training.evaluate_uncompressed else ("evaluation",),
        target_loss=training.target_loss,
    )
    return PipelineJob(orders_of(pipeline), training.steps, evaluations=evaluations)


def _reaches(losses: Any, target: float | None) -> bool:
    """Return whether the last stage's loss, the only one in `losses`, reaches the target; runs without maths have
    none.
    """
    return target is not None and bool(losses) and losses[0] <= target
