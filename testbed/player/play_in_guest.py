"""Plays jobs one after the other: `python -m testbed.player.play_in_guest CLOCK FOLDER WORKER`, in a guest or here.

Each job has its own lab, so that TCP keeps no state from the previous job, and on the virtual clock its own process.
Several workers may share the folder; they and the monitor (`guests`) communicate only through its file names:

queue/NAME           a free job: a `PlayJob` in JSON. Workers take jobs in the order of their names, by renaming them;
                     a job whose name ends with ALONE is the only one its worker takes
WORKER/NAME          a job taken by this worker
WORKER/NAME.steps    its size is the number of steps played
WORKER/NAME.result   the played times; the monitor moves the file to the job's output
WORKER/NAME.outcome  the outcome in JSON: {"seconds": on the lab's clock, "error": message or null}
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final, cast

from testbed.errors import SpecError, TestbedError
from testbed.net.lab import Lab
from testbed.net.schedules import Schedules
from testbed.player.connections import Connections, reachable
from testbed.player.lanes import pairs
from testbed.player.play_job import PlayJob
from testbed.player.play_trace import Clock, Player
from testbed.process import set_timer_slack
from testbed.runtime.pacing import set_priority
from testbed.trace.format import SEND, Trace, read_trace
from testbed.trace.played import Played
from testbed.vm.init import begin_random_numbers
from testbed.waiting import Waiter

TEMPORARY: Final = ".part"
"""Suffix of an incomplete file."""
ALONE: Final = "-alone"
_GRID_NS: Final = 1_000_000_000
"""On the virtual clock, connecting and playing begin at a multiple of it: the kernel's ticks are then aligned as in
every other run, and nothing depends on the time to build the lab."""


ONE_PAGE: Final = Path("/proc/sys/net/core/high_order_alloc_disable")
"""Sysctl that makes the kernel store sent data in single pages. Otherwise free memory determines which packets are
contiguous, hence how TCP merges segments acknowledged out of order, and hence when it considers a packet lost."""


class _Following:
    """A lab's schedules, on the player's clock."""

    def __init__(self, schedules: Schedules, origin_ns: int) -> None:
        self._schedules, self._origin_ns = schedules, origin_ns

    def next_due(self) -> int | None:
        due_ns = self._schedules.next_due_ns
        return None if due_ns is None else due_ns - self._origin_ns

    def follow(self) -> None:
        self._schedules.follow()


def play_job(job: PlayJob, clock: Clock, step_done: Callable[[int], None] = lambda step: None) -> Played:
    """Build the lab, play the trace over it, take the lab down.

    SpecError for a trace that cannot be played over this network; the errors of `Lab`, and TransportError.
    """
    trace = read_trace(job.trace)
    talking = pairs(trace)
    if len(trace.nodes) > job.lab.nodes:
        raise SpecError(f"the trace {job.trace} has {len(trace.nodes)} nodes, but the lab has {job.lab.nodes}")
    for lower, higher in talking:
        if not reachable(job.lab.topology, lower, higher):
            raise SpecError(
                f"the trace {job.trace} sends between nodes {lower} and {higher}, but in a line only neighbours reach "
                "each other; play it over a star"
            )
    director = None if job.director is None else job.director.make()
    sizes = _some_sizes(trace) if clock == "real" else []  # before play, because a director changes the trace
    certificates: dict[str, Any] = {}
    if clock == "virtual":
        begin_random_numbers()
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(job.seeded_lab, follow=False))
        if clock == "virtual":  # so that TCP measures round trips to the microsecond from the first one on
            _sleep_until(_next_on_grid())
        else:
            certificates["before"] = _certified(lab, sizes)
        connections = stack.enter_context(Connections(lab, talking))
        origin_ns = lab.play(_next_on_grid() if clock == "virtual" else None)
        _sleep_until(origin_ns)
        with Waiter(origin_ns) as waiter:
            player = Player(
                trace,
                connections,
                waiter,
                clock=clock,
                steps=job.steps,
                prove_steady=job.prove_steady and clock == "virtual" and job.repeatable,
                schedules=_Following(lab.schedules, origin_ns) if lab.schedules is not None else None,
                director=director,
                faults=job.node_faults,
                step_done=step_done,
            )
            played = player.play()
        lab.check()
        lab.hold()
        # On the clock of the recorded times: the time to build the lab is meaningless on a stopped clock.
        known = {"played_at_ns": 0} | ({"build_seconds": 0.0} if clock == "virtual" else {})
        if clock == "real":
            certificates["after"] = _certified(lab, sizes)
        played.about |= certificates
        played.lab = lab.record.model_copy(update=known).model_dump(mode="json")
        return played


def _next_on_grid() -> int:
    return (time.monotonic_ns() // _GRID_NS + 1) * _GRID_NS


def _sleep_until(moment_ns: int) -> None:
    with Waiter(moment_ns) as waiter:
        waiter.wait(0)


def _some_sizes(trace: Trace) -> list[int]:
    """Return the message sizes to measure the links with: the smallest, the median and the largest of a trace."""
    sizes = sorted(
        value for lane in trace.lanes for kind, value in zip(lane.kind, lane.value, strict=True) if kind == SEND
    )
    return sorted({sizes[0], sizes[len(sizes) // 2], sizes[-1]} if sizes else {1})


def _certified(lab: Lab, sizes: Sequence[int]) -> dict[str, Any]:
    """Measure the links with messages of these sizes."""
    return lab.certify("quick", sizes).model_dump(mode="json")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: under a temporary name until it is complete and on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + TEMPORARY)
    write(part)
    descriptor = os.open(part, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    part.rename(path)


def _taken(folder: Path, worker: str) -> Iterator[tuple[Path, PlayJob]]:
    """Take jobs until none are left."""
    mine = folder / worker
    mine.mkdir()
    fresh, taking = True, True
    while taking:
        taking = False
        for path in sorted((folder / "queue").iterdir()):
            alone = path.name.endswith(ALONE)
            if alone and not fresh:
                continue
            taken = mine / path.name
            with suppress(FileNotFoundError):  # another worker was faster
                path.rename(taken)
                yield taken, PlayJob.model_validate_json(taken.read_text(encoding="utf8"))
                fresh, taking = False, not alone
                break


def _play_taken(place: Path, job: PlayJob, clock: Clock) -> None:
    """Play a taken job, and write its result and outcome."""
    started, error = time.monotonic(), None
    steps = place.with_name(place.name + ".steps")
    steps.touch()
    gc.collect()
    gc.disable()  # a pause would show on the real clock, and the player creates no reference cycles
    try:
        played = play_job(job, clock, lambda step: os.truncate(steps, step + 1))
        write_whole(place.with_name(place.name + ".result"), played.write)
    except TestbedError as problem:
        error = str(problem)
    except Exception:
        error = traceback.format_exc()
    finally:
        gc.enable()
    outcome = json.dumps({"seconds": time.monotonic() - started, "error": error})
    write_whole(place.with_name(place.name + ".outcome"), lambda path: path.write_text(outcome))


def main() -> None:
    """Play jobs until none are left."""
    clock, folder, worker = cast(Clock, sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    set_timer_slack()
    if clock == "real":
        set_priority(os.getpid(), True)
    else:
        ONE_PAGE.write_text("1", encoding="ascii")
    for place, job in _taken(folder, worker):
        if clock == "real":
            _play_taken(place, job, clock)
            continue
        # The memory that an earlier job leaves in a process can shift a reading of the virtual clock.
        if (child := os.fork()) == 0:
            _play_taken(place, job, clock)
            os._exit(0)
        if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"the process of the job ended with status {status}")


if __name__ == "__main__":
    main()
