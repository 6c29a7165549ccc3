"""Train a recipe of a table `job` in one process, without a network: `python -m testbed.kinds.train JOB.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO

from testbed.jobs.kind import Setting, kind_of
from testbed.jobs.pipeline import Ended
from testbed.pipeline import alone, faults
from testbed.pipeline.alone import AloneJob, Report
from testbed.records import TrainingRecord


def train_alone(job: AloneJob, report: Report) -> TrainingRecord:
    """Train a recipe and write its folder, whole or not at all. StageError, CodecError, UserError as they come."""
    recipe, kind = job.recipe, kind_of(job.recipe)
    setting = Setting(recipe, job.vocabulary, job.tokens)

    def train(outputs: Sequence[IO[str]]) -> Ended:
        try:
            nodes = [kind.node(place, setting) for place in range(len(kind.places))]
            alone.run_alone(
                kind,
                nodes,
                outputs,
                kind.named,
                warmup_steps=recipe.training.warmup_steps,
                report=report,
                goes_on=lambda place, step: step + 1 < recipe.training.steps,
            )
        except (MemoryError, RuntimeError, OSError) as error:
            if faults.is_out_of_memory(error):
                raise faults.out_of_memory(f"the {len(kind.places)} nodes", "while they trained", error) from error
            raise
        return "steps"

    return alone.write_training(job, train)


def main() -> None:
    """Do what the file says, and print each message as a line of JSON."""
    alone.main(train_alone)


if __name__ == "__main__":
    main()
