"""The commands `plan`, `run`, `sweep` and `report`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from testbed import results as stored
from testbed.commands.cluster import (
    AddressFlag,
    ExecutorFlag,
    RuntimeEnvFlag,
    check_cluster_flags,
    connected,
    refuse_others,
)
from testbed.commands.console import (
    ClockFlag,
    DeviceFlag,
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
from testbed.errors import CapabilityError, ResultsError, SpecError, StageError, TestbedError, UserError
from testbed.profiles import split_networks
from testbed.records import Calibration
from testbed.spec import Timing, TrainingDevice

if TYPE_CHECKING:
    from testbed.sweep.conduct import Agenda, Anew
    from testbed.sweep.environment import Means
    from testbed.sweep.plan import Choice, Experiment

ExperimentArgument = Annotated[str, typer.Argument(help="Name of an experiment, or the path of its sweep.toml.")]
QuickFlag = Annotated[bool, typer.Option("--quick", help="Use the experiment's short form.")]
AgainFlag = Annotated[bool, typer.Option("--again", help="Run finished cells again, setting earlier runs aside.")]


def plan(
    experiment: ExperimentArgument = "default",
    engine: EngineFlag = "",
    clock: ClockFlag = "",
    timing: TimingFlag = "",
    device: DeviceFlag = "",
    quick: QuickFlag = False,
    results: ResultsFlag = Path("results"),
    overrides: SetFlag = [],  # noqa: B006
    only: OnlyFlag = [],  # noqa: B006
    exclude: ExcludeFlag = [],  # noqa: B006
    repeats: RepeatsFlag = None,
    again: AgainFlag = False,
) -> None:
    """Show the cells of an experiment, which of them are finished, and how long the others will take. Runs nothing."""
    from testbed.commands import planned
    from testbed.sweep import plan as planning

    loaded = planning.load_experiment(experiment)
    choice = planning.Choice(quick, _with_flags(timing, device, overrides), only, exclude, repeats)
    stored.check_folder(folder := results / loaded.name, to_write=False)
    agenda, means = _agenda(loaded, choice, folder, engine, clock, again=again)
    say(loaded.question)
    planned.print_means(agenda, means)
    planned.print_plan(agenda, folder, again=again)


def _with_flags(timing: str, device: str, overrides: list[str]) -> list[str]:
    """Return the overrides, preceded by the flags --timing and --device if given."""
    for name, value, known in (("timing", timing, get_args(Timing)), ("device", device, get_args(TrainingDevice))):
        if value:
            one_of(name, value, known)
    flags = {"timing": timing, "training.device": device}
    return [*(f"{name}={value}" for name, value in flags.items() if value), *overrides]


def _agenda(
    experiment: Experiment, choice: Choice, folder: Path, engine: str, clock: str, *, again: bool
) -> tuple[Agenda, Means]:
    """Return the agenda, and the clock and engine to run it with. Looks for an engine only if a cell needs one: the
    virtual clock needs no privilege.
    """
    from testbed.sweep import conduct
    from testbed.sweep.environment import Means

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
    """Raise UserError if `--clock virtual` was requested and a live cell would run on the real clock."""
    for cell in agenda.cells if clock == "virtual" else ():
        if cell.clock == "real":
            raise UserError(
                f"--clock virtual was requested, but live cell {cell.id} would run on the real clock: on the virtual "
                "clock its compute and codecs would take no time; state its durations with compute.mode = 'paced' and "
                "codec_cost = 'zero', or omit --clock"
            )


def run(
    codec: Annotated[
        str, typer.Option(help="Codec, e.g. int8, 'ef(topk(0.1))' or 'fwd=bf16, bwd=int8'; see `codecs`.")
    ] = "fp32",
    profile: Annotated[
        str, typer.Option(help="Profile of all links, a name or a file; or one per link: 'cable+lte+cable'.")
    ] = "consumer-80mbps",
    topology: Annotated[str | None, typer.Option(help="star: one link per stage; line: one link per boundary.")] = None,
    stages: Annotated[int | None, typer.Option(help="Number of stages the model is cut into.")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe or 1f1b.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    model: Annotated[str | None, typer.Option(help="A named size, or the id or path of a cached checkpoint.")] = None,
    text: Annotated[str | None, typer.Option(help="Training text: 'bundled', or the path of a file.")] = None,
    experiment: Annotated[str, typer.Option("--like", help="Experiment that supplies all other fields.")] = "default",
    engine: EngineFlag = "",
    clock: ClockFlag = "",
    timing: TimingFlag = "",
    device: DeviceFlag = "",
    quick: QuickFlag = False,
    results: ResultsFlag = Path("results"),
    overrides: SetFlag = [],  # noqa: B006
) -> None:
    """Run one cell, even if it is already finished. Its results go to results/run/."""
    from testbed.sweep import plan as planning

    flags = {
        "topology": topology,
        "pipeline.stages": stages,
        "pipeline.schedule": schedule,
        "training.steps": steps,
        "workload.model": model,
        "workload.text": text,
    }
    said = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in flags.items() if value is not None]
    loaded = planning.load_experiment(experiment)
    networks = split_networks(profile)
    axes = {"codec": [codec], "profile": [networks if len(networks) > 1 else profile]}
    alone: dict[str, Any] = {"axes": axes, "variants": [], "only": [], "exclude": [], "tune": None, "repeats": 1}
    if quick and loaded.quick:
        alone["quick"] = {"cell": loaded.quick.get("cell", {})}
    alone["live_checks"] = 0
    choice = planning.Choice(quick, _with_flags(timing, device, [*said, *overrides]))
    _sweep(loaded.model_copy(update=alone), "run", engine, clock, choice, results, again="more", report=False)


def sweep(
    experiment: ExperimentArgument = "default",
    engine: EngineFlag = "",
    clock: ClockFlag = "",
    timing: TimingFlag = "",
    device: DeviceFlag = "",
    quick: QuickFlag = False,
    results: ResultsFlag = Path("results"),
    again: AgainFlag = False,
    calibration: Annotated[
        Path | None, typer.Option(help="Take durations from this calibration.json, e.g. of another machine.")
    ] = None,
    recalibrate: Annotated[bool, typer.Option("--recalibrate", help="Measure missing runs' durations again.")] = False,
    live_checks: Annotated[
        int | None,
        typer.Option(min=0, help="Number of played cells to check with a live run; default: the experiment's."),
    ] = None,
    executor: ExecutorFlag = "local",
    address: AddressFlag = None,
    runtime_env: RuntimeEnvFlag = None,
    page: Annotated[
        bool, typer.Option("--report/--no-report", help="Whether to write the report; `report FOLDER` writes it later.")
    ] = True,
    overrides: SetFlag = [],  # noqa: B006
    only: OnlyFlag = [],  # noqa: B006
    exclude: ExcludeFlag = [],  # noqa: B006
    repeats: RepeatsFlag = None,
    cell: Annotated[
        list[str],
        typer.Option("--cell", metavar="ID", help="Run only this cell, and leave the record of the sweep unchanged."),
    ] = [],  # noqa: B006
) -> None:
    """Run the unfinished cells of an experiment, then print the table and write the report."""
    from testbed.sweep import plan as planning

    environment = check_cluster_flags(executor, address, runtime_env)
    loaded = planning.load_experiment(experiment)
    choice = planning.Choice(quick, _with_flags(timing, device, overrides), only, exclude, repeats, cell)
    if executor == "ray":
        if live_checks:
            raise UserError("--live-checks runs cells live, which --executor ray does not: omit one of them")
        live_checks = 0
    if live_checks is not None:
        loaded = loaded.model_copy(update={"live_checks": live_checks})
    if calibration is not None and recalibrate:
        raise UserError("--calibration takes durations from a file, --recalibrate measures them: pass one of them")
    if calibration is not None and not calibration.is_file():
        raise UserError(f"there is no file {calibration}; sweeps write theirs to results/NAME/calibration.json")
    try:
        given = None if calibration is None else stored.read_json(calibration, Calibration)
    except ResultsError as error:
        raise SpecError(str(error)) from None
    _sweep(
        loaded,
        loaded.name,
        engine,
        clock,
        choice,
        results,
        again="anew" if again else "",
        report=page,
        durations={"calibration": given, "recalibrate": recalibrate},
        cluster=None if executor == "local" else (executor, address, environment),
    )


def _sweep(
    experiment: Experiment,
    folder_name: str,
    engine: str,
    clock: str,
    choice: Choice,
    results: Path,
    *,
    again: Literal["", "anew", "more"],
    report: bool,
    durations: dict[str, Any] | None = None,
    cluster: tuple[str, str | None, dict[str, Any] | None] | None = None,
) -> None:
    from testbed.commands import planned
    from testbed.sweep import conduct
    from testbed.sweep.environment import hold_folder

    stored.check_folder(folder := results / folder_name)
    # Running one cell again does not repeat the tuning.
    agenda, means = _agenda(experiment, choice, folder, engine, clock, again=bool(again) and not choice.cells)
    means = means._replace(**durations or {})
    stored.make_folder(folder)
    planned.print_means(agenda, means)
    with hold_folder(folder):  # until the report is written, because it reads the files of a sweep, mainly sweep.json
        if cluster is not None:
            cells = (*agenda.cells, *agenda.to_tune)
            refuse_others([cell.id for cell in cells if cell.timing == "live"], means.clock)
        with connected(*cluster or ("local", None, None)) as machines, conduct.replacing(folder) as anew:
            means, anew = means._replace(cluster=machines), anew if again == "anew" else lambda cells: None
            _sweep_into(folder, agenda, means, choice, engine, anew, more=again == "more", report=report)


def _sweep_into(
    folder: Path, agenda: Agenda, means: Means, choice: Choice, engine: str, anew: Anew, *, more: bool, report: bool
) -> None:
    """Make the missing runs of an agenda, or `more`, and show the results. The caller holds the folder's lock."""
    from testbed.commands import planned
    from testbed.report import collect, live_checked, tables
    from testbed.report.conclusions import conclusions
    from testbed.sweep import conduct

    if agenda.to_tune:
        agenda = conduct.tune_first(agenda, folder, means, planned.progress_into(folder), anew)
    if agenda.tuning:
        planned.print_tuning(agenda.tuning)
    anew(agenda.cells)
    runs = conduct.missing_runs(agenda.cells, agenda.experiment, folder, again=more)
    if finished := len(agenda.cells) - len({cell.id for cell in runs} & {cell.id for cell in agenda.cells}):
        say(f"{finished} of {len(agenda.cells)} cells are already finished")
    if not (choice.cells and (folder / "sweep.json").exists()):
        stored.write_json(folder / "sweep.json", conduct.sweep_record(agenda, typed(*sys.argv[1:])))
    failures = conduct.make_runs(runs, folder, means, planned.progress_into(folder))
    swept = [cell.id for cell in agenda.cells]
    groups = collect.groups(collect.read_runs(collect.latest(folder, swept)))
    out.print(tables.table_of(groups))
    _say_left_out(folder, swept)
    for group in groups:
        for sentence in conclusions(group)[:1]:
            say(sentence)
    failures += [] if choice.cells else _check_live(agenda, means, folder, engine, anew)
    if report:
        from testbed.report.index import write_index

        _report(folder, folder / "report.html", folder.parent / "index.html")
        say(f"all results: {write_index(folder.parent)}")
    if failures:
        lost = f"{len(failures)} of {len(runs)} runs; the same command retries them"
        say(f"testbed: failed: {lost}", on=err, style="red")
        raise typer.Exit(min(error.exit_status for error in failures))
    if agenda.tuning and not all(arm.left for arm in agenda.tuning.arms):
        lost = ", ".join(str(value) for arm in agenda.tuning.arms if not arm.left for value in arm.arm.values())
        why = f"every value of {agenda.tuning.field} led to an infinite loss; add smaller values"
        say(f"testbed: not run: {lost}; {why}", on=err, style="red")
        raise typer.Exit(StageError.exit_status)
    if not choice.cells and (different := live_checked.different_losses(folder, stored.last_sweep(folder))):
        why = "the network changed the maths, or a codec is not the same codec at both times"
        say(f"testbed: different losses live and played: {', '.join(different)}; {why}", on=err, style="red")
        raise typer.Exit(StageError.exit_status)


def _check_live(agenda: Agenda, means: Means, folder: Path, engine: str, anew: Anew) -> list[TestbedError]:
    """Run a few of the played cells live as a check, if this machine can; return the errors of those that failed."""
    from testbed.commands import planned
    from testbed.metrics.live_checks import checks
    from testbed.report.live_checked import live_sentences
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
    anew(twins.values())
    missing = [twin for twin in twins.values() if stored.finished(folder, twin.id) is None]
    say(f"live checks, engine {live.engine}: {live.engine_reason}")
    failures = conduct.make_runs(missing, folder, live, planned.progress_into(folder))
    for sentence in live_sentences(folder, stored.last_sweep(folder)):
        say(sentence)
    return failures


def report(
    folder: Annotated[
        Path, typer.Argument(help="An experiment's result folder; or their parent folder, for an index.")
    ] = Path("results"),
    output: Annotated[Path | None, typer.Option(dir_okay=False, help="Page; default: FOLDER/report.html.")] = None,
    gantt: Annotated[
        str | None,
        typer.Option(metavar="CELL", help="Draw one step of this cell by stage into figures/, instead of the report."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Compare with the runs in this folder, instead of the report.")
    ] = None,
) -> None:
    """Write the report of an experiment's last sweep from its result files. Runs nothing."""
    from testbed.report import collect, index, tables

    if sum(each is not None for each in (output, gantt, against)) > 1:
        raise UserError("--output, --gantt and --against write different things: pass one of them")
    for named in (folder, *([] if against is None else [against])):
        if not named.is_dir():
            raise UserError(f"there is no result folder {named}; run a sweep first, or name another folder")
    if gantt is not None:
        from testbed.report.page import draw_gantt

        say(f"gantt: {draw_gantt(folder, gantt, folder / 'figures')}")
    elif against is not None:
        from testbed.report.against import write_against

        say(f"comparison: {write_against(folder, against)}")
    elif output is None and index.sweeps(folder):
        say(f"index: {index.write_index(folder)}")
    else:
        cells = stored.last_sweep(folder).cells
        _say_left_out(folder, cells)
        out.print(tables.terminal_table(collect.latest(folder, cells)))
        known = folder.resolve().parent / "index.html"
        _report(folder, output or folder / "report.html", known if known.exists() else None)


def _say_left_out(folder: Path, cells: Sequence[str]) -> None:
    from testbed.report import collect

    for sentence in collect.left_out(folder, cells):
        say(f"testbed: {sentence}", on=err, style="red")


def _report(folder: Path, page: Path, index: Path | None) -> None:
    from testbed.report.page import write_report

    say(f"report: {write_report(folder, page, index)}")
