"""Run cells: certify, train, certify, summarise; whatever happens, a summary is written and nothing is left running."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from testbed import paths, results
from testbed.codecs import table as codecs
from testbed.errors import CapabilityError, SpecError, StageError, TestbedError
from testbed.metrics import summarise
from testbed.pipeline.control import READABLE
from testbed.records import Certificate, LabRecord, RunCertificates, StepRecord, Summary
from testbed.spec import Cell, WorkloadSpec
from testbed.sweep import environment
from testbed.sweep.machine import machine
from testbed.sweep.progress import Watch
from testbed.sweep.session import Session, Tokens, network_of
from testbed.workloads import table as workloads

_NAMES: dict[type[BaseException], str] = {KeyboardInterrupt: "Ctrl-C"}
_SAME_SIZE = 1.1
"""Messages that differ by less than this factor are measured once: each costs a second of idling."""
Status = Literal["ok", "failed", "interrupted"]


def sweep(cells: Sequence[Cell], folder: Path, engine_reason: str, watch: Watch) -> list[TestbedError]:
    """Run each cell once, into `folder`; returns why cells failed. One that fails does not stop the others.

    KeyboardInterrupt ends it, after the running cell is closed and its summary says `interrupted`.
    """
    failures: list[TestbedError] = []
    session: Session | None = None
    tokens: dict[WorkloadSpec, Tokens] = {}
    with machine():
        try:
            for cell in cells:
                watch.begin(cell)
                run = results.new_run(folder, cell)
                runner = _Runner(run, cell, watch)
                try:
                    if session is not None and session.network != network_of(cell):
                        session.close()
                        session = None
                    if cell.workload not in tokens:
                        watch.phase("preparing the text")
                        tokens[cell.workload] = prepare(cell.workload)
                    if session is None:
                        watch.phase("building the lab")
                        session = Session(cell, engine_reason)
                    runner.run(session, tokens[cell.workload])
                except BaseException as error:
                    summary = runner.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)
                    watch.end(cell, summary)
                    if session is not None:  # its hosts and links are in an unknown state
                        session.close()
                        session = None
                    if not isinstance(error, TestbedError):
                        raise
                    failures.append(error)
                else:
                    watch.end(cell, runner.close("ok", None))
        finally:
            if session is not None:
                session.close()
    return failures


class _Runner:
    """One run of one cell: fills its folder."""

    def __init__(self, run: results.Run, cell: Cell, watch: Watch) -> None:
        self._run, self._cell, self._watch = run, cell, watch
        self._lab: LabRecord | None = None
        self._before: Certificate | None = None
        self._after: Certificate | None = None
        results.write_json(run.folder / "environment.json", environment.snapshot())

    def run(self, session: Session, tokens: Tokens) -> None:
        """Certify, train, certify."""
        cell, folder = self._cell, self._run.folder
        self._note_lab(session.lab.record.model_copy(update={"played_at_ns": None}))  # it may have been, for another run
        self._watch.phase("certifying the links")
        self._before = session.lab.certify("quick", expected_messages(cell))
        results.write_json(folder / "certificate.json", RunCertificates(before=self._before, after=None))
        self._watch.phase("starting")
        session.train(cell, tokens, folder, self._watch.step, self._note_lab)
        self._watch.phase("certifying the links again")
        sent = sent_messages(self._run.steps(stage) for stage in range(cell.pipeline.stages))
        self._after = session.lab.certify("quick", sent or expected_messages(cell))
        results.write_json(folder / "certificate.json", RunCertificates(before=self._before, after=self._after))

    def close(self, status: Status, error: BaseException | None) -> Summary:
        """Write summary.json, the last file of a run, from what the other files hold."""
        stages = [self._run.steps(stage) for stage in range(self._cell.pipeline.stages)]
        certificates = RunCertificates(before=self._before, after=self._after) if self._before else None
        message = None if error is None else str(error) or _NAMES.get(type(error), type(error).__name__)
        summary = summarise(self._cell, self._lab, certificates, stages, status=status, error=message)
        results.write_json(self._run.folder / "summary.json", summary)
        return summary

    def _note_lab(self, record: LabRecord) -> None:
        self._lab = record
        results.write_json(self._run.folder / "lab.json", record)


def expected_messages(cell: Cell) -> tuple[int, ...]:
    """Sizes in bytes to certify with before a run: one micro-batch's tensor as the codec nominally sends it, and as fp32."""
    spec, pipeline = cell.workload, cell.pipeline
    values = spec.batch_size // pipeline.microbatches * spec.sequence_length * workloads.width(spec)
    return tuple(sorted({values * bits // 8 for bits in (codecs.find(cell.codec).nominal_bits, 32)}))


def sent_messages(stages: Iterable[Sequence[StepRecord]]) -> tuple[int, ...]:
    """Sizes in bytes to certify with after a run: the smallest, the median and the largest frame that it sent; those that are
    about the same once; empty where nothing was sent.
    """
    sizes = sorted(sent.frame_bytes for records in stages for record in records for sent in record.sent)
    chosen: list[int] = []
    for size in (sizes[0], sizes[len(sizes) // 2], sizes[-1]) if sizes else ():
        if not chosen or size > _SAME_SIZE * chosen[-1]:
            chosen.append(size)
    return tuple(chosen)


def prepare(workload: WorkloadSpec) -> Tokens:
    """Have the text tokenised, as the invoking user and in a process of its own: this one imports no torch."""
    user = paths.invoking_user()
    identity = {} if user is None else {"user": user[0], "group": user[1], "extra_groups": []}
    command = [sys.executable, "-m", "testbed.workloads.prepare", "--text", workload.text, "--model", workload.model]
    command += ["--cache", str(paths.cache_folder()), "--sequence-length", str(workload.sequence_length)]
    command += ["--batch-size", str(workload.batch_size), "--validation-batches", str(workload.validation_batches)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, start_new_session=True, **identity)  # type: ignore[call-overload]
    except OSError as error:
        raise CapabilityError(f"cannot prepare the text: cannot start {sys.executable}: {error.strerror}; {READABLE}") from None
    if done.returncode == 2:
        raise SpecError(done.stderr.strip().removeprefix("testbed: error: "))
    if done.returncode != 0:
        raise StageError(
            f"preparing the text {workload.text!r} failed with status {done.returncode}: {done.stderr.strip()[-2000:]}"
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return Tokens(Path(found["path"]), int(found["vocabulary"]))
