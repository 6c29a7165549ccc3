"""The folder of a run while it is made: whoever makes the run says what it finds out, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed import results
from testbed.metrics import summarise
from testbed.records import LabRecord, RunCertificates, StepRecord
from testbed.spec import Cell
from testbed.sweep.environment import describe_machine
from testbed.sweep.progress import SweepProgress


class RunRecorder:
    """Fills the folder of one run of one cell."""

    def __init__(
        self, folder: Path, cell: Cell, progress: SweepProgress, machine: Mapping[str, Any] | None = None
    ) -> None:
        """Make the next run's folder in an experiment's. `machine`: what `describe_machine` said; None: it is asked."""
        self.run, self.cell, self.progress = results.new_run(folder, cell), cell, progress
        self.lab: LabRecord | None = None
        self.link_seed: int | None = None
        self.certificates: RunCertificates | None = None
        self.known: dict[str, Any] = {}
        """What else `metrics.summarise` is told."""
        results.write_json(self.run.folder / "environment.json", dict(machine or describe_machine()))

    def read_steps(self) -> list[list[StepRecord]]:
        """Read the records that the run has so far, by node."""
        return [self.run.steps(node) for node in range(self.cell.nodes)]

    def note_lab(self, lab: LabRecord) -> None:
        """Keep what the lab is."""
        self.lab = lab.model_copy(update={"link_seed": self.link_seed})
        results.write_json(self.run.folder / "lab.json", self.lab)

    def note_certificates(self, certificates: RunCertificates) -> None:
        """Keep what is known of the links by now."""
        self.certificates = certificates
        results.write_json(self.run.folder / "certificate.json", certificates)

    def note_lost(self, lost: Mapping[str, str]) -> None:
        """Keep, and say, which workers training went on without, by name, and why."""
        self.known["lost"] = lost
        for name, why in lost.items():
            self.progress.note(f"{self.cell.id}: training went on without {name}: {why}")

    def close(
        self,
        error: BaseException | None = None,
        steps: Sequence[Sequence[StepRecord]] | None = None,
        took_s: float | None = None,
    ) -> None:
        """Write summary.json, the last file of a run, from what the other files hold. `error`: why it did not end well.
        `steps`: its records, where they need not be read; `took_s` as in `SweepProgress.end`.
        """
        interrupted = isinstance(error, KeyboardInterrupt)
        summary = summarise(
            self.cell,
            self.lab,
            self.certificates,
            self.read_steps() if steps is None else steps,
            status="ok" if error is None else "interrupted" if interrupted else "failed",
            error=None if error is None else str(error) or ("Ctrl-C" if interrupted else type(error).__name__),
            **self.known,
        )
        results.write_json(self.run.folder / "summary.json", summary)
        self.progress.end(self.cell, summary, took_s)
