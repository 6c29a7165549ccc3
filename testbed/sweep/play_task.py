"""Plays jobs as tasks of a cluster, several in a guest: `python -m testbed.sweep.play_task JOBS.json`, on each machine.

A job's result does not depend on the others of its guest (`player.play_in_guest`), so they may be grouped in any way.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from pydantic import TypeAdapter

from testbed import paths, results
from testbed.errors import CapabilityError, status_of
from testbed.frozen import Frozen
from testbed.player.guests import PlayJobs, Progress, play_jobs, predicted_seconds
from testbed.player.play_job import Outcome, PlayJob
from testbed.player.play_trace import Clock
from testbed.player.virtual import need_kernel
from testbed.sweep.executor import Cluster, Task

_LEAST_S = 20.0
"""Predicted time of the jobs of a guest, so that its boot is a small part of it."""
_PER_CORE = 3
"""Least number of tasks for each core, so that all cores end at about the same time."""
_MEMORY_BYTES = 1 << 30
_OUTCOMES = TypeAdapter(list[Outcome])


class GuestJob(Frozen):
    """Arguments of this program."""

    jobs: tuple[PlayJob, ...]


def player_on(cluster: Cluster, note: Callable[[str], None]) -> PlayJobs:
    """Return what plays on a cluster, whose nodes have kernels and processors of their own."""

    def play(
        jobs: Sequence[PlayJob],
        *,
        clock: Clock,
        folder: Path,
        progress: Callable[[Progress], None] = lambda progress: None,
        **here: object,
    ) -> list[Outcome]:
        if clock != "virtual":
            raise CapabilityError("a cluster plays on the virtual clock alone; omit --executor ray for the real clock")
        outcomes: dict[int, Outcome] = {}
        results.make_folder(folder)
        with paths.scratch_folder(".playing-", folder) as scratch:
            groups = _groups(jobs, cluster.cores)
            tasks = [_task(scratch / str(number), [jobs[one] for one in group]) for number, group in enumerate(groups)]
            of = {task.name: group for task, group in zip(tasks, groups, strict=True)}
            with closing(cluster.execute(tasks, note=note)) as ended:
                for result in ended:
                    group = of[result.task.name]
                    if result.error is not None:
                        lost = Outcome(output=None, error=str(result.error), host_seconds=0.0, guest_seconds=None)
                        told = [lost] * len(group)
                    else:
                        told = _OUTCOMES.validate_json(result.said)
                    for number, outcome in zip(group, told, strict=True):
                        outcomes[number] = _arrived(jobs[number], outcome, result.task.writes, result.node)
                        progress(Progress(number, -1, outcomes[number]))
        return [outcomes[number] for number in range(len(jobs))]

    return play


def _groups(jobs: Sequence[PlayJob], cores: int) -> list[list[int]]:
    """Group jobs, the longest first, for guests that take about the same time."""
    predicted_s = [predicted_seconds(job) for job in jobs]
    share_s = max(_LEAST_S, sum(predicted_s) / (_PER_CORE * cores))
    groups: list[list[int]] = []
    filled_s = share_s
    for number in sorted(range(len(jobs)), key=lambda number: -predicted_s[number]):
        if filled_s + predicted_s[number] > share_s:
            groups.append([])
            filled_s = 0.0
        groups[-1].append(number)
        filled_s += predicted_s[number]
    return groups


def _task(folder: Path, jobs: Sequence[PlayJob]) -> Task:
    """Write the file of a task; return the task."""
    traces = dict.fromkeys(job.trace.absolute() for job in jobs)
    made = folder.absolute() / "made"
    moved = [job.model_copy(update={"trace": job.trace.absolute(), "output": made / job.output.name}) for job in jobs]
    results.make_folder(folder)
    file = folder.absolute() / "jobs.json"
    results.write_json(file, GuestJob(jobs=tuple(moved)))
    names = ", ".join(dict.fromkeys(trace.name for trace in traces))
    return Task(
        name=folder.name,
        module="testbed.sweep.play_task",
        arguments=(str(file),),
        memory_bytes=_MEMORY_BYTES,
        attempt=f"play {names}",
        reads=(file, *traces),
        writes=made,
        guest=True,
    )


def _arrived(job: PlayJob, outcome: Outcome, made: Path | None, node: str) -> Outcome:
    """Move a result to the job's output; return its outcome here."""
    if outcome.output is None or made is None:
        return outcome.model_copy(update={"error": f"{outcome.error} (on {node})" if node else outcome.error})
    results.make_folder(job.output.parent)
    shutil.move(made / job.output.name, job.output)
    return outcome.model_copy(update={"output": job.output})


def main() -> None:
    """Play the jobs in the file one after the other, and print their outcomes."""

    def play() -> None:
        jobs = GuestJob.model_validate_json(Path(sys.argv[1]).read_bytes()).jobs
        work = Path(sys.argv[1]).with_name("work")
        outcomes = play_jobs(jobs, clock="virtual", folder=work, kernel=need_kernel())
        sys.stdout.write(_OUTCOMES.dump_json(outcomes).decode() + "\n")

    sys.exit(status_of(play))


if __name__ == "__main__":
    main()
