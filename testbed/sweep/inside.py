"""Make a live run in a guest with a virtual clock: `python -m testbed.sweep.inside RUN`, started by `live_virtual`.

Here are the lab, the stage hosts and who follows them, and nothing else: certificates, summaries and reports are made
outside, where they take a tenth of the time. RUN is a file that holds a `LiveRun` in JSON. What happens is told on
standard output, a `Told` in JSON a line; the run's records go to its folder, as anywhere.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from pydantic import Field

from testbed.errors import TestbedError, UserError
from testbed.frozen import Frozen
from testbed.pipeline.control import Ended, EvaluationDone, StepDone
from testbed.pipeline.pacing import Coding, be_prompt, wait_for_the_grid
from testbed.play.inside import ONE_PAGE
from testbed.records import LabRecord, Sample
from testbed.spec import Cell
from testbed.sweep.interrupt import Interrupt
from testbed.sweep.session import Session, Tokens


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
    coding: Coding | None
    """How long codecs work in data parallel training; None: not at all."""


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
    lost: dict[str, str] = Field(default={})
    """Workers that training went on without, by name, and why; said with `ended`."""
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


def main() -> None:
    """Make the run, and say how it ended."""
    try:
        run = LiveRun.model_validate_json(Path(sys.argv[1]).read_text(encoding="utf8"))
        ONE_PAGE.write_text("1", encoding="ascii")
        say(Told(phase="loading torch in the guest"))
        be_prompt()
        with Session(run.cell, "the virtual clock's", link_seed=run.link_seed) as session:
            say(Told(phase="starting"))
            wait_for_the_grid()
            tokens = Tokens(Path(run.tokens), run.vocabulary)
            ended = session.train(
                run.cell,
                tokens,
                Path(run.folder),
                _Teller(),
                Interrupt(lambda message: None),
                lambda lab: say(Told(lab=lab)),
                run.coding,
            )
        say(Told(ended=ended, lost={name: failed.message for name, failed in session.lost.items()}))
    except TestbedError as error:
        say(Told(failed=str(error), by_user=isinstance(error, UserError)))
    except Exception:
        say(Told(failed=traceback.format_exc()))


if __name__ == "__main__":
    main()
