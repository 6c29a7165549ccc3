"""Time every action, encode and decode of recipes, alone on one core: `python -m testbed.pipeline.calibrate JOB.json`.

All recipes stand in this one process, trained by `alone.Stages`, and take turns: a few steps of each in every round,
so a machine that becomes slower does it to all of them alike. What is counted is the time for which a stage's thread
had the processor (CLOCK_THREAD_CPUTIME_ID): on a core of its own that is all the time, and on a busy machine what
others took is left out; what they do to caches is not. Rounds follow one another until the fastest half of every
duration's samples agrees (`records.Duration.noisy`), or the time is spent. In the last round each stage sleeps before
it decodes, as one does that waits for a link, and that alone is counted (waking.py).
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from testbed.errors import TestbedError
from testbed.frozen import Frozen
from testbed.message_key import Direction
from testbed.pipeline.alone import Baton, Stages, works_of
from testbed.pipeline.calibration import (
    CalibrationDone,
    CalibrationJob,
    CalibrationRound,
    Subject,
    Timed,
    duration,
    is_steady,
)
from testbed.pipeline.pacing import Stopwatch
from testbed.pipeline.train import set_up_torch
from testbed.records import ActionKind, CodecCosts, Duration, StageMaths
from testbed.waking import WHOLE_NS

_WARM_STEPS = 2
"""First steps, in which memory is set aside and codecs and the optimiser begin to remember."""
_STEPS_A_TURN = 2
_LEAST_WOKEN = 8
"""Samples of a decode after a sleep."""
_WOKEN = "decode_woken"


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


class _Turnstile:
    """Lets the stages of one recipe through to so many steps, and no further."""

    def __init__(self, stages: int) -> None:
        self._allowed, self._came = 0, [0] * stages
        self._go: threading.Condition
        self._stand: threading.Condition

    def prepare(self, baton: Baton) -> None:
        """Learn of the stages' baton, before they start."""
        self._go, self._stand = baton.condition(), baton.condition()

    def wait(self, baton: Baton, stage: int) -> None:
        """Wait until the stage may go on; to be called before training and before each step."""
        number = self._came[stage]
        self._came[stage] += 1
        self._stand.notify()
        baton.wait(self._go, lambda: self._allowed > number, f"stage {stage}: waiting for its turn")

    def let_through(self, baton: Baton, count: int) -> None:
        """Let all stages make `count` more steps, and wait until they have. TransportError where one has failed."""
        with baton:
            self._allowed += count
            self._go.notify_all()
            baton.wait(self._stand, lambda: min(self._came) > self._allowed, "calibrating")


class _Watch(Stopwatch):
    """Has a stage wait for its turn before each step, and notes how long the processor was at what."""

    def __init__(self, arm: _Arm, baton: Baton, stage: int) -> None:
        super().__init__()
        self._arm, self._baton, self._stage = arm, baton, stage
        self._steps = -2  # `start` is called before training, and then before each step
        self._mark_ns = 0

    def start(self) -> int:
        self._arm.turnstile.wait(self._baton, self._stage)
        self._steps += 1
        return super().start()

    def received(self, arrived_ns: int, input_ns: int, decoded_ns: int) -> None:
        now_ns = time.thread_time_ns()
        super().received(arrived_ns, input_ns, decoded_ns)
        what = _WOKEN if self._arm.resting else "decode"
        self._note(what, now_ns - self._arm.taken_ns(self._stage, self._kind), self._direction)

    def begin(self) -> None:
        super().begin()
        self._mark_ns = time.thread_time_ns()

    def done(self) -> None:
        now_ns = time.thread_time_ns()
        super().done()
        self._note("forward" if self._kind == "F" else "backward", now_ns - self._mark_ns)
        self._mark_ns = time.thread_time_ns()

    def encoded(self) -> int:
        self._note("encode", time.thread_time_ns() - self._mark_ns, self._direction)
        return super().encoded()

    def end(self) -> tuple[int, int]:
        ended = super().end()
        self._mark_ns = time.thread_time_ns()
        return ended

    def synchronised(self, line_ns: int) -> int:
        if self._steps >= 0:  # the first meeting is no end of a step
            self._note("clip", self._arm.came_ns(self._stage) - self._mark_ns)
        knew_ns = super().synchronised(line_ns)
        self._mark_ns = time.thread_time_ns()
        return knew_ns

    def leave(self, update: bool) -> int:
        self._note("update", time.thread_time_ns() - self._mark_ns)
        return super().leave(update)

    @property
    def _direction(self) -> Direction:
        """The direction of the tensors that come in and go out: both go the action's way."""
        return "forward" if self._kind == "F" else "backward"

    def _note(self, what: str, ns: int, direction: Direction | None = None) -> None:
        if self._steps >= _WARM_STEPS and self._arm.resting == (what == _WOKEN):
            self._arm.samples[Quantity(self._stage, what, direction)].append(ns)


class _Arm:
    """One subject that stands ready to train, and the samples that it gave."""

    def __init__(self, subject: Subject, stack: ExitStack) -> None:
        self.subject = subject
        self.samples: Samples = defaultdict(list)
        self.resting = False
        """Whether stages sleep before they decode."""
        works = works_of(subject.recipe, vocabulary=subject.vocabulary, tokens=subject.tokens, folder="")
        self.turnstile = _Turnstile(len(works))
        self._outputs = [io.StringIO() for _ in works]
        self._stages = stack.enter_context(
            Stages(works, self._outputs, watch=lambda baton, stage: _Watch(self, baton, stage))
        )

    @property
    def alters_model(self) -> bool:
        """Whether its codecs have a part in the model; known once it stands."""
        return self._stages.alter_model

    def taken_ns(self, stage: int, kind: ActionKind) -> int:
        """Return when a stage had the input of an action, in its thread's time."""
        upstream, downstream = self._stages.passages[stage]
        passage = upstream if kind == "F" else downstream
        assert passage is not None
        return passage.taken_thread_ns

    def came_ns(self, stage: int) -> int:
        """Return when a stage came to the last meeting, in its thread's time."""
        return self._stages.gathers[stage].came_thread_ns

    def stand(self) -> None:
        """Build all stages, and let them come to their first step."""
        self.turnstile.prepare(self._stages.baton)
        self._stages.start()
        self._advance(1)  # training begins with a meeting before the first step

    def take_turn(self) -> None:
        """Make a few steps, and keep their samples."""
        self._advance(_STEPS_A_TURN)
        for output in self._outputs:  # their records are not needed
            output.seek(0)
            output.truncate()

    def rest(self) -> None:
        """Have stages sleep before they decode, for as long as it takes to forget what they knew."""
        self.resting = True
        for passage in itertools.chain.from_iterable(self._stages.passages):
            if passage is not None:
                passage.rest_s = 2 * WHOLE_NS / 1e9

    def _advance(self, count: int) -> None:
        try:
            self.turnstile.let_through(self._stages.baton, count)
        except TestbedError:
            self._stages.join()  # raises what the failure was
            raise


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
            with ExitStack() as stack:
                arms = [_Arm(subject, stack) for subject in group]
                for arm in arms:
                    arm.stand()
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
