"""Train a recipe of a table `job` in one process, without a network: `python -m testbed.kinds.train JOB.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Literal

from testbed.jobs.actions import Node
from testbed.jobs.kind import Setting, kind_of
from testbed.pipeline import alone, faults
from testbed.pipeline.alone import AloneJob, Report
from testbed.records import TrainingRecord


def make_nodes(job: AloneJob) -> list[Node]:
    """Make what every place of a job has."""
    kind, setting = kind_of(job.recipe), Setting(job.recipe, job.vocabulary, job.tokens)
    return [kind.node(place, setting) for place in range(len(kind.places))]


def train(job: AloneJob, outputs: Sequence[IO[str]], report: Report) -> Literal["steps"]:
    """Run a job's programs to their end; records go to `outputs`, by place. StageError, CodecError as they come."""
    kind, nodes, training = kind_of(job.recipe), make_nodes(job), job.recipe.training
    try:
        alone.run_alone(
            kind,
            nodes,
            outputs,
            kind.named,
            warmup_steps=training.warmup_steps,
            report=report,
            goes_on=lambda place, step: step + 1 < training.steps,
        )
    except (MemoryError, RuntimeError, OSError) as error:
        if faults.is_out_of_memory(error):
            raise faults.out_of_memory(f"the {len(nodes)} nodes", "while they trained", error) from error
        raise
    return "steps"


def train_alone(job: AloneJob, report: Report) -> TrainingRecord:
    """Train a recipe and write its folder, whole or not at all. StageError, CodecError, UserError as they come."""
    return alone.write_training(job, lambda outputs: train(job, outputs, report))


if __name__ == "__main__":
    alone.main(train_alone)
