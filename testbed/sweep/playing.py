"""Makes played runs: trains each recipe once, measures how long its actions take, and plays its trace over every
network.

Cells that differ only in their network share a training, its durations and a trace; cells that differ in schedule and
depth still share a training. The result folder holds trainings in trained/<recipe id>/, durations in calibration.json
and traces in traces/.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed import paths, results, vm
from testbed.errors import StageError, TestbedError
from testbed.net.lab import LabSpec
from testbed.player.certify_links import certify_virtual, network_certificate
from testbed.player.guests import PlayJobs, Progress, play_jobs
from testbed.player.play_job import Outcome, PlayJob
from testbed.player.steady import extended
from testbed.profiles import LinkProfile
from testbed.records import Calibration, Certificate, Floors, LabRecord, RunCertificates, StepRecord
from testbed.replay import pipelines
from testbed.replay.cells import played_job
from testbed.replay.recorded import records_of
from testbed.spec import Cell, recipe_of
from testbed.sweep import trainings
from testbed.sweep.bounded_steps import run_step
from testbed.sweep.calibrations import BUDGET_S, calibrate, check_given
from testbed.sweep.controller import prepare
from testbed.sweep.environment import Means, describe_machine, hold_machine
from testbed.sweep.play_task import player_on
from testbed.sweep.progress import SweepProgress
from testbed.sweep.recording import RunRecorder
from testbed.trace.format import Trace
from testbed.trace.played import Played, read_played
from testbed.trace.tracing import TracedJob
from testbed.vm import GuestKernel

_ASIDE = ".played-"
Training = Sequence[Sequence[StepRecord]]


def play_cells(runs: Sequence[Cell], folder: Path, means: Means, progress: SweepProgress) -> list[TestbedError]:
    """Make a played run for each of `runs` into `folder`; return the errors of those that failed, each independently.

    The runs of one cell have different link seeds. On the virtual clock the machine may be shared; calibrations and
    plays on the real clock lock it. The caller holds the folder's lock.
    """
    for left in folder.glob(f"{_ASIDE}*"):  # leftovers of a killed sweep: this one holds the folder's lock
        shutil.rmtree(left, ignore_errors=True)
    if means.calibration is not None:  # before hours of training
        check_given(means.calibration, map(recipe_of, filter(pipelines.needs_calibration, runs)))
    trained = train_cells(runs, folder, means, progress)
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
    floors = {recipe: trainings.floors_of(path) for recipe, path in trained.folders.items()}
    guest_kernel = vm.find_clock_kernel() if means.clock == "virtual" else None
    costs = measured_costs(filter(pipelines.needs_calibration, runs), folder, means, progress, BUDGET_S)
    cores, play = len(os.sched_getaffinity(0)), play_jobs
    if means.cluster is not None:
        cores, play = means.cluster.cores, player_on(means.cluster, progress.note)
    with paths.scratch_folder(_ASIDE, folder) as aside:
        links = {} if guest_kernel is None else certified(runs, guest_kernel, cores, play)
        player = _Player(runs, numbers, folder, aside, training, floors, costs, links, progress)
        jobs = [player.job(number) for number in range(len(runs))]
        progress.note(f"playing {len(jobs)} run{'s' * (len(jobs) != 1)}")
        with hold_machine(progress.note) if means.clock == "real" else nullcontext():
            play(jobs, clock=means.clock, folder=folder, kernel=guest_kernel, guests=cores, progress=player.has_played)
    return failures + player.failures


def train_cells(cells: Sequence[Cell], folder: Path, means: Means, progress: SweepProgress) -> trainings.Trainings:
    """Train the recipes of played cells without playing them, which suffices for their losses."""
    recipes = map(recipe_of, cells)
    shown = functools.partial(prepare, show=progress.tokenised)
    return trainings.train_missing(recipes, folder, prepare=shown, progress=progress, cluster=means.cluster)


def measured_costs(
    cells: Iterable[Cell], folder: Path, means: Means, progress: SweepProgress, budget_s: float
) -> Calibration:
    """Return the durations of these cells' stages or workers. Unknown ones are measured now, for at most `budget_s`;
    those that still disagree are marked noisy. With a budget of 0, nothing is measured.

    They are also stored in the result folder, together with those of earlier sweeps.
    """
    needed = {recipe.id: recipe for recipe in map(recipe_of, cells)}
    if not needed:
        return Calibration(taken_at="", machine={}, recipes={})
    if budget_s:
        progress.note("measuring the actions whose durations are unknown, alone on one core")
    path = folder / "calibration.json"
    before = results.read_json(path, Calibration) if path.exists() else None
    calibration = calibrate(
        needed.values(),
        prepare=prepare,
        budget_s=budget_s,
        again=means.recalibrate,
        given=means.calibration,
        note=progress.note,
        cluster=means.cluster,
        before={} if before is None else before.machine,
    )
    kinds = ("recipes", "replicas", "jobs")
    known: dict[str, Any] = {kind: getattr(before or calibration, kind) | getattr(calibration, kind) for kind in kinds}
    if budget_s or before is None:  # otherwise nothing was measured, and it stays that of the machine that it is of
        results.write_json(path, calibration.model_copy(update=known))
    all_costs = [[one for stage in costs for one in stage.durations] for costs in calibration.recipes.values()]
    all_costs += [[one for place in costs for one in place.durations] for costs in calibration.jobs.values()]
    all_costs += [costs.durations for costs in calibration.replicas.values()]
    if noisy := sum(any(duration.noisy for duration in durations) for durations in all_costs):
        progress.note(
            f"noisy durations in {noisy} of {len(all_costs)} recipes: calibration.json states their spread; repeat "
            "with --again --recalibrate on a quieter machine"
        )
    return calibration


def certified(
    runs: Sequence[Cell], kernel: GuestKernel, guests: int, play: PlayJobs = play_jobs
) -> dict[LinkProfile, Certificate]:
    """Certify every link of these runs on the virtual clock, unless it already is."""
    links = list(dict.fromkeys(profile for cell in runs for profile in cell.links))
    return dict(zip(links, certify_virtual(links, kernel, guests=guests, play=play), strict=True))


class LinkSeeds:
    """Assigns link seeds to runs: the runs of a cell with random links get different ones."""

    def __init__(self, folder: Path, runs: Iterable[Cell]) -> None:
        self._unused = {cell.id: _unused(results.finished_runs(folder, cell.id)) for cell in runs if cell.by_chance}

    def take(self, cell: Cell) -> int:
        """Return the seed of the cell's next run."""
        return next(self._unused[cell.id]) if cell.by_chance else 0


def _unused(done: Iterable[results.Run]) -> Iterator[int]:
    """Yield the seeds that none of these runs used, including gaps left by a killed sweep."""
    noted = [(number, run.lab.link_seed) for number, run in enumerate(done)]
    used = {number if seed is None else seed for number, seed in noted}
    return (seed for seed in itertools.count() if seed not in used)


@dataclass
class _Player:
    """Converts runs to jobs for the player, and its outcomes to records of runs."""

    runs: Sequence[Cell]
    numbers: Sequence[int]
    """Numbers of the runs in `progress`."""
    folder: Path
    aside: Path
    """Folder of the player's results until they are converted to records."""
    training: Mapping[str, Training]
    floors: Mapping[str, Floors]
    costs: Calibration
    links: Mapping[LinkProfile, Certificate]
    """Certificates from the virtual clock."""
    progress: SweepProgress
    failures: list[TestbedError] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._traces: dict[Path, Trace] = {}
        seeds = LinkSeeds(self.folder, self.runs)
        self._link_seeds = [seeds.take(cell) for cell in self.runs]
        self._machine = describe_machine()

    def job(self, number: int) -> PlayJob:
        """Return the player's job for a run."""
        cell = self._drawn(number)
        path, trace = self._trace(cell)
        lab = LabSpec(**cell.lab, engine=cell.engine, engine_reason=f"the {cell.clock} clock")
        return PlayJob(
            trace=path,
            lab=lab,
            link_seed=self._link_seeds[number],
            steps=trace.steps,
            node_faults=cell.node_faults,
            prove_steady=not cell.compute.varied,
            output=self.aside / f"{number}.played",
        )

    def _drawn(self, number: int) -> Cell:
        """Return a run's cell with the draws of its link seed."""
        return self.runs[number].with_draws(self._link_seeds[number])

    def _steps(self, cell: Cell) -> Training:
        return pipelines.steps_to_play(cell, self.training[recipe_of(cell).id])

    def _trace(self, cell: Cell) -> tuple[Path, Trace]:
        recipe = recipe_of(cell)
        known_costs = [costs.get(recipe.id) for costs in (self.costs.recipes, self.costs.replicas, self.costs.jobs)]
        stated = [getattr(cell, name) for name in ("compute", "codec_cost", "codec_rates", "pipeline", "played_steps")]
        content = f"{recipe.id} {stated} {known_costs}"
        digest = hashlib.blake2b(content.encode(), digest_size=5).hexdigest()
        path = self.folder / "traces" / f"{recipe.id}-{digest}.trace"
        if path not in self._traces:
            self._traces[path] = self._job(cell).trace()
            results.make_folder(path.parent)
            self._traces[path].write(path)
            paths.give_to_user(path)
        return path, self._traces[path]

    def _job(self, cell: Cell) -> TracedJob:
        return played_job(cell, self._steps(cell), self.costs)

    def has_played(self, progress: Progress) -> None:
        """Write the run's records when its job is done."""
        if progress.outcome is None:
            return
        cell = self.runs[progress.job]
        self.progress.begin(cell, self.numbers[progress.job])
        run = RunRecorder(self.folder, cell, self.progress, self._machine)
        run.link_seed = self._link_seeds[progress.job]
        try:
            steps = self._keep(run, self._drawn(progress.job), progress.outcome)
        except TestbedError as error:
            self.failures.append(error)
            run.close(error, [()] * cell.nodes)
        else:
            run.close(None, steps, progress.outcome.host_seconds)

    def _keep(self, run: RunRecorder, cell: Cell, outcome: Outcome) -> list[list[StepRecord]]:
        """Record what was played; return the records by node."""
        if outcome.output is None:
            raise StageError(f"cell {run.cell.id} could not be played: {outcome.error}")
        trace = self._trace(cell)[1]
        played = extended(read_played(outcome.output), trace)
        outcome.output.unlink()
        nodes = records_of(cell, self._job(cell), trace, played, self._steps(cell))
        run.note_lab(LabRecord.model_validate(played.lab).model_copy(update={"played_at_ns": played.played_at_ns}))
        for node, records in enumerate(nodes):
            lines = "".join(record.model_dump_json() + "\n" for record in records)
            (file := run.run.folder / f"steps-{node}.jsonl").write_text(lines, encoding="utf8")
            paths.give_to_user(file)
        run.note_certificates(self._certificates(cell, played, nodes))
        run.known |= {"steady": played.steady, "floors": self.floors[recipe_of(cell).id]}
        return nodes

    def _certificates(self, cell: Cell, played: Played, stages: Sequence[Sequence[StepRecord]]) -> RunCertificates:
        """Return the certificates of the links: measured around the run, or once on the virtual clock."""
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
    """Return the certificates of a cell's links, measured once on the virtual clock, judged by the run's own step."""
    certificate = network_certificate(cell.link_names, cell.links, links)
    step = run_step(cell, stages, played_at_ns)
    return RunCertificates(before=certificate if step is None else step.assess(certificate), after=None)
