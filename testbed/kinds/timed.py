"""Time what the places of jobs of a table `job` do: `python -m testbed.kinds.timed JOB.json`.

The jobs run as in training, a step of each in turn, and a stopwatch notes for how long the thread had the processor in
each kind of work, encoding and decoding, until the fastest half of every duration's samples agrees.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from testbed.jobs.kind import Setting, kind_of
from testbed.jobs.loop import Loop
from testbed.pipeline import calibrate
from testbed.pipeline.calibration import (
    CalibrationDone,
    CalibrationJob,
    CalibrationRound,
    Subject,
    TimedNode,
    TimedPlaces,
    duration,
    is_steady,
)
from testbed.records import Duration, PlaceCosts

_STEPS_A_TURN = 2


class _Arm:
    """One subject that stands ready."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self._kind, self._steps = subject, kind_of(subject.recipe), 0
        setting = Setting(subject.recipe, subject.vocabulary, subject.tokens)
        self._nodes = [TimedNode(self._kind.node(place, setting)) for place in range(len(self._kind.places))]
        self.turn()
        for node in self._nodes:
            node.samples.clear()  # what is done first takes longer

    def turn(self) -> None:
        """Make some more steps."""
        first, end = self._steps, self._steps + _STEPS_A_TURN
        programs = [self._kind.played.program(place, first) for place in range(len(self._nodes))]
        Loop(programs, self._nodes, goes_on=lambda place, step: step + 1 < end).run()
        self._steps = end

    def costs(self) -> tuple[PlaceCosts, ...]:
        """Return what was found so far, by place."""
        return tuple(map(self._costs, self._nodes))

    def _costs(self, node: TimedNode) -> PlaceCosts:
        total_ns = sum(map(sum, node.samples.values())) // max(1, self._steps - _STEPS_A_TURN)
        found: dict[str, dict[str, Any]] = {"work": {}, "encode": {}, "decode": {}}
        for (kind, what), samples in sorted(node.samples.items()):
            per_step = max(1, len(samples) // max(1, self._steps - _STEPS_A_TURN))
            found[kind][what] = duration(samples, per_step=per_step, step_ns=total_ns)
        return PlaceCosts(**found)


def run(job: CalibrationJob) -> Iterator[CalibrationRound | CalibrationDone]:
    """Time all subjects of a job, in turns; say how it goes after each round, and at the end what was found."""
    began, rounds, timed = time.monotonic(), 0, list[TimedPlaces]()
    subjects = sum(map(len, job.groups))
    for group in job.groups:
        arms = [_Arm(subject) for subject in group]
        deadline, steady, durations = time.monotonic() + job.budget_s * len(group) / subjects, 0, list[Duration]()
        while not durations or (steady < len(durations) and time.monotonic() < deadline):
            for arm in arms:
                arm.turn()
            rounds += 1
            durations = [each for arm in arms for place in arm.costs() for each in place.durations]
            steady = sum(map(is_steady, durations))
            yield CalibrationRound(steady=steady, durations=len(durations), seconds=time.monotonic() - began)
        timed += [TimedPlaces(name=arm.subject.name, places=arm.costs()) for arm in arms]
    yield CalibrationDone(subjects=tuple(timed), maths={}, seconds=time.monotonic() - began, rounds=rounds)


def main() -> None:
    """Do what the file says, and print each message as a line of JSON."""
    calibrate.main(run)


if __name__ == "__main__":
    main()
