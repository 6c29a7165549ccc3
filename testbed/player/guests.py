"""Plays jobs: on the virtual clock in parallel guests, on the real clock one at a time on this machine.

A worker (`play_in_guest`) takes jobs from a folder until none are left. This module monitors it on the real clock: a
worker that dies or hangs fails its current job, and is replaced.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

from testbed import results
from testbed.errors import GuestKernelError, SpecError
from testbed.player.play_in_guest import ALONE, TEMPORARY
from testbed.player.play_job import Outcome, PlayJob
from testbed.player.play_trace import Clock
from testbed.process import ROOT, command_line, process_group, start_program
from testbed.processors import granted_share
from testbed.trace.format import RECEIVE, SEND, read_trace
from testbed.vm.guest import Guest, start_guest
from testbed.vm.kernel import GuestKernel

_WORK: Final = ".playing-"
_SEGMENT_BYTES = 1448
_PACKET_S, _OPERATION_S, _JOB_S = 100e-6, 20e-6, 1.0
"""Real time per packet, operation and job. Upper guesses for a slow machine, used to order jobs and detect hangs."""
_STEPS_TO_PROVE = 12
_MEMORY: Final = "1G"
"""Memory of a guest; the host allocates only touched pages."""
_PATIENCE_S, _PATIENCE = 60.0, 20.0
_LOOK_S = 0.05
_LAST_WORDS = 2000
_STILLBORN = 3
_PROGRAM: Final = "testbed.player.play_in_guest"


class Progress(NamedTuple):
    """Progress of a job."""

    job: int
    """Its number in the list."""
    steps: int
    """Number of steps played; -1 at the end."""
    outcome: Outcome | None
    """Its outcome, once it has ended."""


class PlayJobs(Protocol):
    """What plays jobs: `play_jobs`, on this machine, or a cluster (`sweep.play_task`)."""

    def __call__(
        self,
        jobs: Sequence[PlayJob],
        *,
        clock: Clock,
        folder: Path,
        kernel: GuestKernel | None = None,
        guests: int = 1,
        progress: Callable[[Progress], None] = ...,
    ) -> list[Outcome]:
        """Play jobs and return their outcomes."""
        ...


def play_jobs(
    jobs: Sequence[PlayJob],
    *,
    clock: Clock,
    folder: Path,
    kernel: GuestKernel | None = None,
    guests: int = 1,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> list[Outcome]:
    """Play jobs and return their outcomes; a failed job is reported in its outcome, and the others continue.

    `folder`: for the queue of jobs; leftovers of killed programs are removed from it. `kernel`, `guests`: for the
    virtual clock. Call it from the main thread. SpecError for a trace that cannot be read, or a virtual clock without a
    kernel.
    """
    if clock == "virtual" and kernel is None:
        raise SpecError("the virtual clock needs a guest kernel, and none was given")
    with ExitStack() as stack:
        play = _Play(jobs, clock, folder, kernel, progress, stack)
        return play.all(1 if clock == "real" else max(1, min(guests, len(jobs))))


def predicted_seconds(job: PlayJob) -> float:
    """Estimate the real time of a job on the virtual clock, in seconds. SpecError as from `read_trace`."""
    trace = read_trace(job.trace)
    sizes = [value for lane in trace.lanes for kind, value in zip(lane.kind, lane.value, strict=True) if kind == SEND]
    packets = sum(-(-size // _SEGMENT_BYTES) for size in sizes)
    operations = sum(len(lane) for lane in trace.lanes) + sum(lane.kind.count(RECEIVE) for lane in trace.lanes)
    steps = min(trace.steps, job.steps or trace.steps)
    if job.prove_steady and job.repeatable:
        steps = min(steps, _STEPS_TO_PROVE)
    share = steps / max(1, trace.steps)
    return _JOB_S + share * (packets * _PACKET_S + operations * _OPERATION_S)


class _Worker:
    """A worker, as seen by the monitor."""

    def __init__(self, name: str, folder: Path, process: Guest | subprocess.Popen[bytes], words: BinaryIO) -> None:
        self.name, self.folder, self.process, self._words = name, folder / name, process, words
        self.job: int | None = None
        """Number of its current job."""
        self.steps = 0
        self.began_s = self.moved_s = time.monotonic()

    def ended(self) -> str | None:
        """Describe how it ended; None while it runs."""
        try:
            status = self.process.poll()
        except GuestKernelError as error:
            return str(error)
        if status is None:
            return None
        said = os.pread(self._words.fileno(), 1 << 20, 0).decode(errors="replace").strip()[-_LAST_WORDS:]
        return f"its process ended with status {status}: {said or 'no message'}"

    def close(self) -> None:
        """End it, and wait until all its processes are gone."""
        self.process.kill()
        with suppress(GuestKernelError):
            self.process.wait()
        if isinstance(self.process, Guest):
            self.process.__exit__(None, None, None)
        self._words.close()


class _Play:
    def __init__(
        self,
        jobs: Sequence[PlayJob],
        clock: Clock,
        folder: Path,
        kernel: GuestKernel | None,
        progress: Callable[[Progress], None],
        stack: ExitStack,
    ) -> None:
        """`stack` removes everything created here."""
        self._jobs, self._clock, self._kernel = jobs, clock, kernel
        self._progress, self._stack = progress, stack
        self._predicted_s = [predicted_seconds(job) for job in jobs]
        self._outcomes: dict[int, Outcome] = {}
        self._started = 0
        self._stillborn = 0
        """Number of consecutive workers that ended before they took a job."""
        _remove_left(folder)
        self._folder = folder.absolute() / f"{_WORK}{os.getpid()}"  # the worker has another current directory
        self._queue = self._folder / "queue"
        stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
        results.make_folder(self._queue)
        for rank, number in enumerate(sorted(range(len(self._jobs)), key=lambda n: -self._predicted_s[n])):
            job = self._jobs[number]
            results.make_folder(job.output.parent, "choose another with -o")
            job.output.with_name(job.output.name + TEMPORARY).unlink(missing_ok=True)
            absolute = job.model_copy(update={"trace": job.trace.absolute(), "output": job.output.absolute()})
            # With packet loss, one nanosecond can change what TCP does next. So such a job runs first in its guest.
            alone = ALONE if self._clock == "virtual" and not job.repeatable else ""
            (self._queue / f"{rank:06d}-{number}{alone}").write_text(absolute.model_dump_json(), encoding="utf8")

    def all(self, count: int) -> list[Outcome]:
        """Keep `count` workers running until every job has an outcome."""
        workers: list[_Worker] = []

        def close() -> None:
            for worker in workers:
                worker.close()

        self._stack.callback(close)
        while len(self._outcomes) < len(self._jobs):
            for _ in range(min(count - len(workers), len(self._waiting()))):
                workers.append(self._start())
            time.sleep(_LOOK_S)
            for worker in list(workers):
                why = worker.ended()  # before reading, so that its last files are seen
                self._look(worker)
                if why is None and (why := self._hangs(worker)) is None:
                    continue
                workers.remove(worker)
                worker.close()
                self._look(worker)
                if worker.job is not None:
                    self._fail(worker, why)
                if worker.folder.exists():
                    self._stillborn = 0
                    continue
                self._stillborn += 1
                if self._stillborn >= _STILLBORN:  # the next one would not take a job either
                    for name in self._waiting():
                        (self._queue / name).unlink()
                        self._end(_number(name), Outcome(output=None, error=why, host_seconds=0.0, guest_seconds=None))
        return [self._outcomes[number] for number in range(len(self._jobs))]

    def _waiting(self) -> list[str]:
        return [path.name for path in self._queue.iterdir()]

    def _start(self) -> _Worker:
        name = f"worker-{self._started}"
        self._started += 1
        words = os.fdopen(os.memfd_create("words"), "rb")
        arguments = (self._clock, str(self._folder), name)
        if self._kernel is None or self._clock == "real":
            process: Guest | subprocess.Popen[bytes] = start_program(
                _PROGRAM,
                *arguments,
                attempt="play traces",
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
            )
        else:
            process = start_guest(
                self._kernel,
                command_line(_PROGRAM, *arguments),
                memory=_MEMORY,
                # Nothing else: further mounts change the guest's memory, which affects lossy links.
                share=[self._folder],
                share_current=False,
                virtual_clock=True,
                stdout=words.fileno(),
                stderr=words.fileno(),
            )
        return _Worker(name, self._folder, process, words)

    def _look(self, worker: _Worker) -> None:
        """Process the progress of a worker."""
        with suppress(FileNotFoundError):
            taken = [path.name for path in worker.folder.iterdir() if not path.suffix]
            for name in sorted(taken, key=lambda name: (worker.folder / f"{name}.outcome").exists(), reverse=True):
                number = _number(name)
                if number in self._outcomes:
                    continue
                if worker.job != number:
                    worker.job, worker.steps = number, 0
                    worker.began_s = worker.moved_s = time.monotonic()
                with suppress(FileNotFoundError):
                    if (steps := (worker.folder / f"{name}.steps").stat().st_size) > worker.steps:
                        worker.steps, worker.moved_s = steps, time.monotonic()
                        self._progress(Progress(number, steps, None))
                with suppress(FileNotFoundError):
                    told = json.loads((worker.folder / f"{name}.outcome").read_text(encoding="utf8"))
                    self._finish(worker, number, told)

    def _finish(self, worker: _Worker, number: int, told: dict[str, Any]) -> None:
        error, output = told["error"], self._jobs[number].output
        if not error:
            part = output.with_name(output.name + TEMPORARY)
            shutil.move(next(path for path in worker.folder.glob("*.result") if _number(path.name) == number), part)
            part.replace(output)
        outcome = Outcome(
            output=None if error else output,
            error=error,
            host_seconds=time.monotonic() - worker.began_s,
            guest_seconds=told["seconds"] if self._clock == "virtual" and not error else None,
        )
        worker.job, worker.began_s, worker.moved_s = None, time.monotonic(), time.monotonic()
        self._end(number, outcome)

    def _hangs(self, worker: _Worker) -> str | None:
        """Describe a worker that has made no progress for too long; None if it has."""
        predicted_s = 0.0 if worker.job is None else self._predicted_s[worker.job]
        silent_s, patience_s = time.monotonic() - worker.moved_s, max(_PATIENCE_S, _PATIENCE * predicted_s)
        if silent_s < patience_s:
            return None
        # On a busy machine it has only a share of a processor, and is slower in proportion.
        share = granted_share(process_group(worker.process.pid))
        if silent_s * share < patience_s:
            return None
        return (
            f"it made no progress for {silent_s:.0f} s of real time, with a processor for {share:.0%} of its runnable "
            "time, and was stopped"
        )

    def _fail(self, worker: _Worker, why: str) -> None:
        assert worker.job is not None
        job = self._jobs[worker.job]
        job.output.with_name(job.output.name + TEMPORARY).unlink(missing_ok=True)
        seconds = time.monotonic() - worker.began_s
        error = f"cannot play {job.trace} (step {worker.steps}): {why}"
        self._end(worker.job, Outcome(output=None, error=error, host_seconds=seconds, guest_seconds=None))

    def _end(self, number: int, outcome: Outcome) -> None:
        self._outcomes[number] = outcome
        self._progress(Progress(number, -1, outcome))


def _number(name: str) -> int:
    """Return the number of the job that a file of the folder belongs to."""
    return int(name.split(".")[0].split("-")[1])


def _remove_left(folder: Path) -> None:
    """Remove leftovers of programs that have died."""
    for left in folder.glob(f"{_WORK}*"):
        with suppress(ValueError):
            if not Path(f"/proc/{int(left.name.removeprefix(_WORK))}").exists():
                shutil.rmtree(left, ignore_errors=True)
