"""Time every action, encode and decode of recipes, alone on one core: `python -m testbed.pipeline.calibrate JOB.json`.

All recipes stand in this one process, as `alone` trains them, and take turns: a few steps of each in every round, so a
machine that becomes slower does it to all of them alike. What is counted is the time for which the thread had the
processor (CLOCK_THREAD_CPUTIME_ID): on a core of its own that is all the time, and on a busy machine what others took
is left out; what they do to caches is not. Rounds follow one another until the fastest half of every
duration's samples agrees (`records.Duration.noisy`), or the time is spent. Nothing counts of the first round, in which
memory is set aside and codecs and the optimiser begin to remember. In the last round each stage of a pipeline sleeps
before it decodes, as one does that waits for a link, and that alone is counted (waking.py).
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

from testbed.jobs.kind import JobKind, Setting, kind_of
from testbed.jobs.loop import Loop
from testbed.jobs.pipeline import PipelineJob, orders_of
from testbed.message_key import Direction
from testbed.pipeline.alone import obey
from testbed.pipeline.calibration import (
    CalibrationDone,
    CalibrationJob,
    Maths,
    Timed,
    TimedNode,
    TimedRecipe,
    duration,
    is_steady,
)
from testbed.pipeline.stages import PipelineTraining
from testbed.pipeline.training import loaded, set_up_torch
from testbed.records import CodecCosts, Duration, PlaceCosts, StageMaths
from testbed.spec import DataParallelSpec, Parallelism, PipelineSpec
from testbed.waking import WHOLE_NS

_LEAST_WOKEN = 8
"""Samples of a decode after a sleep."""
_WOKEN = "decode_woken"
_DIRECTIONS: Final[dict[str, Direction]] = {"activation": "forward", "gradient": "backward"}
"""Which way messages go."""
_Quantity = TypeVar("_Quantity", bound=Hashable)
Samples = dict[Any, list[int]]
"""By quantity: what was timed of it, in ns."""


class Arm(ABC):
    """One subject that stands ready to train, and the samples that it gave."""

    steps_a_turn = 2

    def __init__(self, subject: TimedRecipe) -> None:
        self.subject, self.steps = subject, 0

    def take_turn(self, pool: Samples) -> None:
        """Make a few steps, and keep their samples: in `pool` those of all subjects with the same maths."""
        first, self.steps = self.steps, self.steps + self.steps_a_turn
        self.run(first, counts=first > 0, pool=pool)

    @abstractmethod
    def run(self, first: int, *, counts: bool, pool: Samples) -> None:
        """Make the steps up to `steps`; `counts`: keep their samples."""

    @abstractmethod
    def asked(self, pool: Samples) -> Iterable[Duration]:
        """Return the durations that are wanted of the subject, as far as they are known by now."""

    def rest(self, pool: Samples) -> None:  # noqa: B027 - most take no longer
        """Time what takes longer after a rest."""

    @abstractmethod
    def timed(self, pool: Samples) -> Timed:
        """Return what was found of the subject alone."""

    def maths(self, pool: Samples) -> Maths | None:
        """Return what was found that it shares with others; None where that is nothing."""
        return None


def run(job: CalibrationJob) -> CalibrationDone:
    """Time all subjects of a job."""
    if job.processor is not None:
        os.sched_setaffinity(0, {job.processor})
    set_up_torch()
    began, rounds = time.monotonic(), 0
    pools: dict[str, Samples] = defaultdict(lambda: defaultdict(list))
    timed: list[Timed] = []
    shared: dict[str, Maths] = {}
    subjects = sum(map(len, job.groups))
    for group in job.groups:
        arms: list[tuple[Arm, Samples]] = [(loaded(_ARMS, subject), pools[subject.maths]) for subject in group]
        deadline = time.monotonic() + job.budget_s * len(group) / subjects
        gc.collect()
        gc.freeze()
        for number in itertools.count():
            for arm, pool in arms:
                arm.take_turn(pool)
            rounds += 1
            if not number:
                continue
            found = [each for arm, pool in arms for each in arm.asked(pool)]
            if all(map(is_steady, found)) or time.monotonic() > deadline:
                break
        for arm, pool in arms:
            arm.rest(pool)
        for arm, pool in arms:
            timed.append(arm.timed(pool))
            if not arm.subject.maths_known and (maths := arm.maths(pool)) is not None:
                shared[arm.subject.maths] = maths
        del arm, arms  # the next group needs the memory
    return CalibrationDone(subjects=tuple(timed), maths=shared, seconds=time.monotonic() - began, rounds=rounds)


def judge(
    samples: Mapping[_Quantity, list[int]], times: Mapping[_Quantity, int], busy: Iterable[Iterable[_Quantity]]
) -> dict[_Quantity, Duration]:
    """Return all durations; each happens so many `times` in a step, and no step is shorter than what somebody does in
    it who is as `busy` as that.
    """
    typical = {quantity: duration(taken, per_step=0, step_ns=1).ns for quantity, taken in samples.items()}
    step_ns = max(sum(times[quantity] * typical[quantity] for quantity in each) for each in busy)
    return {quantity: duration(taken, per_step=times[quantity], step_ns=step_ns) for quantity, taken in samples.items()}


# ---------------------------------------------------------------------- pipelines
class Quantity(NamedTuple):
    """What is timed, at one stage."""

    stage: int
    what: str
    """forward, backward, clip, update, encode, decode or decode_woken."""
    direction: Direction | None = None
    """Of the tensor that is encoded or decoded; None: it is maths, in which codecs have no share."""


class StagesArm(Arm):
    """All stages of a pipeline."""

    def __init__(self, subject: TimedRecipe) -> None:
        """Build all stages. StageError or SpecError where that cannot be done."""
        super().__init__(subject)
        pipeline = subject.recipe.pipeline
        training = PipelineTraining(Setting(subject.recipe, subject.vocabulary, subject.tokens))
        self._own: Samples = defaultdict(list)
        self._stages = [training.node_alone(stage) for stage in range(pipeline.stages)]
        self._timed = [TimedNode(stage.does) for stage in self._stages]
        for stage, timed in zip(self._stages, self._timed, strict=True):
            stage.does = timed
        self._alters_model = any(stage.hooks for stage in self._stages)
        self._orders, self._resting = orders_of(pipeline), False

    def run(self, first: int, *, counts: bool, pool: Samples) -> None:
        """Make the steps up to `steps`; `counts`: keep their samples."""
        job = PipelineJob(self._orders, self.steps)
        Loop([job.program(stage, first) for stage in range(len(self._stages))], self._stages).run()
        for stage, node in enumerate(self._timed):
            for (kind, what), taken in node.samples.items():
                quantity = self._quantity(stage, kind, what)
                if counts and self._resting == (quantity.what == _WOKEN) and what != "start":
                    shared = quantity.direction is None and not self._alters_model
                    (pool if shared else self._own)[quantity] += taken
            node.samples.clear()

    def rest(self, pool: Samples) -> None:
        """Have stages sleep before they decode, for as long as it takes to forget what they knew."""
        self._resting = True
        for node in self._timed:
            node.rest_s = 2 * WHOLE_NS / 1e9
        for _ in range(-(-_LEAST_WOKEN // (self.steps_a_turn * self.subject.recipe.pipeline.microbatches))):
            self.take_turn(pool)

    def asked(self, pool: Samples) -> Iterator[Duration]:
        """Yield the durations that are wanted of the subject."""
        for quantity, found in self._durations(pool).items():
            if quantity.direction is not None or self._alters_model or not self.subject.maths_known:
                yield found

    def timed(self, pool: Samples) -> Timed:
        """Return what codecs do, by stage, and the maths where they change it."""
        found, stages = self._durations(pool), range(len(self._stages))

        def of(stage: int, what: str) -> dict[Direction, Duration]:
            return {
                quantity.direction: each
                for quantity, each in found.items()
                if (quantity.stage, quantity.what) == (stage, what) and quantity.direction is not None
            }

        codecs = tuple(
            CodecCosts(encode=of(stage, "encode"), decode=of(stage, "decode"), decode_woken=of(stage, _WOKEN))
            for stage in stages
        )
        return Timed(name=self.subject.name, maths=self._maths(pool) if self._alters_model else None, codecs=codecs)

    def maths(self, pool: Samples) -> tuple[StageMaths, ...] | None:
        """Return the maths of each stage, unless it is the subject's own."""
        return None if self._alters_model else self._maths(pool)

    def _maths(self, pool: Samples) -> tuple[StageMaths, ...]:
        found = self._durations(pool)
        return tuple(
            StageMaths(**{what: found[Quantity(stage, what)] for what in StageMaths.model_fields})
            for stage in range(len(self._stages))
        )

    def _durations(self, pool: Samples) -> dict[Quantity, Duration]:
        samples: dict[Quantity, list[int]] = {**self._own, **({} if self._alters_model else pool)}
        parts = self.subject.recipe.pipeline.microbatches
        times = {quantity: 1 if quantity.what in ("clip", "update") else parts for quantity in samples}
        stages = range(len(self._stages))
        return judge(samples, times, [[q for q in samples if q.stage == s and q.what != _WOKEN] for s in stages])

    def _quantity(self, stage: int, kind: str, what: str) -> Quantity:
        if kind == "work":
            return Quantity(stage, what)
        return Quantity(stage, _WOKEN if self._resting and kind == "decode" else kind, _DIRECTIONS[what])


# ---------------------------------------------------------------------- jobs of a table `job`
class PlacesArm(Arm):
    """All places of a job, which runs as in training."""

    def __init__(self, subject: TimedRecipe) -> None:
        super().__init__(subject)
        self._kind = kind_of(subject.recipe)
        setting = Setting(subject.recipe, subject.vocabulary, subject.tokens)
        self._nodes = [TimedNode(self._kind.node(place, setting)) for place in range(len(self._kind.places))]

    def run(self, first: int, *, counts: bool, pool: Samples) -> None:
        """Make the steps up to `steps`; `counts`: keep their samples."""
        programs = [self._kind.played.program(place, first) for place in range(len(self._nodes))]
        Loop(programs, self._nodes, goes_on=lambda place, step: step + 1 < self.steps).run()
        for node in self._nodes if not counts else ():
            node.samples.clear()

    def asked(self, pool: Samples) -> Iterator[Duration]:
        """Yield all durations."""
        for node in self._nodes:
            yield from self._costs(node).durations

    def timed(self, pool: Samples) -> Timed:
        """Return what each place does."""
        return Timed(name=self.subject.name, maths=None, codecs=tuple(map(self._costs, self._nodes)))

    def _costs(self, node: TimedNode) -> PlaceCosts:
        steps = self.steps - self.steps_a_turn
        total_ns = sum(map(sum, node.samples.values())) // steps
        found: dict[str, dict[str, Duration]] = {"work": {}, "encode": {}, "decode": {}}
        for (kind, what), samples in sorted(node.samples.items()):
            found[kind][what] = duration(samples, per_step=max(1, len(samples) // steps), step_ns=total_ns)
        return PlaceCosts(**found)


_ARMS: Final[Mapping[type[Parallelism], str]] = {
    PipelineSpec: "testbed.pipeline.calibrate:StagesArm",
    DataParallelSpec: "testbed.replicas.calibrate:WorkersArm",
    JobKind: "testbed.pipeline.calibrate:PlacesArm",
}
"""By kind of job, as in `training`."""


def main() -> None:
    """Time what the file says."""
    obey(CalibrationJob, run, "Times recipes")


if __name__ == "__main__":
    main()
