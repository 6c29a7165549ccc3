"""Writes the folder of a run, played or live: its lab, certificates, records and outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed import manifest, results
from testbed.metrics import summarise
from testbed.records import LabRecord, RunCertificates, StepRecord
from testbed.spec import Cell, recipe_of
from testbed.sweep.environment import describe_machine
from testbed.sweep.progress import SweepProgress


class RunRecorder:
    """Fills the folder of one run of one cell."""

    def __init__(
        self, folder: Path, cell: Cell, progress: SweepProgress, machine: Mapping[str, Any] | None = None
    ) -> None:
        """Create the next run folder of the cell. `machine`: the result of `describe_machine`; None: call it."""
        self.run, self.cell, self.progress = results.new_run(folder, cell), cell, progress
        self.lab: LabRecord | None = None
        self.link_seed: int | None = None
        self.certificates: RunCertificates | None = None
        self.known: dict[str, Any] = {}
        """Further arguments of `metrics.summarise`."""
        self.resumes_at = 0
        """The step whose checkpoint a live run resumes; 0: none."""
        kept = self.run.folder.parent
        if cell.timing == "live" and cell.training.checkpoint_every is not None:
            self.resumes_at = results.newest_checkpoint(kept, recipe_of(cell)) or 0
        if self.resumes_at:
            progress.note(f"{cell.id} resumes from its newest valid checkpoint, before step {self.resumes_at}")
        environment = {**(machine or describe_machine()), results.FINISHED_BY: manifest.NAME}
        results.write_json(self.run.folder / "environment.json", environment)

    def note_lab(self, lab: LabRecord) -> None:
        """Store the description of the lab."""
        varies = self.cell.compute.varies_by or None
        self.lab = lab.model_copy(update={"link_seed": self.link_seed, "durations": varies})
        results.write_json(self.run.folder / "lab.json", self.lab)

    def note_certificates(self, certificates: RunCertificates) -> None:
        """Store the certificates of the links so far."""
        self.certificates = certificates
        results.write_json(self.run.folder / "certificate.json", certificates)

    def note_lost(self, lost: Mapping[str, str]) -> None:
        """Store and report which workers training continued without, by name, with reasons."""
        self.known["lost"] = lost
        for name, why in lost.items():
            self.progress.note(f"{self.cell.id}: training continued without {name}: {why}")

    def close(
        self,
        error: BaseException | None = None,
        steps: Sequence[Sequence[StepRecord]] | None = None,
        took_s: float | None = None,
    ) -> None:
        """Write summary.json from the run's other files, and then its manifest. `error`: why the run failed. `steps`:
        its records, to avoid reading them; `took_s` as in `SweepProgress.end`.
        """
        interrupted = isinstance(error, KeyboardInterrupt)
        summary = summarise(
            self.cell,
            self.lab,
            self.certificates,
            self.run.all_steps() if steps is None else steps,
            status="ok" if error is None else "interrupted" if interrupted else "failed",
            error=None if error is None else str(error) or ("Ctrl-C" if interrupted else type(error).__name__),
            samples=self.run.samples(),
            **self.known,
        )
        self.run.finish(summary)
        if summary.status == "ok":
            results.remove_checkpoints(self.run.folder.parent)
        self.progress.end(self.cell, summary, took_s)
