"""The command line: reads flags, calls one function, prints what came back. Decides nothing that changes a number."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from testbed import spec, units
from testbed.errors import TestbedError, UserError

app = typer.Typer(
    name="testbed",
    help="Measure what activation codecs do to wall-clock time and convergence over slow links.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out = Console(width=None if sys.stdout.isatty() else 130)
err = Console(stderr=True)

EngineFlag = Annotated[str, typer.Option(help="netem, relay, or auto: netem where it works when tried, else relay.")]
_INTERRUPTED = 130

ResultsFlag = Annotated[Path, typer.Option(help="Folder that results are written to.")]
SetFlag = Annotated[
    list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Change a field or an axis, e.g. training.steps=20.")
]


class _State:
    debug = False


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False) -> None:
    _State.debug = debug


def main() -> None:
    """Run the command line; errors become one message and an exit status: 2 the user's, 1 ours, 130 interrupted."""
    try:
        app(standalone_mode=True)
    except TestbedError as error:
        if _State.debug:
            raise
        label = "error" if isinstance(error, UserError) else "failed"
        err.print(f"testbed: {label}: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(error.exit_status)
    except SystemExit as end:
        if end.code == _INTERRUPTED:  # typer has caught the KeyboardInterrupt
            err.print(
                "testbed: interrupted; nothing was left running. The same command goes on with what is missing.", soft_wrap=True
            )
        raise
    except Exception as error:
        if _State.debug:
            raise
        fault = f"{type(error).__name__}: {error} (a fault of testbed: run again with --debug and report what it prints)"
        err.print(f"testbed: failed: {fault}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Only the last column gives way on a narrow terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=column != columns[-1])
    return table


def _resolve(engine: str) -> tuple[spec.Engine, str]:
    from testbed.errors import UnknownNameError
    from testbed.net import capabilities

    if engine not in ("auto", "netem", "relay"):
        raise UnknownNameError("engine", engine, ("auto", "netem", "relay"))
    return capabilities.resolve_engine(engine)  # type: ignore[arg-type]


@app.command()
def doctor() -> None:
    """Try everything that a sweep needs on this machine, and say what to do about each thing that is missing."""
    from testbed.net import capabilities

    table = _table("", "what", "found")
    findings = capabilities.findings()
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[red]no[/]" if finding.needed else "[yellow]no[/]"
        table.add_row(mark, finding.name, finding.detail + ("" if finding.ok or not finding.remedy else f"\n-> {finding.remedy}"))
    out.print(table)
    if not all(finding.ok for finding in findings if finding.needed):
        raise typer.Exit(1)


@app.command()
def profiles() -> None:
    """List the link profiles."""
    table = _table(
        "profile", "up", "down", "idle RTT", "loss", "transport", "what it is", right=("up", "down", "idle RTT", "loss")
    )
    for name in sorted(spec.profile_files()):
        profile = spec.load_profile(name)
        up, down = profile.up, profile.down
        rtt = sum(pipe.delay_ns for pipe in (up, down) if pipe)
        loss = max((pipe.loss for pipe in (up, down) if pipe), default=0.0)
        table.add_row(
            name,
            units.format_rate(up.rate_bps) if up else "unshaped",
            units.format_rate(down.rate_bps) if down else "unshaped",
            units.format_time(rtt) if profile.shaped else "-",
            f"{loss:.4g}".removesuffix(".0") if not loss else f"{loss * 100:.4g} %",
            profile.congestion_control,
            profile.summary,
        )
    out.print(table)


@app.command()
def codecs() -> None:
    """List the codecs. Anyone's own is named 'package.module:Class'."""
    from testbed.codecs.table import CODECS

    table = _table("codec", "bits per element", "state", "what it is")
    for name, entry in CODECS.items():
        table.add_row(name, entry.bits_per_element, entry.state, f"{entry.summary} [{entry.source}]".replace("[", r"\["))
    out.print(table)


@app.command()
def link(
    profile: Annotated[str, typer.Argument(help="Name of a profile, or the path of a profile file.")],
    engine: EngineFlag = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="The short form that every run gets, under 3 s.")] = False,
) -> None:
    """Build one link, certify it, and print asked against measured."""
    from testbed.net.lab import Lab, LabSpec
    from testbed.report.tables import certificate_table
    from testbed.sweep.machine import machine

    wanted = spec.load_profile(profile)
    chosen, reason = _resolve(engine)
    out.print(f"engine {chosen}: {reason}", highlight=False, soft_wrap=True)
    with machine(), Lab(LabSpec(topology="star", profile=wanted, nodes=1, engine=chosen, engine_reason=reason)) as lab:
        certificate = lab.certify("quick" if quick else "full", (256 * 1024, 4 * 1024 * 1024))
    out.print(certificate_table(certificate))
    if certificate.rejected:
        out.print(f"measured twice: {len(certificate.rejected)} quantities failed the first time", highlight=False)
    out.print(f"{wanted.name}: {certificate.verdict}, measured in {certificate.seconds:.1f} s")
    if certificate.verdict != "PASS":
        raise typer.Exit(1)


ExperimentArgument = Annotated[str, typer.Argument(help="Name of an experiment, or the path of its sweep.toml.")]
QuickFlag = Annotated[bool, typer.Option("--quick", help="The experiment's short form.")]


@app.command()
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
    chosen, reason = _resolve(engine or found.engine)
    cells = planning.cells(found, chosen, quick=quick, overrides=overrides)
    folder = results / found.name
    table = _table("cell", "stages", "schedule", "micro-batches", "steps", "finished", right=("stages", "micro-batches", "steps"))
    done = 0
    for cell in cells:
        run = stored.finished(folder, cell.id)
        done += run is not None
        p = cell.pipeline
        table.add_row(
            cell.id,
            str(p.stages),
            f"{p.schedule}, {p.in_flight} in flight",
            str(p.microbatches),
            str(cell.training.steps),
            str(run.folder) if run else "-",
        )
    out.print(found.question, highlight=False, soft_wrap=True)
    out.print(f"engine {chosen}: {reason}", highlight=False, soft_wrap=True)
    out.print(table)
    out.print(f"{len(cells)} cells, {done} finished, {len(cells) - done} to run")


@app.command()
def run(
    codec: Annotated[str, typer.Option(help="A codec's name, or 'package.module:Class'.")] = "fp32",
    profile: Annotated[str, typer.Option(help="A profile's name, or the path of a profile file.")] = "consumer-80mbps",
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
        "pipeline.stages": stages,
        "pipeline.schedule": schedule,
        "training.steps": steps,
        "workload.model": model,
        "workload.text": text,
    }
    chosen_flags = [f"{name}={_quoted(value)}" for name, value in flags.items() if value is not None]
    found = planning.load_experiment(experiment)
    one = found.model_copy(update={"axes": {"codec": [codec], "profile": [profile]}})
    if quick:
        one = one.model_copy(update={"quick": {"cell": found.quick.get("cell", {})}})
    _sweep(one, "run", engine, quick, results, [*chosen_flags, *overrides], again=True, report=False)


def _typed() -> str:
    return shlex.join(["python", "-m", "testbed", *sys.argv[1:]])


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


@app.command()
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

    chosen, reason = _resolve(engine or experiment.engine)
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


@app.command()
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


@app.command(context_settings={"allow_interspersed_args": False})
def vm(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run inside.")],
    fetch: Annotated[bool, typer.Option("--fetch", help="Get the guest kernel first if it is not here (38 MB).")] = False,
    memory: Annotated[str, typer.Option(help="Memory of the guest.")] = "4G",
    time_limit: Annotated[float | None, typer.Option(help="Seconds after which the guest is stopped; exit status 124.")] = None,
    share: Annotated[list[Path], typer.Option(help="A folder that the guest may write to; the current one always is.")] = [],  # noqa: B006
) -> None:
    """Run a command in a guest kernel that has sch_netem; files, output and exit status are carried over. Needs no root."""
    from testbed import vm as guest

    kernel = guest.fetch() if fetch else guest.find()
    if kernel is None:
        raise UserError(
            "there is no guest kernel yet; get it (38 MB from Debian's packages) with: python -m testbed vm --fetch -- COMMAND"
        )
    raise typer.Exit(guest.run(kernel, command, memory=memory, time_limit_s=time_limit, share=share))


if __name__ == "__main__":
    main()
