"""The `bench` commands, which measure testbed itself. Each prints a table that names the machine."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from testbed.commands import bench_all, codec_bench
from testbed.commands.console import EngineFlag, choose_engine, need_clock_kernel, print_table, say
from testbed.errors import UserError

if TYPE_CHECKING:
    from testbed.net.certificate.accuracy import Accuracy

app = typer.Typer(help="Measure testbed itself: its speed, and its links and clocks' accuracy.", no_args_is_help=True)
app.command("all")(bench_all.measure_all)
app.command()(bench_all.compare)
app.command()(codec_bench.codecs)


@app.command()
def links(
    engine: EngineFlag = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Measure three points instead of the whole grid.")] = False,
    busy: Annotated[
        bool, typer.Option("--busy", help="Measure each point again with a busy loop on every processor.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", dir_okay=False, help="JSON file; points already in it are skipped.")
    ] = None,
    compare: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Another engine's results.")] = None,
    page: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the tables as a Markdown page.")] = None,
) -> None:
    """Measure link accuracy over a grid of rates and delays: goodput, RTT, messages after idle, queue, losses."""
    from testbed import paths, results
    from testbed.net.certificate import accuracy
    from testbed.report import link_accuracy as drawn
    from testbed.sweep.environment import describe_machine, hold_machine

    other = results.read_json(compare, accuracy.Accuracy) if compare else None
    chosen, reason = choose_engine(engine)
    say(f"engine {chosen}: {reason}")
    measured = results.read_json(output, accuracy.Accuracy) if output and output.exists() else None
    if measured is not None and measured.engine != chosen:
        raise UserError(f"{output} holds results of engine {measured.engine}, not {chosen}; pass another file with -o")
    measured = measured or accuracy.Accuracy(
        engine=chosen, engine_reason=reason, machine=describe_machine(), results=()
    )
    measured_points = {result.point for result in measured.results}
    waiting = [point for point in accuracy.grid(chosen, quick=quick, busy=busy) if point not in measured_points]
    minutes = sum(point.seconds() for point in waiting) / 60
    say(f"{len(waiting)} points to measure, {len(measured_points)} already done: about {minutes:.0f} min")
    for file in (output, page):
        if file:
            results.make_folder(file.absolute().parent, "name another file")
    with hold_machine():
        for number, point in enumerate(waiting, start=1):
            result = accuracy.measure_point(point, chosen, reason)
            measured = measured.model_copy(update={"results": (*measured.results, result)})
            if output:
                results.write_json(output, measured)
            verdict = result.error or ("PASS" if result.passed else "FAIL")
            took = f" in {result.certificate.seconds:.0f} s" if result.certificate else ""
            say(f"{number}/{len(waiting)}  {point.name}: {verdict}{took}")
    _print_accuracy(measured, other)
    if page:
        page.write_text(drawn.accuracy_page([measured, other] if other else [measured]), encoding="utf8")
        paths.give_to_user(page)
    agrees = all(pair.holds for pair in accuracy.agreement(measured, other)) if other else True
    if not agrees or not all(result.passed for result in measured.results):
        raise typer.Exit(1)


@app.command()
def clock(
    output: Annotated[Path | None, typer.Option("-o", "--output", dir_okay=False, help="Write this .csv file.")] = None,
) -> None:
    """Compare virtual-clock links with their ideal: rates from 10 Mbit/s to 1 Gbit/s, delays from 5 to 100 ms."""
    from testbed import paths, results
    from testbed.net.certificate import accuracy
    from testbed.player.certify_links import certify_virtual
    from testbed.report.link_accuracy import VIRTUAL_HEADINGS, virtual_rows

    if output:
        results.make_folder(output.absolute().parent, "name another file")
    kernel = need_clock_kernel()
    points = [point for point in accuracy.grid("netem") if point.loss is None]
    certificates = certify_virtual([point.profile() for point in points], kernel)
    lines = virtual_rows(points, certificates)
    _print_rows(VIRTUAL_HEADINGS, lines)
    if output:
        with output.open("w", encoding="utf8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([VIRTUAL_HEADINGS, *lines])
        paths.give_to_user(output)
    seconds = sum(certificate.seconds for certificate in certificates)
    say(f"guest kernel {kernel.version}; {len(points)} links took {seconds:.0f} s of this machine's time")
    if any(certificate.verdict != "PASS" for certificate in certificates):
        raise typer.Exit(1)


def _print_accuracy(measured: Accuracy, other: Accuracy | None) -> None:
    from testbed.report import link_accuracy as drawn

    for accuracy in (measured, other) if other else (measured,):
        say(f"\n{drawn.machine_line(accuracy)}")
        for headings, lines in (
            (drawn.HEADINGS, drawn.accuracy_rows(accuracy)),
            (drawn.LOSS_HEADINGS, drawn.loss_accuracy_rows(accuracy)),
        ):
            if lines:
                _print_rows(headings, lines)
    if other:
        say("\nthe engines against each other")
        _print_rows(drawn.AGREEMENT_HEADINGS, drawn.agreement_rows(measured, other))


def _print_rows(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    print_table(headings, lines, right=headings[:-1])
