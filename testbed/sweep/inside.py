"""Make a live run in a guest with a virtual clock: `python -m testbed.sweep.inside RUN`, started by `live_virtual`.

Here are the lab, the stage hosts and who follows them, and nothing else: certificates, summaries and reports are made
outside, where they take a tenth of the time. RUN is a file that holds a `LiveRun` in JSON. What happens is told on
standard output, a `Told` in JSON a line; the run's records go to its folder, as anywhere.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, NoReturn, cast

from testbed.errors import TestbedError, UserError
from testbed.frozen import Frozen
from testbed.net.kernel.namespace import Namespace
from testbed.pipeline.control import Ended, EvaluationDone, StepDone, host_environment
from testbed.pipeline.pacing import be_prompt, wait_until
from testbed.play.inside import ONE_PAGE
from testbed.process import die_with_parent
from testbed.records import LabRecord, Sample
from testbed.spec import Cell
from testbed.sweep.interrupt import Interrupt
from testbed.sweep.session import Popen, Session, Tokens

_HOST: Final = "testbed.pipeline.host"
_GRID_NS: Final = 1_000_000_000
"""Training begins at a multiple of it, so that nothing depends on how long it took to get there."""


class LiveRun(Frozen):
    """The run that is to be made."""

    cell: Cell
    link_seed: int
    """Added to the seed of every pipe."""
    folder: str
    """The run's, absolute."""
    tokens: str
    """Path of the prepared text."""
    vocabulary: int


class Told(Frozen):
    """One thing that a guest has to say of its run."""

    phase: str | None = None
    """What it does now."""
    lab: LabRecord | None = None
    """The lab, when its links begin to play."""
    step: StepDone | None = None
    evaluated: EvaluationDone | None = None
    ended: Ended | None = None
    """Why training ended; the last that is said of a run that ended well."""
    failed: str | None = None
    """Why the run failed; the last that is said of it."""
    by_user: bool = False
    """Whether the user can mend what failed."""


class _Teller:
    """Follows the run, and says what happens."""

    def step(self, message: StepDone) -> None:
        say(Told(step=message))

    def evaluated(self, message: EvaluationDone) -> None:
        say(Told(evaluated=message))

    def carried(self, sample: Sample) -> None:
        """Say nothing: counters.jsonl has it."""


def say(told: Told) -> None:
    """Write a line to standard output."""
    sys.stdout.write(told.model_dump_json(exclude_defaults=True) + "\n")
    sys.stdout.flush()


class _Fork:
    """A program of ours that is a fork of this process and so has what this one has imported: a subprocess.Popen as far
    as `control.Host` needs one. To import torch once for all stages takes a third of the time of three times.
    """

    returncode: int | None = None

    def __init__(
        self,
        namespace: Namespace,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        stdout: IO[bytes],
        **_: Any,
    ) -> None:
        """`command` is one of `process.start_program`; the program starts in the namespace. It has no input, and what
        it prints goes to `stdout`.
        """
        with namespace.entered():
            self.pid = os.fork()
            if self.pid == 0:  # in here, or it would leave the namespace again
                _become(command, pass_fds, stdout.fileno())

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. subprocess.TimeoutExpired as in Popen."""
        due = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, 0 if due is None else os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif due is not None and time.monotonic() >= due:
                raise subprocess.TimeoutExpired(_HOST, timeout or 0.0)
            else:
                time.sleep(0.01)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, 9)


def _become(command: Sequence[str], keep: Sequence[int], output: int) -> NoReturn:
    """Be the program, in the fork, and never return into the code of this one."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for fd in {int(path.name) for path in Path("/proc/self/fd").iterdir()} - {0, 1, 2, *keep}:
            with suppress(OSError):  # the list's own
                os.close(fd)  # else it would hold the other ends of other stages' sockets open
        parent, module, *arguments = command[command.index("testbed.process") + 1 :]
        die_with_parent(int(parent))
        sys.argv[:] = [module, *arguments]
        importlib.import_module(module).main()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def fork_in(namespace: Namespace) -> Popen:
    """Return what starts programs of ours in a namespace, as forks of this process."""
    return cast(Popen, functools.partial(_Fork, namespace))


def main() -> None:
    """Make the run, and say how it ended."""
    try:
        run = LiveRun.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf8"))
        ONE_PAGE.write_text("1", encoding="ascii")
        say(Told(phase="loading torch in the guest"))
        os.environ.update(host_environment())  # before torch reads it
        importlib.import_module(_HOST).preload()
        be_prompt()
        with Session(run.cell, "the virtual clock's", link_seed=run.link_seed, start=fork_in) as session:
            say(Told(phase="starting"))
            wait_until((time.monotonic_ns() // _GRID_NS + 1) * _GRID_NS)
            tokens = Tokens(Path(run.tokens), run.vocabulary)
            ended = session.train(
                run.cell,
                tokens,
                Path(run.folder),
                _Teller(),
                Interrupt(lambda message: None),
                lambda lab: say(Told(lab=lab)),
            )
        say(Told(ended=ended))
    except TestbedError as error:
        say(Told(failed=str(error), by_user=isinstance(error, UserError)))
    except Exception:
        say(Told(failed=traceback.format_exc()))


if __name__ == "__main__":
    main()
