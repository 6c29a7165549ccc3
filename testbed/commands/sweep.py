"""Commands that plan, run and report cells."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from testbed import results as stored
from testbed.commands.console import (
    ClockFlag,
    EngineFlag,
    ExcludeFlag,
    OnlyFlag,
    RepeatsFlag,
    ResultsFlag,
    SetFlag,
    TimingFlag,
    choose_clock,
    choose_engine,
    err,
    one_of,
    out,
    say,
    typed,
)
from testbed.errors import CapabilityError, StageError, TestbedError, UserError
from testbed.records import Calibration
from testbed.spec import Timing

if TYPE_CHECKING:
    from testbed.sweep.conduct import Agenda
    from testbed.sweep.means import Means
    from testbed.sweep.plan import Choice, Experiment

ExperimentArgument = Annotated[str, typer.Argument(help="Name of an experiment, or the path of its sweep.toml.")]
QuickFlag = Annotated[bool, typer.Option("--quick", help="The experiment's short form.")]
AgainFlag = Annotated[bool, typer.Option("--again", help="Run finished cells once more.")]


def plan(
    experiment: ExperimentArgument = "default",
    engine: EngineFlag = "",
    clock: ClockFlag = "",
    timing: TimingFlag = "",
    quick: QuickFlag = False,
    results: ResultsFlag = Path("results"),
    overrides: SetFlag = [],  # noqa: B006
    only: OnlyFlag = [],  # noqa: B006
    exclude: ExcludeFlag = [],  # noqa: B006
    repeats: RepeatsFlag = None,
    again: AgainFlag = False,
) -> None:
    """Show the cells of an experiment, which are finished, and how long the others will take; starts nothing."""
    from testbed.commands import planned
    from testbed.sweep import plan as planning

    loaded = planning.load_experiment(experiment)
    choice = planning.Choice(quick, _with_timing(timing, overrides), only, exclude, repeats)
    folder = results / loaded.name
    stored.check_folder(folder)
    agenda, means = _agenda(loaded, choice, folder, engine, clock, again=again)
    say(loaded.question)
    planned.print_means(agenda, means)
    planned.print_plan(agenda, folder, again=again)


def _with_timing(timing: str, overrides: list[str]) -> list[str]:
    """Return the overrides with the flag --timing among them."""
    if timing:
        one_of("timing", timing, get_args(Timing))
    return [*([f"timing={timing}"] if timing else []), *overrides]


def _agenda(
    experiment: Experiment, choice: Choice, folder: Path, engine: str, clock: str, *, again: bool
) -> tuple[Agenda, Means]:
    """Work out what is to be done and with what. An engine is looked for only where a cell needs one: on the virtual
    clock no privilege is needed.
    """
    from testbed.sweep import conduct
    from testbed.sweep.means import Means

    taken, clock_reason = choose_clock(clock or experiment.clock)
    means = Means("netem", "the virtual clock's", taken, clock_reason)
    if (engine and engine != "auto") or taken == "real":
        means = _with_engine(means, engine or experiment.engine)
    agenda = conduct.make_agenda(experiment, means.engine, choice, folder, clock=taken, again=again)
    _check_clock(agenda, clock)
    if means.engine_reason == "the virtual clock's" and any(cell.clock == "real" for cell in agenda.cells):
        means = _with_engine(means, experiment.engine)
        agenda = conduct.make_agenda(experiment, means.engine, choice, folder, clock=taken, again=again)
    return agenda, means


def _with_engine(means: Means, engine: str) -> Means:
    chosen, reason = choose_engine(engine)
    return means._replace(engine=chosen, engine_reason=reason)


def _check_clock(agenda: Agenda, clock: str) -> None:
    """Raise UserError where `--clock virtual` was asked for and a live cell would run on the real clock."""
    for cell in agenda.cells if clock == "virtual" else ():
        if cell.clock == "real":
            raise UserError(
                f"--clock virtual was asked for, and cell {cell.id} is live and would run on the real clock: on the "
                "virtual one computing and coding take no time; give its actions durations with compute.mode = "
                "'paced' and state codec_cost = 'zero', or leave --clock out"
            )


def run(
    codec: Annotated[
        str, typer.Option(help="A codec's text: int8, 'ef(topk(0.1))', 'fwd=bf16, bwd=int8'; see codecs show.")
    ] = "fp32",
    profile: Annotated[
        str, typer.Option(help="A profile's name, or the path of a profile file; 'cable+lte+cable': one per link.")
    ] = "consumer-80mbps",
    topology: Annotated[str | None, typer.Option(help="star: one link per stage; line: one link per boundary.")] = None,
    stages: Annotated[int | None, typer.Option(help="Pieces that the model is cut into.")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe or 1f1b.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    model: Annotated[str | None, typer.Option(help="A named size, or the id or path of a cached checkpoint.")] = None,
    text: Annotated[str | None, typer.Option(help="'bundled', or the path of a text file.")] = None,
    experiment: Annotated[
        str, typer.Option("--like", help="Experiment that all other fields are taken from.")
    ] = "default",
    engine: EngineFlag = "",
    clock: ClockFlag = "",
    timing: TimingFlag = "",
    quick: QuickFlag = False,
    results: ResultsFlag = Path("results"),
    overrides: SetFlag = [],  # noqa: B006
) -> None:
    """Run one cell, again if it is finished already; its results go to results/run/."""
    from testbed.sweep import plan as planning

    flags = {
        "topology": topology,
        "pipeline.stages": stages,
        "pipeline.schedule": schedule,
        "training.steps": steps,
        "workload.model": model,
        "workload.text": text,
    }
    said = ((name, json.dumps(value, ensure_ascii=False)) for name, value in flags.items() if value is not None)
    chosen_flags = [f"{name}={value}" for name, value in said]
    loaded = planning.load_experiment(experiment)
    axes = {"codec": [codec], "profile": [profile.split("+") if "+" in profile else profile]}
    alone: dict[str, Any] = {"axes": axes, "variants": [], "only": [], "exclude": [], "tune": None, "repeats": 1}
    if quick:
        alone["quick"] = {"cell": loaded.quick.get("cell", {})}
    alone["live_checks"] = 0
    choice = planning.Choice(quick, _with_timing(timing, [*chosen_flags, *overrides]))
    _sweep(loaded.model_copy(update=alone), "run", engine, clock, choice, results, again=True, report=False)


def sweep(
    experiment: ExperimentArgument = "default",
    engine: EngineFlag = "",
    clock: ClockFlag = "",
    timing: TimingFlag = "",
    quick: QuickFlag = False,
    results: ResultsFlag = Path("results"),
    again: AgainFlag = False,
    calibration: Annotated[
        Path | None, typer.Option(help="Take durations from this calibration.json, perhaps of another machine.")
    ] = None,
    recalibrate: Annotated[bool, typer.Option("--recalibrate", help="Measure durations anew.")] = False,
    live_checks: Annotated[
        int | None,
        typer.Option(min=0, help="Played cells that are run live too; the experiment's number if not given."),
    ] = None,
    page: Annotated[
        bool, typer.Option("--report/--no-report", help="Whether to write the report; 'report FOLDER' does it later.")
    ] = True,
    overrides: SetFlag = [],  # noqa: B006
    only: OnlyFlag = [],  # noqa: B006
    exclude: ExcludeFlag = [],  # noqa: B006
    repeats: RepeatsFlag = None,
    cell: Annotated[
        list[str],
        typer.Option("--cell", metavar="ID", help="Only this cell of the sweep, whose record stays as it is."),
    ] = [],  # noqa: B006
) -> None:
    """Run every cell of an experiment that is not finished yet, then print the table and write the report."""
    from testbed.sweep import plan as planning

    loaded = planning.load_experiment(experiment)
    choice = planning.Choice(quick, _with_timing(timing, overrides), only, exclude, repeats, cell)

    if live_checks is not None:
        loaded = loaded.model_copy(update={"live_checks": live_checks})
    if calibration is not None and not calibration.is_file():
        raise UserError(f"there is no file {calibration}; a sweep keeps its durations in results/NAME/calibration.json")
    given = None if calibration is None else stored.read_json(calibration, Calibration)
    durations = {"calibration": given, "recalibrate": recalibrate}
    _sweep(loaded, loaded.name, engine, clock, choice, results, again=again, report=page, durations=durations)


def _sweep(
    experiment: Experiment,
    folder_name: str,
    engine: str,
    clock: str,
    choice: Choice,
    results: Path,
    *,
    again: bool,
    report: bool,
    durations: dict[str, Any] | None = None,
) -> None:
    from testbed.commands import planned
    from testbed.report import collect, tables
    from testbed.report.conclusions import conclusions
    from testbed.sweep import conduct

    folder = results / folder_name
    stored.check_folder(folder)
    # What was tuned stands when one cell is made again.
    agenda, means = _agenda(experiment, choice, folder, engine, clock, again=again and not choice.cells)
    means = means._replace(**durations or {})
    stored.make_folder(folder)
    planned.print_means(agenda, means)
    if agenda.to_tune:
        agenda = conduct.tune_first(agenda, folder, means, planned.progress_into(folder), again=again)
    if agenda.tuning:
        planned.print_tuning(agenda.tuning)
    runs = conduct.missing_runs(agenda.cells, agenda.experiment, folder, again=again)
    if finished := len(agenda.cells) - len({cell.id for cell in runs} & {cell.id for cell in agenda.cells}):
        say(f"{finished} of {len(agenda.cells)} cells are finished already")
    if not (choice.cells and (folder / "sweep.json").exists()):
        stored.write_json(folder / "sweep.json", conduct.sweep_record(agenda, typed(*sys.argv[1:])))
    failures = conduct.make_runs(runs, folder, means, planned.progress_into(folder))
    made = collect.latest(folder, [cell.id for cell in agenda.cells])
    out.print(tables.terminal_table(made))
    for group in collect.groups(collect.read_runs(made)):
        for sentence in conclusions(group)[:1]:
            say(sentence)
    failures += [] if choice.cells else _check_live(agenda, means, folder, engine)
    if report:
        from testbed.report.index import write_index

        _report(folder, folder / "report.html", results / "index.html")
        say(f"all results: {write_index(results)}")
    if failures:
        lost = f"{len(failures)} of {len(runs)} runs; the same command tries them again"
        say(f"testbed: failed: {lost}", on=err, style="red")
        raise typer.Exit(min(error.exit_status for error in failures))
    if agenda.tuning and not all(arm.left for arm in agenda.tuning.arms):
        lost = ", ".join(str(value) for arm in agenda.tuning.arms if not arm.left for value in arm.arm.values())
        why = f"no value of {agenda.tuning.field} that was tried led to a finite loss; state smaller ones"
        say(f"testbed: not run: {lost}; {why}", on=err, style="red")
        raise typer.Exit(StageError.exit_status)


def _check_live(agenda: Agenda, means: Means, folder: Path, engine: str) -> list[TestbedError]:
    """Run a few of the played cells live too, where this machine allows it; returns why some failed."""
    from testbed.commands import planned
    from testbed.metrics.live_checks import checks
    from testbed.report.live import live_sentences
    from testbed.sweep import conduct

    asked, record = agenda.experiment.live_checks, stored.last_sweep(folder)
    if not asked or not any(cell.timing == "played" for cell in agenda.cells):
        return []
    try:
        live = _with_engine(means, engine or agenda.experiment.engine)
    except CapabilityError as error:
        record = record.model_copy(update={"live_reason": f"There was no live check: {error}"})
        stored.write_json(folder / "sweep.json", record)
        say(record.live_reason)
        return []
    kept = folder / "calibration.json"
    costs = stored.read_json(kept, Calibration).recipes if kept.exists() else {}
    twins = checks(agenda.cells, asked, live.engine, costs, len(os.sched_getaffinity(0)))
    ids = {twin.id: played for played, twin in twins.items()}
    stored.write_json(folder / "sweep.json", record.model_copy(update={"live_checks": ids}))
    missing = [twin for twin in twins.values() if stored.finished(folder, twin.id) is None]
    say(f"live checks, engine {live.engine}: {live.engine_reason}")
    failures = conduct.make_runs(missing, folder, live, planned.progress_into(folder))
    for sentence in live_sentences(folder, stored.last_sweep(folder)):
        say(sentence)
    return failures


def report(
    folder: Annotated[
        Path, typer.Argument(help="An experiment's result folder; or a folder of several, for an index of them.")
    ] = Path("results"),
    output: Annotated[
        Path | None, typer.Option(help="The page to write; report.html in the folder if not given.")
    ] = None,
    gantt: Annotated[
        str | None,
        typer.Option(metavar="CELL", help="Instead, draw one step of this cell's run, stage by stage, into figures/."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Instead, write a page that compares it with another's runs.")
    ] = None,
) -> None:
    """Draw the report of an experiment's last sweep again from its result files; starts nothing."""
    from testbed.report import collect, index, tables

    for named in (folder, *([] if against is None else [against])):
        if not named.is_dir():
            raise UserError(f"there is no result folder {named}; run a sweep first, or name another folder")
    if gantt is not None:
        from testbed.report.page import draw_gantt

        say(f"gantt: {draw_gantt(folder, gantt, folder / 'figures')}")
    elif against is not None:
        from testbed.report.against import write_against

        say(f"comparison: {write_against(folder, against)}")
    elif index.sweeps(folder):
        say(f"index: {index.write_index(folder)}")
    else:
        out.print(tables.terminal_table(collect.latest(folder, stored.last_sweep(folder).cells)))
        known = folder.resolve().parent / "index.html"
        _report(folder, output or folder / "report.html", known if known.exists() else None)


def _report(folder: Path, page: Path, index: Path | None) -> None:
    from testbed.report.page import write_report

    say(f"report: {write_report(folder, page, index)}")
