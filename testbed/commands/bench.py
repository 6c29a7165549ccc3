"""Commands that measure testbed itself. Each prints a table that names the machine."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from testbed.commands import codec_bench
from testbed.commands.console import EngineFlag, choose_engine, out, table
from testbed.errors import LabError, UserError

if TYPE_CHECKING:
    from testbed.net.certificate.accuracy import Accuracy

app = typer.Typer(help="Measure testbed itself: how true its links and its clocks are.", no_args_is_help=True)
app.command()(codec_bench.codecs)


@app.command()
def links(
    engine: EngineFlag = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Three points instead of the whole grid.")] = False,
    busy: Annotated[
        bool, typer.Option("--busy", help="Each point once more with a busy loop on every processor.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Results as JSON; points in it are not measured again.")
    ] = None,
    compare: Annotated[Path | None, typer.Option(help="Another engine's results: do the two agree?")] = None,
    page: Annotated[Path | None, typer.Option(help="Also write the tables as a Markdown page.")] = None,
) -> None:
    """Measure how true links are over a grid of rates and delays: goodput, RTT, messages after idle, queue, losses."""
    from testbed import paths, results
    from testbed.net.certificate import accuracy
    from testbed.report import link_accuracy as drawn
    from testbed.sweep.environment import describe_machine, hold_machine

    other = results.read_json(compare, accuracy.Accuracy) if compare else None
    chosen, reason = choose_engine(engine)
    out.print(f"engine {chosen}: {reason}", highlight=False, soft_wrap=True)
    measured = results.read_json(output, accuracy.Accuracy) if output and output.exists() else None
    if measured is not None and measured.engine != chosen:
        raise UserError(
            f"{output} holds results of the engine {measured.engine}, not {chosen}; name another file with -o"
        )
    measured = measured or accuracy.Accuracy(
        engine=chosen, engine_reason=reason, machine=describe_machine(), results=()
    )
    have = {result.point for result in measured.results}
    waiting = [point for point in accuracy.grid(chosen, quick=quick, busy=busy) if point not in have]
    minutes = sum(point.seconds() for point in waiting) / 60
    out.print(f"{len(waiting)} points to measure, {len(have)} at hand: about {minutes:.0f} min", highlight=False)
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
            out.print(f"{number}/{len(waiting)}  {point.name}: {verdict}{took}", highlight=False, soft_wrap=True)
    _print_accuracy(measured, other)
    if page:
        page.write_text(drawn.accuracy_page([measured, other] if other else [measured]), encoding="utf8")
        paths.give_to_user(page)
    agrees = all(pair.holds for pair in accuracy.agreement(measured, other)) if other else True
    if not agrees or not all(result.passed for result in measured.results):
        raise typer.Exit(1)


@app.command()
def clock(
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the table to this .csv file.")] = None,
) -> None:
    """Compare links on the virtual clock with their ideal, over rates from 10 Mbit/s to 1 Gbit/s and delays from 5 to
    100 ms.
    """
    from testbed import paths
    from testbed.net.certificate import accuracy
    from testbed.play.certify import certify_virtual
    from testbed.report.link_accuracy import VIRTUAL_HEADINGS, virtual_rows
    from testbed.vm import find_clock_kernel

    if (kernel := find_clock_kernel()) is None:
        raise UserError("there is no kernel with a virtual clock here; build it with: python -m testbed vm --build")
    points = [point for point in accuracy.grid("netem") if point.loss is None]
    certificates = certify_virtual([point.profile() for point in points], kernel)
    lines = virtual_rows(points, certificates)
    _print_rows(VIRTUAL_HEADINGS, lines)
    if output:
        with output.open("w", encoding="utf8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([VIRTUAL_HEADINGS, *lines])
        paths.give_to_user(output)
    seconds = sum(certificate.seconds for certificate in certificates)
    out.print(f"guest kernel {kernel.version}; {len(points)} links took {seconds:.0f} s of this machine's time")
    if any(certificate.verdict != "PASS" for certificate in certificates):
        raise typer.Exit(1)


@app.command()
def play(
    quick: Annotated[bool, typer.Option("--quick", help="Without the 64 stages.")] = False,
) -> None:
    """Measure how fast traces are played on the virtual clock: seconds here per second in the guest, packets."""
    import tempfile

    from testbed.net.lab import LabSpec
    from testbed.play.guests import play_jobs
    from testbed.play.job import PlayJob
    from testbed.play.played import read_played
    from testbed.play.synthetic import pipeline_trace
    from testbed.profiles import load_profile
    from testbed.sweep.environment import describe_machine
    from testbed.vm import find_clock_kernel

    if (kernel := find_clock_kernel()) is None:
        raise UserError("there is no kernel with a virtual clock here; build it with: python -m testbed vm --build")
    link = load_profile("consumer-80mbps")
    columns = ("steps", "guest", "here", "here per guest", "packets", "packets per s")
    rows = table("trace", *columns, "steady", right=columns)
    about = describe_machine()
    with tempfile.TemporaryDirectory(prefix="testbed-bench-") as name:
        for label, stages, microbatches, size, steps in _PLAYED if not quick else _PLAYED[:-1]:
            folder = Path(name) / label.replace(" ", "-")
            folder.mkdir()
            trace = pipeline_trace(
                stages=stages,
                microbatches=microbatches,
                steps=steps,
                message_bytes=size,
                forward_ns=7_000_000,
                backward_ns=14_000_000,
                encode_ns=300_000,
                decode_ns=300_000,
                update_ns=3_000_000,
            )
            trace.write(folder / "trace")
            lab = LabSpec(topology="star", profiles=(link,), nodes=stages, engine="netem", engine_reason="asked for")
            job = PlayJob(trace=folder / "trace", lab=lab, output=folder / "played")
            (outcome,) = play_jobs([job], clock="virtual", folder=folder / "work", kernel=kernel)
            if outcome.error is not None or outcome.guest_seconds is None:
                raise LabError(f"{label} could not be played: {outcome.error}")
            played = read_played(job.output)
            packets = sum(node.sent_packets for node in played.counters[-1])
            here, inside = outcome.host_seconds, outcome.guest_seconds
            numbers = (str(played.steps), f"{inside:.1f} s", f"{here:.1f} s", f"{here / inside:.2f}", f"{packets:,}")
            steady = f"from step {played.steady[0]}, period {played.steady[1]}" if played.steady else "not proved"
            rows.add_row(label, *numbers, f"{packets / here:,.0f}", steady)
    out.print(rows)
    out.print(
        f"machine: {about['cpu_model'] or 'unknown'}, {about['cores']} processors, load {about['load_average'][0]}"
    )


_PLAYED = (
    ("fp32, 3 stages", 3, 8, 262_144, 40),
    ("int8, 3 stages", 3, 8, 66_560, 40),
    ("64 stages, 64 micro-batches", 64, 64, 16_384, 1),
)
"""Name, stages, micro-batches, bytes of a message, steps. The first two are GPT-2 mini's."""


@app.command()
def clocks(
    folder: Annotated[Path, typer.Argument(help="A result folder with live and played runs of the same cells.")] = Path(
        "results/clocks"
    ),
) -> None:
    """Compare finished played runs with live runs of the same cells: step time, wire bytes, losses. Starts nothing."""
    from testbed.metrics.fidelity import STEP_TIME, WIRE, Fidelity, compare_timings
    from testbed.metrics.live_checks import timed_both_ways

    columns = ("live", "played", "step time", "wire")
    rows = table("network", "codec", "schedule", *columns, "losses", "certificates", "verdict", right=columns)
    found: list[Fidelity] = []
    machines = set()
    for runs in timed_both_ways(folder):
        cell = runs[0].cell
        live, played = ((run.summary, [run.steps(stage) for stage in range(cell.pipeline.stages)]) for run in runs)
        assert live[0] is not None
        assert played[0] is not None
        one = compare_timings(live[0], live[1], played[0], played[1])
        found.append(one)
        machines |= {f"{run.environment['cpu_model']}, {run.environment['cores']} processors" for run in runs}
        times = ["-" if s is None else f"{s * 1e3:.1f} ms" for s in (one.live_s, one.played_s)]
        shares = ["-" if share is None else f"{share:+.2%}" for share in (one.step_time, one.wire)]
        words = ("identical" if one.same_losses else "DIFFER", "PASS" if one.certified else "FAIL")
        rows.add_row(
            cell.network,
            cell.codec,
            cell.pipeline.schedule,
            *times,
            *shares,
            *words,
            "holds" if one.holds else "DOES NOT HOLD",
        )
    if not found:
        raise UserError(f"{folder} has no cell with a good live run and a good played run; run `testbed sweep clocks`")
    out.print(rows)
    off = sorted(abs(one.step_time) for one in found if one.step_time is not None)
    if off:
        out.print(f"step times differ by {median(off):.2%} in the median and by {off[-1]:.2%} at most", highlight=False)
    held = sum(one.holds for one in found)
    rule = f"step time within {STEP_TIME:.0%}, bytes on the wire within {WIRE:.0%}, losses identical, links certified"
    out.print(f"{held} of {len(found)} cells hold: {rule}", highlight=False, soft_wrap=True)
    out.print(f"machine: {'; '.join(sorted(machines))}", highlight=False, soft_wrap=True)
    if held < len(found):
        raise typer.Exit(1)


def _print_accuracy(measured: Accuracy, other: Accuracy | None) -> None:
    from testbed.report import link_accuracy as drawn

    for accuracy in (measured, other) if other else (measured,):
        out.print(f"\n{drawn.machine_line(accuracy)}", highlight=False)
        for headings, lines in (
            (drawn.HEADINGS, drawn.accuracy_rows(accuracy)),
            (drawn.LOSS_HEADINGS, drawn.loss_accuracy_rows(accuracy)),
        ):
            if lines:
                _print_rows(headings, lines)
    if other:
        out.print("\nthe engines against each other")
        _print_rows(drawn.AGREEMENT_HEADINGS, drawn.agreement_rows(measured, other))


def _print_rows(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    rows = table(*headings, right=tuple(headings[:-1]))
    for line in lines:
        rows.add_row(*line)
    out.print(rows)
