"""Time every action, encode and decode of recipes, alone on one core: `python -m testbed.pipeline.calibrate JOB.json`.

All recipes stand in this one process, as `alone` trains them, and take turns: a few steps of each in every round, so a
machine that becomes slower does it to all of them alike. What is counted is the time for which the thread had the
processor (CLOCK_THREAD_CPUTIME_ID): on a core of its own that is all the time, and on a busy machine what others took
is left out; what they do to caches is not. Rounds follow one another until the fastest half of every
duration's samples agrees (`records.Duration.noisy`), or the time is spent. In the last round each stage sleeps before
it decodes, as one does that waits for a link, and that alone is counted (waking.py).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from testbed.errors import TestbedError
from testbed.frozen import Frozen
from testbed.jobs.loop import Loop
from testbed.jobs.pipeline import PipelineJob, orders_of
from testbed.message_key import Direction
from testbed.pipeline.alone import StageInMemory, works_of
from testbed.pipeline.calibration import (
    CalibrationDone,
    CalibrationJob,
    CalibrationRound,
    Subject,
    Timed,
    TimedNode,
    duration,
    is_steady,
)
from testbed.pipeline.node import StageNode
from testbed.pipeline.train import set_up_torch
from testbed.records import CodecCosts, Duration, StageMaths
from testbed.waking import WHOLE_NS

_WARM_STEPS = 2
"""First steps, in which memory is set aside and codecs and the optimiser begin to remember."""
_STEPS_A_TURN = 2
_LEAST_WOKEN = 8
"""Samples of a decode after a sleep."""
_WOKEN = "decode_woken"
_DIRECTIONS: Final[dict[str, Direction]] = {"activation": "forward", "gradient": "backward"}
"""Which way messages go."""


class Quantity(NamedTuple):
    """What is timed, at one stage."""

    stage: int
    what: str
    """forward, backward, clip, update, encode, decode or decode_woken."""
    direction: Direction | None = None
    """Of the tensor that is encoded or decoded."""

    @property
    def maths(self) -> bool:
        """Whether codecs have no share in it."""
        return self.direction is None


Samples = dict[Quantity, list[int]]


class _Arm:
    """One subject that stands ready to train, and the samples that it gave."""

    def __init__(self, subject: Subject) -> None:
        """Build all stages. StageError or SpecError where that cannot be done."""
        self.subject = subject
        self.samples: Samples = defaultdict(list)
        works = works_of(subject.recipe, vocabulary=subject.vocabulary, tokens=subject.tokens, folder="")
        self._timed: list[TimedNode] = []
        self._nodes = [StageInMemory(work, watched=self._watched) for work in works]
        self._orders, self._steps, self._resting = orders_of(subject.recipe.pipeline), 0, False

    @property
    def alters_model(self) -> bool:
        """Whether its codecs have a part in the model."""
        return any(stage.node.hooks for stage in self._nodes)

    def take_turn(self) -> None:
        """Make a few steps, and keep their samples."""
        first, self._steps = self._steps, self._steps + _STEPS_A_TURN
        job = PipelineJob(self._orders, self._steps)
        Loop([job.program(stage, first) for stage in range(len(self._nodes))], self._nodes).run()
        for stage, node in enumerate(self._timed):
            for (kind, what), taken in node.samples.items():
                quantity = self._quantity(stage, kind, what)
                if first >= _WARM_STEPS and self._resting == (quantity.what == _WOKEN) and what != "start":
                    self.samples[quantity] += taken
            node.samples.clear()

    def rest(self) -> None:
        """Have stages sleep before they decode, for as long as it takes to forget what they knew."""
        self._resting = True
        for node in self._timed:
            node.rest_s = 2 * WHOLE_NS / 1e9

    def _watched(self, node: StageNode) -> TimedNode:
        self._timed.append(TimedNode(node))
        return self._timed[-1]

    def _quantity(self, stage: int, kind: str, what: str) -> Quantity:
        if kind == "work":
            return Quantity(stage, what)
        return Quantity(stage, _WOKEN if self._resting and kind == "decode" else kind, _DIRECTIONS[what])


class Calibrator:
    """Times the subjects of a job."""

    def __init__(self, job: CalibrationJob) -> None:
        self._job = job
        self._pools: dict[str, Samples] = defaultdict(lambda: defaultdict(list))
        """Samples of maths, by the name of what shares it."""
        self._rounds = 0

    def run(self) -> Iterator[CalibrationRound | CalibrationDone]:
        """Time all; says how it goes after each round, and at the end what was found."""
        began = time.monotonic()
        timed: list[Timed] = []
        pooled: dict[str, tuple[StageMaths, ...]] = {}
        subjects = sum(map(len, self._job.groups))
        for group in self._job.groups:
            arms = [_Arm(subject) for subject in group]
            deadline = time.monotonic() + self._job.budget_s * len(group) / subjects
            gc.collect()
            gc.freeze()
            for number in itertools.count(1):
                self._rounds += 1
                for arm in arms:
                    arm.take_turn()
                    self._pool(arm)
                if number * _STEPS_A_TURN <= _WARM_STEPS:
                    continue
                found = [one for arm in arms for one in self._asked(arm)]
                steady = sum(map(is_steady, found))
                yield CalibrationRound(steady=steady, durations=len(found), seconds=time.monotonic() - began)
                if steady == len(found) or time.monotonic() > deadline:
                    break
            for arm in arms:
                arm.rest()
                for _ in range(-(-_LEAST_WOKEN // (_STEPS_A_TURN * arm.subject.recipe.pipeline.microbatches))):
                    arm.take_turn()
            for arm in arms:
                durations = self._durations(arm)
                maths, codecs = _by_stage(durations, arm.subject.recipe.pipeline.stages)
                timed.append(Timed(name=arm.subject.name, maths=maths if arm.alters_model else None, codecs=codecs))
                if not arm.alters_model and not arm.subject.maths_known:
                    pooled[arm.subject.maths] = maths
            del arm, arms  # the next group needs the memory
        yield CalibrationDone(
            subjects=tuple(timed), maths=pooled, seconds=time.monotonic() - began, rounds=self._rounds
        )

    def _pool(self, arm: _Arm) -> None:
        """Move the samples of maths that others share to them."""
        if not arm.alters_model:
            pool = self._pools[arm.subject.maths]
            for quantity in [quantity for quantity in arm.samples if quantity.maths]:
                pool[quantity] += arm.samples.pop(quantity)

    def _durations(self, arm: _Arm) -> dict[Quantity, Duration]:
        """Return all durations of a subject."""
        samples = {**arm.samples, **({} if arm.alters_model else self._pools[arm.subject.maths])}
        parts, stages = arm.subject.recipe.pipeline.microbatches, arm.subject.recipe.pipeline.stages
        times = {quantity: 1 if quantity.what in ("clip", "update") else parts for quantity in samples}
        typical = {quantity: duration(taken, per_step=0, step_ns=1).ns for quantity, taken in samples.items()}
        # The busiest stage's work: no step is shorter.
        step_ns = max(
            sum(times[q] * ns for q, ns in typical.items() if q.stage == stage and q.what != _WOKEN)
            for stage in range(stages)
        )
        return {
            quantity: duration(taken, per_step=times[quantity], step_ns=step_ns) for quantity, taken in samples.items()
        }

    def _asked(self, arm: _Arm) -> Iterator[Duration]:
        """Yield the durations that are wanted of a subject."""
        for quantity, found in self._durations(arm).items():
            if not quantity.maths or arm.alters_model or not arm.subject.maths_known:
                yield found


def _by_stage(
    durations: dict[Quantity, Duration], stages: int
) -> tuple[tuple[StageMaths, ...], tuple[CodecCosts, ...]]:
    maths = tuple(
        StageMaths(
            forward=durations[Quantity(stage, "forward")],
            backward=durations[Quantity(stage, "backward")],
            clip=durations[Quantity(stage, "clip")],
            update=durations[Quantity(stage, "update")],
        )
        for stage in range(stages)
    )

    def of(stage: int, what: str) -> dict[Direction, Duration]:
        return {
            quantity.direction: found
            for quantity, found in durations.items()
            if (quantity.stage, quantity.what) == (stage, what) and quantity.direction is not None
        }

    codecs = tuple(
        CodecCosts(encode=of(stage, "encode"), decode=of(stage, "decode"), decode_woken=of(stage, _WOKEN))
        for stage in range(stages)
    )
    return maths, codecs


Calibrating = Callable[[CalibrationJob], Iterator[CalibrationRound | CalibrationDone]]


def main(calibrate: Calibrating = lambda job: Calibrator(job).run()) -> None:
    """Time what the file says; print each round, and then the answer, as a line of JSON."""
    parser = argparse.ArgumentParser(description="Times recipes; started by a sweep, not by hand.")
    parser.add_argument("job", type=Path)
    job = CalibrationJob.model_validate_json(parser.parse_args().job.read_bytes())
    if job.processor is not None:
        os.sched_setaffinity(0, {job.processor})
    set_up_torch()

    def say(message: Frozen) -> None:
        sys.stdout.write(message.model_dump_json() + "\n")
        sys.stdout.flush()

    try:
        for message in calibrate(job):
            say(message)
    except TestbedError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(error.exit_status)
    os._exit(0)  # at once: taking an interpreter with torch apart needs half a second


if __name__ == "__main__":
    main()
