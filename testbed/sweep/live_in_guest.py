"""Make a live run in a guest with a virtual clock; `live_virtual` starts `python -m testbed.sweep.live_in_guest RUN`.

The guest holds only the lab, the stage hosts and their monitor; certificates, summaries and reports are made outside,
in a tenth of the time. RUN is a file with a `LiveRun` in JSON. Progress goes to standard output, one JSON `Told` per
line; records go to the run's folder, as usual.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from pydantic import Field

from testbed.errors import TestbedError, UserError
from testbed.frozen import Frozen
from testbed.player.play_in_guest import ONE_PAGE
from testbed.process import set_timer_slack
from testbed.records import LabRecord, Sample
from testbed.runtime.control_plane import Ended, EvaluationDone, StepDone
from testbed.runtime.pacing import Coding, wait_for_the_grid
from testbed.spec import Cell
from testbed.sweep.interrupt import Interrupt
from testbed.sweep.live_session import Session, Tokens


class LiveRun(Frozen):
    """The run to make."""

    cell: Cell
    link_seed: int
    """Added to the seed of every pipe, and to that of the draws of durations."""
    folder: str
    """Absolute path of the run's folder."""
    tokens: str
    """Path of the prepared text."""
    vocabulary: int
    coding: Coding | None
    """Codec durations in data parallel training; None: codecs take no time."""
    checkpoint_every: int | None
    """See `spec.TrainingSpec`; a cell's JSON omits it."""
    resumes_at: int
    """The step whose checkpoint is resumed; 0: none is."""


class Told(Frozen):
    """A message from the guest about its run."""

    phase: str | None = None
    """What the run is doing now."""
    lab: LabRecord | None = None
    """The lab; sent when its links begin to vary."""
    step: StepDone | None = None
    evaluated: EvaluationDone | None = None
    ended: Ended | None = None
    """Why training ended; the last message of a successful run."""
    lost: dict[str, str] = Field(default={})
    """Workers that training continued without, by name, with reasons; sent with `ended`."""
    failed: str | None = None
    """Why the run failed; its last message."""
    by_user: bool = False
    """Whether the failure is a user error."""


class _Teller:
    """Observes the run, and prints its progress."""

    def step(self, message: StepDone) -> None:
        say(Told(step=message))

    def evaluated(self, message: EvaluationDone) -> None:
        say(Told(evaluated=message))

    def carried(self, sample: Sample) -> None:
        """Print nothing: counters.jsonl has the sample."""


def say(told: Told) -> None:
    """Write a line to standard output."""
    sys.stdout.write(told.model_dump_json(exclude_defaults=True) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Make the run, and print its outcome."""
    try:
        run = LiveRun.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf8"))
        ONE_PAGE.write_text("1", encoding="ascii")
        often = {"checkpoint_every": run.checkpoint_every}
        cell = run.cell.model_copy(update={"training": run.cell.training.model_copy(update=often)})
        say(Told(phase="loading torch in the guest"))
        set_timer_slack()
        with Session(cell, "the virtual clock's", link_seed=run.link_seed) as session:
            say(Told(phase="starting"))
            wait_for_the_grid()
            tokens = Tokens(Path(run.tokens), run.vocabulary)
            told = _Teller(), Interrupt(lambda message: None), lambda lab: say(Told(lab=lab))
            drawn = cell.with_draws(run.link_seed)
            ended = session.train(drawn, tokens, Path(run.folder), *told, run.coding, run.resumes_at)
        say(Told(ended=ended, lost={name: failed.message for name, failed in session.lost.items()}))
    except TestbedError as error:
        say(Told(failed=str(error), by_user=isinstance(error, UserError)))
    except Exception:
        say(Told(failed=traceback.format_exc()))


if __name__ == "__main__":
    main()
