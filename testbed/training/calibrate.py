"""Time every action, encode and decode of recipes, alone on one core: `python -m testbed.training.calibrate JOB.json`.

All recipes live in this one process, as in `alone`, and take turns, a few steps of each per round, so that a slowdown
of the machine affects all alike. Samples are the thread's processor time (CLOCK_THREAD_CPUTIME_ID): on a dedicated core
that equals real time, and on a busy machine it excludes time taken by others, though not their effect on caches. Rounds
continue until the fastest half of every duration's samples agrees (`records.Duration.noisy`), or time runs out. The
first round is discarded: it allocates memory and fills the state of codecs and optimiser. In the last round each
pipeline stage sleeps before it decodes, like a stage that waits for a link, and only that decode is counted
(waking.py).
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
from testbed.records import CodecCosts, Duration, PlaceCosts, StageMaths
from testbed.spec import DataParallelSpec, Parallelism, PipelineSpec
from testbed.training.alone import obey
from testbed.training.kinds import loaded, set_up_torch
from testbed.training.stages import PipelineTraining
from testbed.training.timing import (
    CalibrationDone,
    CalibrationJob,
    Maths,
    Timed,
    TimedNode,
    TimedRecipe,
    duration,
    is_steady,
)
from testbed.waking import WHOLE_NS

_LEAST_WOKEN = 8
"""Minimum samples of a decode after a sleep."""
_WOKEN = "decode_woken"
_DIRECTIONS: Final[dict[str, Direction]] = {"activation": "forward", "gradient": "backward"}
"""Direction of a message, by name."""
_Quantity = TypeVar("_Quantity", bound=Hashable)
Samples = dict[Any, list[int]]
"""Samples in ns, by quantity."""


class Arm(ABC):
    """One subject, ready to train, and its samples."""

    steps_a_turn = 2

    def __init__(self, subject: TimedRecipe) -> None:
        self.subject, self.steps = subject, 0

    def take_turn(self, pool: Samples) -> None:
        """Run a few steps, and keep their samples; `pool` has those of all subjects with the same maths."""
        first, self.steps = self.steps, self.steps + self.steps_a_turn
        self.run(first, counts=first > 0, pool=pool)

    @abstractmethod
    def run(self, first: int, *, counts: bool, pool: Samples) -> None:
        """Run the steps from `first` up to `self.steps`; keep their samples if `counts`."""

    @abstractmethod
    def asked(self, pool: Samples) -> Iterable[Duration]:
        """Return the durations required of the subject, as known so far."""

    def rest(self, pool: Samples) -> None:  # noqa: B027 - most take no longer
        """Time actions that are slower after a rest."""

    @abstractmethod
    def timed(self, pool: Samples) -> Timed:
        """Return the subject's own durations."""

    def maths(self, pool: Samples) -> Maths | None:
        """Return the durations that it shares with others; None if there are none."""
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
            durations = [each for arm, pool in arms for each in arm.asked(pool)]
            if all(map(is_steady, durations)) or time.monotonic() > deadline:
                break
        for arm, pool in arms:
            arm.rest(pool)
        for arm, pool in arms:
            timed.append(arm.timed(pool))
            if not arm.subject.maths_known and (maths := arm.maths(pool)) is not None:
                shared[arm.subject.maths] = maths
        del arm, arms  # frees memory for the next group
    return CalibrationDone(subjects=tuple(timed), maths=shared, seconds=time.monotonic() - began, rounds=rounds)


def judge(
    samples: Mapping[_Quantity, list[int]], times: Mapping[_Quantity, int], busy: Iterable[Iterable[_Quantity]]
) -> dict[_Quantity, Duration]:
    """Return all durations. Each occurs `times` times in a step; a step is at least as long as the work of the place
    that `busy` describes.
    """
    typical = {quantity: duration(taken, per_step=0, step_ns=1).ns for quantity, taken in samples.items()}
    step_ns = max(sum(times[quantity] * typical[quantity] for quantity in each) for each in busy)
    return {quantity: duration(taken, per_step=times[quantity], step_ns=step_ns) for quantity, taken in samples.items()}


# ---------------------------------------------------------------------- pipelines
class Quantity(NamedTuple):
    """A timed quantity at one stage."""

    stage: int
    what: str
    """forward, backward, clip, update, encode, decode or decode_woken."""
    direction: Direction | None = None
    """Direction of the encoded or decoded tensor; None: maths without codecs."""


class StagesArm(Arm):
    """All stages of a pipeline."""

    def __init__(self, subject: TimedRecipe) -> None:
        """Build all stages. StageError or SpecError where that fails."""
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
        """Run the steps from `first` up to `self.steps`; keep their samples if `counts`."""
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
        """Make stages sleep before they decode, long enough for their caches to go cold."""
        self._resting = True
        for node in self._timed:
            node.rest_s = 2 * WHOLE_NS / 1e9
        for _ in range(-(-_LEAST_WOKEN // (self.steps_a_turn * self.subject.recipe.pipeline.microbatches))):
            self.take_turn(pool)

    def asked(self, pool: Samples) -> Iterator[Duration]:
        """Yield the durations required of the subject."""
        for quantity, measured in self._durations(pool).items():
            if quantity.direction is not None or self._alters_model or not self.subject.maths_known:
                yield measured

    def timed(self, pool: Samples) -> Timed:
        """Return codec durations, by stage, and maths durations if codecs change the maths."""
        measured, stages = self._durations(pool), range(len(self._stages))

        def of(stage: int, what: str) -> dict[Direction, Duration]:
            return {
                quantity.direction: each
                for quantity, each in measured.items()
                if (quantity.stage, quantity.what) == (stage, what) and quantity.direction is not None
            }

        codecs = tuple(
            CodecCosts(encode=of(stage, "encode"), decode=of(stage, "decode"), decode_woken=of(stage, _WOKEN))
            for stage in stages
        )
        return Timed(name=self.subject.name, maths=self._maths(pool) if self._alters_model else None, codecs=codecs)

    def maths(self, pool: Samples) -> tuple[StageMaths, ...] | None:
        """Return the maths durations of each stage, unless they are the subject's own."""
        return None if self._alters_model else self._maths(pool)

    def _maths(self, pool: Samples) -> tuple[StageMaths, ...]:
        measured = self._durations(pool)
        return tuple(
            StageMaths(**{what: measured[Quantity(stage, what)] for what in StageMaths.model_fields})
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


# ---------------------------------------------------------------------- jobs from a `job` table
class PlacesArm(Arm):
    """All places of a job, run as in training."""

    def __init__(self, subject: TimedRecipe) -> None:
        super().__init__(subject)
        self._kind = kind_of(subject.recipe)
        setting = Setting(subject.recipe, subject.vocabulary, subject.tokens)
        self._nodes = [TimedNode(self._kind.node(place, setting)) for place in range(len(self._kind.places))]

    def run(self, first: int, *, counts: bool, pool: Samples) -> None:
        """Run the steps from `first` up to `self.steps`; keep their samples if `counts`."""
        programs = [self._kind.played.program(place, first) for place in range(len(self._nodes))]
        Loop(programs, self._nodes, goes_on=lambda place, step: step + 1 < self.steps).run()
        for node in self._nodes if not counts else ():
            node.samples.clear()

    def asked(self, pool: Samples) -> Iterator[Duration]:
        """Yield all durations."""
        for node in self._nodes:
            yield from self._costs(node).durations

    def timed(self, pool: Samples) -> Timed:
        """Return the durations of each place."""
        return Timed(name=self.subject.name, maths=None, codecs=tuple(map(self._costs, self._nodes)))

    def _costs(self, node: TimedNode) -> PlaceCosts:
        steps = self.steps - self.steps_a_turn
        total_ns = sum(map(sum, node.samples.values())) // steps
        costs: dict[str, dict[str, Duration]] = {"work": {}, "encode": {}, "decode": {}}
        for (kind, what), samples in sorted(node.samples.items()):
            costs[kind][what] = duration(samples, per_step=max(1, len(samples) // steps), step_ns=total_ns)
        return PlaceCosts(**costs)


_ARMS: Final[Mapping[type[Parallelism], str]] = {
    PipelineSpec: "testbed.training.calibrate:StagesArm",
    DataParallelSpec: "testbed.training.calibrate_workers:WorkersArm",
    JobKind: "testbed.training.calibrate:PlacesArm",
}
"""Class of each kind of job, as in `training.kinds`."""


def main() -> None:
    """Time the recipes in the file."""
    obey(CalibrationJob, run, "Times recipes")


if __name__ == "__main__":
    main()
