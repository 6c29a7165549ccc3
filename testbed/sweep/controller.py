"""Runs live cells: certify, train, certify, summarise. Always writes a summary, and leaves nothing running."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

from testbed import paths
from testbed.errors import StageError, TestbedError
from testbed.process import run_program
from testbed.records import RunCertificates, StageCosts
from testbed.runtime.control_plane import Ended
from testbed.spec import Cell, ImagesSpec, Workload, recipe_of
from testbed.sweep.bounded_steps import expected_messages, expected_step, run_step, sent_messages
from testbed.sweep.environment import hold_machine
from testbed.sweep.interrupt import Interrupt
from testbed.sweep.live_session import Session, Tokens, network_of
from testbed.sweep.progress import SweepProgress
from testbed.sweep.recording import RunRecorder
from testbed.workloads import networks, texts, windows
from testbed.workloads.floor import floors_of


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
    engine_reason: str,
    progress: SweepProgress,
    costs: Mapping[str, Sequence[StageCosts]] = MappingProxyType({}),
) -> list[TestbedError]:
    """Make a run for each of `cells`, in order, into `folder`; return the errors of those that failed.

    A failed cell does not stop the others, but is not retried if it recurs in the list. Ctrl-C ends the loop with
    KeyboardInterrupt: after the current step (see `interrupt`), or at once if pressed twice. Either way the running
    cell is closed, and its summary says `interrupted`. `costs`: durations of the calibrated recipes by id; a run that
    deviates from them did not have the machine to itself.
    """
    failures: list[TestbedError] = []
    failed: set[str] = set()
    with (
        hold_machine(progress.note),
        Interrupt(progress.note) as interrupt,
        closing(_Standing(folder, engine_reason, progress)) as standing,
    ):
        for cell in cells:
            progress.begin(cell)
            if cell.id in failed:
                progress.leave_out("it has failed before")
                continue
            runner = _Runner(folder, cell, progress)
            runner.known["costs"] = costs.get(recipe_of(cell).id)
            try:
                tokens = standing.tokens(cell)
                ended = runner.make(standing.session(cell), tokens, interrupt)
            except BaseException as error:
                try:
                    standing.close()  # hosts and links are in an unknown state
                finally:
                    runner.close(error)  # last: jobs write to the run's folder until their hosts end
                if not isinstance(error, TestbedError):
                    raise
                failures.append(error)
                failed.add(cell.id)
            else:
                runner.close(KeyboardInterrupt("Ctrl-C; the current step was finished") if ended == "asked" else None)
            if interrupt.asked:
                raise KeyboardInterrupt
    return failures


class _Standing:
    """Shared by the runs: the session of the last network, and prepared texts."""

    def __init__(self, folder: Path, engine_reason: str, progress: SweepProgress) -> None:
        self._folder, self._engine_reason, self._progress = folder, engine_reason, progress
        self._session: Session | None = None
        self._tokens: dict[Workload, Tokens] = {}

    def session(self, cell: Cell) -> Session:
        """Return the current session if it has the cell's network; otherwise replace it with a new one."""
        if self._session is not None and self._session.network != network_of(cell):
            self.close()
        if self._session is None:
            self._progress.phase("building the lab")
            self._session = Session(cell, self._engine_reason)
        return self._session

    def tokens(self, cell: Cell) -> Tokens:
        """Return the prepared data of the cell's workload."""
        if cell.workload not in self._tokens:
            self._progress.phase("preparing the training data")
            self._tokens[cell.workload] = prepare(cell.workload, self._progress.tokenised)
        return self._tokens[cell.workload]

    def close(self) -> None:
        """End the session, if there is one."""
        if self._session is not None:
            self._session.close()
            self._session = None


class _Runner(RunRecorder):
    """One run of one cell."""

    def make(self, session: Session, tokens: Tokens, interrupt: Interrupt) -> Ended:
        """Certify, train, certify; return why training ended."""
        cell, phase = self.cell, self.progress.phase
        self.known["floors"] = floors_of(tokens.path, cell.workload, tokens.vocabulary)
        # Links may still vary from the previous run.
        self.note_lab(session.lab.record.model_copy(update={"played_at_ns": None}))
        phase("certifying the links")
        expected = expected_messages(cell)
        step = expected_step(cell)
        before = session.lab.certify("quick", expected, step=step)
        self.note_certificates(RunCertificates(before=before, after=None))
        phase("starting")
        with interrupt.patient():
            told = self.progress, interrupt, self.note_lab
            ended = session.train(cell, tokens, self.run.folder, *told, resumes_at=self.resumes_at)
            self.note_lost({name: failed.message for name, failed in session.lost.items()})
            phase("certifying the links again")
            stages = self.run.all_steps()
            step = run_step(cell, stages, self.lab.played_at_ns if self.lab else None) or step
            during = step.assess_during(session.during) if session.during else None
            certificates = RunCertificates(before=step.assess(before), after=None, during=during)
            self.note_certificates(certificates)
            after = session.lab.certify("quick", sent_messages(stages) or expected, step=step)
        self.note_certificates(certificates.model_copy(update={"after": after}))
        return ended


def prepare(workload: Workload, show: Callable[[str, float], None] = lambda text, share: None) -> Tokens:
    """Tokenise a text in a separate process, as the invoking user: this process imports no torch. `show` receives the
    text's name and the share that is done. Images need no preparation: resolving a cell requires them.
    """
    if isinstance(workload, ImagesSpec):
        return Tokens(paths.cache_folder(), networks.image_counts(workload.images).shape.classes)
    text, options = workload.text, ["--model", workload.model, "--cache", str(paths.cache_folder()), "--progress"]

    def heard(line: str) -> None:
        if line.startswith(texts.PROGRESS):
            show(text, float(line.removeprefix(texts.PROGRESS)))

    told: dict[str, Any] = {"attempt": f"prepare the text {text!r}", "failure": StageError, "heard": heard}
    lines = run_program("testbed.workloads.prepare", "--text", text, *options, **told, **paths.as_invoking_user())
    show(text, 1.0)
    sys.stderr.writelines(f"testbed: {line}\n" for line in lines[:-1] if not line.startswith(texts.PROGRESS))
    prepared = json.loads(lines[-1])
    windows.check_text_for(workload, int(prepared["tokens"]))
    return Tokens(Path(prepared["path"]), int(prepared["vocabulary"]))
