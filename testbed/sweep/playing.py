"""Make played runs: train each recipe once, measure how long its actions take, and play its trace over every network.

A training, its durations and a trace are shared by all cells that differ in nothing but their network; a training also
by those that differ in schedule and depth. What was trained is kept in the result folder, in trained/<recipe id>/;
durations are in calibration.json, traces in traces/.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

from testbed import results, vm
from testbed.errors import GuestKernelError, StageError, TestbedError
from testbed.net.lab import LabSpec
from testbed.paths import as_invoking_user
from testbed.play import pipelines
from testbed.play.certify import certify_virtual, network_certificate
from testbed.play.guests import Progress, play_jobs
from testbed.play.job import Outcome, PlayJob
from testbed.play.kinds import played_job
from testbed.play.played import Played, read_played
from testbed.play.recorded import records_of
from testbed.play.steady import extended
from testbed.play.trace import Trace
from testbed.play.tracing import TracedJob
from testbed.process import start_program
from testbed.profiles import LinkProfile
from testbed.records import (
    Calibration,
    Certificate,
    LabRecord,
    RunCertificates,
    StepRecord,
)
from testbed.spec import Cell, recipe_of
from testbed.sweep import trainings
from testbed.sweep.bounded_steps import run_step
from testbed.sweep.calibration import BUDGET_S, calibrate
from testbed.sweep.controller import prepare
from testbed.sweep.environment import describe_machine, hold_folder, hold_machine
from testbed.sweep.means import Means
from testbed.sweep.progress import SweepProgress
from testbed.sweep.recording import RunRecorder
from testbed.vm import GuestKernel

_ASIDE = ".played-"
Training = Sequence[Sequence[StepRecord]]


def play_cells(runs: Sequence[Cell], folder: Path, means: Means, progress: SweepProgress) -> list[TestbedError]:
    """Make a played run for each of `runs` into `folder`; returns why some failed. A run that fails costs itself only.

    Of the runs of one cell each has another seed for its links. On the virtual clock others may use the machine
    meanwhile; what is measured on its own clock has it alone.
    """
    with hold_folder(folder), clock_kernel(means, progress) as kernel:
        for left in folder.glob(f"{_ASIDE}*"):  # by a sweep that was killed: we hold the folder
            shutil.rmtree(left, ignore_errors=True)
        trained = trainings.train_missing(map(recipe_of, runs), folder, prepare=prepare, progress=progress)
        for number, cell in enumerate(runs):
            if (error := trained.failures.get(recipe_of(cell).id)) is not None:
                progress.begin(cell, number)
                RunRecorder(folder, cell, progress).close(error)
        failures = list(trained.failures.values())
        numbers = [number for number, cell in enumerate(runs) if recipe_of(cell).id not in trained.failures]
        runs = [runs[number] for number in numbers]
        if not runs:
            return failures
        recipes = {recipe.id: recipe for recipe in map(recipe_of, runs)}
        training = {name: trainings.load_training(trained.folders[name], of) for name, of in recipes.items()}
        floors = {recipe: trainings.floor_of(path) for recipe, path in trained.folders.items()}
        guest_kernel = kernel()  # before anything is measured: a build beside it would slow it down
        costs = measured_costs(filter(pipelines.needs_calibration, runs), folder, means, progress, BUDGET_S)
        cores = len(os.sched_getaffinity(0))
        with tempfile.TemporaryDirectory(prefix=_ASIDE, dir=folder) as aside:
            links = {} if guest_kernel is None else certified(runs, guest_kernel, cores)
            player = _Player(runs, numbers, folder, Path(aside), training, floors, costs, links, progress)
            jobs = [player.job(number) for number in range(len(runs))]
            progress.note(f"playing {len(jobs)} run{'s' * (len(jobs) != 1)}")
            with hold_machine() if means.clock == "real" else nullcontext():
                play_jobs(
                    jobs,
                    clock=means.clock,
                    folder=folder,
                    kernel=guest_kernel,
                    guests=cores,
                    progress=player.has_played,
                )
    return failures + player.failures


def train_cells(cells: Sequence[Cell], folder: Path, progress: SweepProgress) -> trainings.Trainings:
    """Train the recipes of played cells and play nothing: what it takes to know their losses."""
    with hold_folder(folder):
        return trainings.train_missing(map(recipe_of, cells), folder, prepare=prepare, progress=progress)


@contextmanager
def clock_kernel(means: Means, progress: SweepProgress) -> Iterator[Callable[[], GuestKernel | None]]:
    """Have the guest kernel built, where it is missing, while other things go on; what is yielded waits for it."""
    if means.clock == "real" or vm.find_clock_kernel() is not None:
        yield lambda: vm.find_clock_kernel() if means.clock == "virtual" else None
        return
    progress.note("building the kernel with a virtual clock meanwhile, once: some minutes")
    attempt = "build the kernel with a virtual clock"
    with start_program(
        "testbed", "vm", "--build", attempt=attempt, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, **as_invoking_user()
    ) as builder:

        def wait() -> GuestKernel:
            said = builder.communicate()[1].decode(errors="replace").strip()
            if (kernel := vm.find_clock_kernel()) is None:
                raise GuestKernelError(f"cannot {attempt}: {said or 'it said nothing'}")
            return kernel

        try:
            yield wait
        finally:
            builder.kill()


def measured_costs(
    cells: Iterable[Cell], folder: Path, means: Means, progress: SweepProgress, budget_s: float
) -> Calibration:
    """Return what the stages or workers of these cells' recipes cost; what is not known is measured now, for `budget_s`
    at most, and what does not agree by then is marked noisy. Nothing is measured where that is 0.

    They are kept in the result folder too, beside those of earlier sweeps.
    """
    needed = {recipe.id: recipe for recipe in map(recipe_of, cells)}
    if not needed:
        return Calibration(taken_at="", machine={}, recipes={})
    if budget_s:
        progress.note("measuring how long actions take, alone on one core, where that is not known yet")
    found = calibrate(
        needed.values(),
        prepare=prepare,
        budget_s=budget_s,
        again=means.recalibrate,
        given=means.calibration,
    )
    path = folder / "calibration.json"
    kinds = ("recipes", "replicas", "jobs")
    known: dict[str, Any] = {kind: getattr(found, kind) for kind in kinds}
    if path.exists():
        before = results.read_json(path, Calibration)
        known = {kind: getattr(before, kind) | known[kind] for kind in kinds}
    results.write_json(path, found.model_copy(update=known))
    all_costs = [[one for stage in costs for one in stage.durations] for costs in found.recipes.values()]
    all_costs += [[one for place in costs for one in place.durations] for costs in found.jobs.values()]
    all_costs += [costs.durations for costs in found.replicas.values()]
    if noisy := sum(any(duration.noisy for duration in durations) for durations in all_costs):
        progress.note(
            f"noisy durations in {noisy} of {len(all_costs)} recipes: calibration.json says how far they spread; "
            "on a quieter machine --recalibrate measures them again"
        )
    return found


def certified(runs: Sequence[Cell], kernel: GuestKernel, guests: int) -> dict[LinkProfile, Certificate]:
    """Certify every link of these runs on the virtual clock, where it is not certified yet."""
    links = list(dict.fromkeys(profile for cell in runs for profile in cell.links))
    return dict(zip(links, certify_virtual(links, kernel, guests=guests), strict=True))


class LinkSeeds:
    """Seeds for the links of runs: of a cell whose links draw at random, each run has another."""

    def __init__(self, folder: Path, runs: Iterable[Cell]) -> None:
        self._unused = {cell.id: _unused(results.finished_runs(folder, cell.id)) for cell in runs if cell.by_chance}

    def take(self, cell: Cell) -> int:
        """Return the seed of the cell's next run."""
        return next(self._unused[cell.id]) if cell.by_chance else 0


def _unused(done: Iterable[results.Run]) -> Iterator[int]:
    """Yield the seeds that none of these runs had, whichever of them were lost when a sweep was killed."""
    noted = [(number, run.lab.link_seed) for number, run in enumerate(done)]
    used = {number if seed is None else seed for number, seed in noted}
    return (seed for seed in itertools.count() if seed not in used)


@dataclass
class _Player:
    """Makes jobs of runs, and runs of what was played."""

    runs: Sequence[Cell]
    numbers: Sequence[int]
    """What `progress` calls the runs."""
    folder: Path
    aside: Path
    """Where the player's results lie until they are records."""
    training: Mapping[str, Training]
    floors: Mapping[str, float | None]
    costs: Calibration
    links: Mapping[LinkProfile, Certificate]
    """What was certified on the virtual clock."""
    progress: SweepProgress
    failures: list[TestbedError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._traces: dict[Path, Trace] = {}
        seeds = LinkSeeds(self.folder, self.runs)
        self._link_seeds = [seeds.take(cell) for cell in self.runs]
        self._machine = describe_machine()

    def job(self, number: int) -> PlayJob:
        """Return what is to be played for a run."""
        cell = self.runs[number]
        path, trace = self._trace(cell)
        lab = LabSpec(
            topology=cell.topology,
            profiles=cell.links,
            nodes=cell.nodes,
            engine=cell.engine,
            engine_reason=f"the {cell.clock} clock",
        )
        return PlayJob(
            trace=path,
            lab=lab,
            link_seed=self._link_seeds[number],
            steps=trace.steps,
            output=self.aside / f"{number}.played",
        )

    def _steps(self, cell: Cell) -> Training:
        return pipelines.steps_to_play(cell, self.training[recipe_of(cell).id])

    def _trace(self, cell: Cell) -> tuple[Path, Trace]:
        recipe = recipe_of(cell)
        found = [costs.get(recipe.id) for costs in (self.costs.recipes, self.costs.replicas, self.costs.jobs)]
        stated = [getattr(cell, name) for name in ("compute", "codec_cost", "codec_rates", "pipeline", "played_steps")]
        content = f"{recipe.id} {stated} {found}"
        digest = hashlib.blake2b(content.encode(), digest_size=5).hexdigest()
        path = self.folder / "traces" / f"{recipe.id}-{digest}.trace"
        if path not in self._traces:
            self._traces[path] = self._job(cell).trace()
            results.make_folder(path.parent)
            self._traces[path].write(path)
        return path, self._traces[path]

    def _job(self, cell: Cell) -> TracedJob:
        return played_job(cell, self._steps(cell), self.costs)

    def has_played(self, progress: Progress) -> None:
        """Make the run's records when its job is done."""
        if progress.outcome is None:
            return
        cell = self.runs[progress.job]
        self.progress.begin(cell, self.numbers[progress.job])
        run = RunRecorder(self.folder, cell, self.progress, self._machine)
        run.link_seed = self._link_seeds[progress.job]
        try:
            steps = self._keep(run, progress.outcome)
        except TestbedError as error:
            self.failures.append(error)
            run.close(error, [()] * cell.nodes)
        else:
            run.close(None, steps, progress.outcome.host_seconds)

    def _keep(self, run: RunRecorder, outcome: Outcome) -> list[list[StepRecord]]:
        """Note what was played; returns its records, by node."""
        cell = run.cell
        if outcome.output is None:
            raise StageError(f"cell {cell.id} could not be played: {outcome.error}")
        trace = self._trace(cell)[1]
        played = extended(read_played(outcome.output), trace)
        outcome.output.unlink()
        nodes = records_of(cell, self._job(cell), trace, played, self._steps(cell))
        run.note_lab(LabRecord.model_validate(played.lab).model_copy(update={"played_at_ns": played.played_at_ns}))
        for node, records in enumerate(nodes):
            lines = "".join(record.model_dump_json() + "\n" for record in records)
            (run.run.folder / f"steps-{node}.jsonl").write_text(lines, encoding="utf8")
        run.note_certificates(self._certificates(cell, played, nodes))
        run.known |= {"steady": played.steady, "floor": self.floors[recipe_of(cell).id]}
        return nodes

    def _certificates(self, cell: Cell, played: Played, stages: Sequence[Sequence[StepRecord]]) -> RunCertificates:
        """Return what was measured of the links: around the run, or on the virtual clock once for all."""
        if cell.clock == "virtual":
            return virtual_certificates(cell, self.links, stages, played.played_at_ns)
        step = run_step(cell, stages, played.played_at_ns)
        measured = [Certificate.model_validate(played.about[name]) for name in ("before", "after")]
        if step is not None:
            measured = [step.assess(certificate) for certificate in measured]
        return RunCertificates(before=measured[0], after=measured[1])


def virtual_certificates(
    cell: Cell,
    links: Mapping[LinkProfile, Certificate],
    stages: Sequence[Sequence[StepRecord]],
    played_at_ns: int | None,
) -> RunCertificates:
    """Return what was measured of a cell's links on the virtual clock, once for all, judged by the run's own step."""
    certificate = network_certificate(cell.topology, cell.links, links)
    step = run_step(cell, stages, played_at_ns)
    return RunCertificates(before=certificate if step is None else step.assess(certificate), after=None)
