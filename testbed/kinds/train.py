"""Train a recipe of a table `job` in one process, without a network: `python -m testbed.kinds.train JOB.json`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import IO, Any, Literal

from testbed.jobs.actions import Node
from testbed.jobs.kind import JobKind, Setting, kind_of
from testbed.jobs.loop import Lane, Loop
from testbed.jobs.recorder import Recorded, Recorder, Said
from testbed.message_key import Phase
from testbed.pipeline import alone, faults
from testbed.pipeline.alone import AloneJob, Report
from testbed.pipeline.control import EvaluationDone, StepDone
from testbed.pipeline.frame import HEADER_BYTES
from testbed.records import StepRecord, TrainingRecord
from testbed.spec import Recipe


def make_nodes(job: AloneJob) -> list[Node]:
    """Make what every place of a job has."""
    kind, setting = kind_of(job.recipe), Setting(job.recipe, job.vocabulary, job.tokens)
    return [kind.node(place, setting) for place in range(len(kind.places))]


class _OnHostClock:
    """Tells a recorder when things really ended: in the loop no time passes."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._began_ns, self._last_ns = recorder, time.monotonic_ns(), 0

    def did(self, lane: Lane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        """Pass on what has ended."""
        begin_ns, self._last_ns = self._last_ns, time.monotonic_ns() - self._began_ns
        self._recorder.did(lane, action, value, begin_ns, self._last_ns)


class _Records:
    """Writes what each place did, with what it says of it."""

    def __init__(self, recipe: Recipe, nodes: Sequence[Node], outputs: Sequence[IO[str]], report: Report) -> None:
        self._recipe, self._nodes, self._outputs, self._report = recipe, nodes, outputs, report

    def write(self, place: int, step: Recorded) -> None:
        said = _said(self._nodes[place], step.step, step.phase)
        last = place == len(self._nodes) - 1
        record = StepRecord(
            step=step.step,
            phase=step.phase,
            warmup=step.phase == "train" and step.step < self._recipe.training.warmup_steps,
            start_ns=step.start_ns,
            end_ns=step.end_ns,
            optimiser_start_ns=step.optimiser_start_ns,
            synchronised_ns=step.synchronised_ns,
            loss=said.loss if last else None,
            accuracy=said.accuracy if last else None,
            gradient_norm=said.gradient_norm,
            tokens=said.tokens,
            actions=tuple(step.actions),
            sent=tuple(step.sent),
            received=tuple(step.received),
            counters=None,
            sockets=(),
        )
        self._outputs[place].write(record.model_dump_json() + "\n")
        if last and said.loss is not None:
            seconds = (step.end_ns - step.start_ns) / 1e9
            if step.phase == "train":
                self._report(StepDone(step=step.step, loss=said.loss, seconds=seconds, tokens=said.tokens))
            else:
                done = EvaluationDone(step=step.step, loss=said.loss, accuracy=said.accuracy, seconds=seconds)
                self._report(done)


def _said(node: Node, step: int, phase: Phase) -> Said:
    say = getattr(node, "said", None)
    return Said() if say is None else say(step, phase)


def run_alone(job: AloneJob, outputs: Sequence[IO[str]], report: Report) -> Literal["steps"]:
    """Run a job's programs to their end; records go to `outputs`, by place. StageError, CodecError as they come."""
    recipe, nodes = job.recipe, make_nodes(job)
    kind: JobKind = kind_of(recipe)
    recorder = Recorder(_Records(recipe, nodes, outputs, report).write, kind.named, HEADER_BYTES)
    programs = [kind.program(place) for place in range(len(nodes))]
    steps = recipe.training.steps
    loop = Loop(programs, nodes, observers=[_OnHostClock(recorder)], goes_on=lambda place, step: step + 1 < steps)
    try:
        loop.run()
    except (MemoryError, RuntimeError, OSError) as error:
        if faults.is_out_of_memory(error):
            raise faults.out_of_memory(f"the {len(nodes)} nodes", "while they trained", error) from error
        raise
    return "steps"


def train_alone(job: AloneJob, report: Report) -> TrainingRecord:
    """Train a recipe and write its folder, whole or not at all. StageError, CodecError, UserError as they come."""
    return alone.write_training(job, lambda outputs: run_alone(job, outputs, report))


if __name__ == "__main__":
    alone.main(train_alone)
