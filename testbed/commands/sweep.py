"""Commands that plan, run and report cells."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.commands.console import EngineFlag, ResultsFlag, SetFlag, err, out, resolve, table
from testbed.errors import TestbedError, UserError

ExperimentArgument = Annotated[str, typer.Argument(help="Name of an experiment, or the path of its sweep.toml.")]
QuickFlag = Annotated[bool, typer.Option("--quick", help="The experiment's short form.")]


def plan(
    experiment: ExperimentArgument = "default",
    engine: EngineFlag = "",
    quick: QuickFlag = False,
    results: ResultsFlag = Path("results"),
    overrides: SetFlag = [],  # noqa: B006
) -> None:
    """Show the cells of an experiment and which of them are finished; starts nothing."""
    from testbed import results as stored
    from testbed.sweep import plan as planning

    found = planning.load_experiment(experiment)
    chosen, reason = resolve(engine or found.engine)
    cells = planning.cells(found, chosen, quick=quick, overrides=overrides)
    folder = results / found.name
    rows = table("cell", "stages", "schedule", "micro-batches", "steps", "finished", right=("stages", "micro-batches", "steps"))
    done = 0
    for cell in cells:
        run = stored.finished(folder, cell.id)
        done += run is not None
        p = cell.pipeline
        rows.add_row(
            cell.id,
            str(p.stages),
            f"{p.schedule}, {p.in_flight} in flight",
            str(p.microbatches),
            str(cell.training.steps),
            str(run.folder) if run else "-",
        )
    out.print(found.question, highlight=False, soft_wrap=True)
    out.print(f"engine {chosen}: {reason}", highlight=False, soft_wrap=True)
    out.print(rows)
    out.print(f"{len(cells)} cells, {done} finished, {len(cells) - done} to run")


def run(
    codec: Annotated[str, typer.Option(help="A codec's name, or 'package.module:Class'.")] = "fp32",
    profile: Annotated[
        str, typer.Option(help="A profile's name, or the path of a profile file; 'cable+lte+cable': one a link.")
    ] = "consumer-80mbps",
    topology: Annotated[str | None, typer.Option(help="star: a link a stage; line: a link a boundary.")] = None,
    stages: Annotated[int | None, typer.Option(help="Pieces that the model is cut into.")] = None,
    schedule: Annotated[str | None, typer.Option(help="gpipe or 1f1b.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    model: Annotated[str | None, typer.Option(help="A named size, or the id or path of a cached checkpoint.")] = None,
    text: Annotated[str | None, typer.Option(help="'bundled', or the path of a text file.")] = None,
    experiment: Annotated[str, typer.Option("--like", help="Experiment that all other fields are taken from.")] = "default",
    engine: EngineFlag = "",
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
    chosen_flags = [f"{name}={_quoted(value)}" for name, value in flags.items() if value is not None]
    found = planning.load_experiment(experiment)
    one = found.model_copy(update={"axes": {"codec": [codec], "profile": [profile.split("+") if "+" in profile else profile]}})
    if quick:
        one = one.model_copy(update={"quick": {"cell": found.quick.get("cell", {})}})
    _sweep(one, "run", engine, quick, results, [*chosen_flags, *overrides], again=True, report=False)


def _typed() -> str:
    return shlex.join(["python", "-m", "testbed", *sys.argv[1:]])


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def sweep(
    experiment: ExperimentArgument = "default",
    engine: EngineFlag = "",
    quick: QuickFlag = False,
    results: ResultsFlag = Path("results"),
    again: Annotated[bool, typer.Option("--again", help="Run finished cells once more.")] = False,
    overrides: SetFlag = [],  # noqa: B006
) -> None:
    """Run every cell of an experiment that is not finished yet, then print the table and write the report."""
    from testbed.sweep import plan as planning

    found = planning.load_experiment(experiment)
    _sweep(found, found.name, engine, quick, results, overrides, again=again, report=True)


def _sweep(
    experiment: Any, folder_name: str, engine: str, quick: bool, results: Path, overrides: list[str], *, again: bool, report: bool
) -> None:
    from testbed import results as stored
    from testbed.report import collect, tables
    from testbed.sweep import controller
    from testbed.sweep import plan as planning
    from testbed.sweep.progress import Watch

    chosen, reason = resolve(engine or experiment.engine)
    cells = planning.cells(experiment, chosen, quick=quick, overrides=overrides)
    folder = stored.make_folder(results / folder_name)
    waiting = [cell for cell in cells if again or stored.finished(folder, cell.id) is None]
    out.print(f"engine {chosen}: {reason}", highlight=False, soft_wrap=True)
    if len(waiting) < len(cells):
        out.print(f"{len(cells) - len(waiting)} of {len(cells)} cells are finished already", highlight=False)
    failures: list[TestbedError] = []
    if waiting:
        with Watch(out, waiting) as watch:
            failures = controller.sweep(waiting, folder, reason, watch)
    ids = [cell.id for cell in cells]
    stored.write_json(folder / "sweep.json", stored.SweepRecord(question=experiment.question, command=_typed(), cells=tuple(ids)))
    out.print(tables.terminal_table(collect.latest(folder, ids)))
    if report:
        _report(folder, folder / "report.html")
    if failures:
        lost = f"{len(failures)} of {len(waiting)} cells; the same command tries them again"
        err.print(f"testbed: failed: {lost}", style="red", highlight=False)
        raise typer.Exit(min(error.exit_status for error in failures))


def report(
    folder: Annotated[Path, typer.Argument(help="An experiment's result folder.")] = Path("results/default"),
    output: Annotated[Path | None, typer.Option(help="The page to write; report.html in the folder if not given.")] = None,
) -> None:
    """Draw the report of an experiment's last sweep again from its result files; starts nothing."""
    from testbed import results as stored
    from testbed.report import collect, tables

    if not folder.is_dir():
        raise UserError(f"there is no result folder {folder}; run a sweep first, or name another folder")
    out.print(tables.terminal_table(collect.latest(folder, stored.last_sweep(folder).cells)))
    _report(folder, output or folder / "report.html")


def _report(folder: Path, page: Path) -> None:
    from testbed.report import build

    out.print(f"report: {build(folder, page)}", highlight=False, soft_wrap=True)


def codecs() -> None:
    """List the codecs. Anyone's own is named 'package.module:Class'."""
    from testbed.codecs.table import CODECS

    rows = table("codec", "bits per element", "state", "what it is")
    for name, entry in CODECS.items():
        rows.add_row(name, entry.bits_per_element, entry.state, f"{entry.summary} [{entry.source}]".replace("[", r"\["))
    out.print(rows)
