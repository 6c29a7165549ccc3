"""Commands about traces, the record of what a job does: print one, draw one, exchange one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from testbed import paths, units
from testbed.commands.console import print_table, say, writing
from testbed.errors import SpecError, UserError
from testbed.play import totals
from testbed.play.check import load_trace
from testbed.play.played import Played, PlayedLane, read_played
from testbed.play.split import repeated
from testbed.play.steady import extended
from testbed.play.trace import KINDS, RECEIVE, SEND, WAIT, WORK, Operation, Trace
from testbed.play.unlinked import play_unlinked, step_ends

app = typer.Typer(
    help="Traces: what a job's nodes work on, send and wait for. Print one, draw one, exchange one (docs/traces.md).",
    no_args_is_help=True,
)
_TraceArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A trace.")]
_MOST_ROWS = 16
"""How many lanes and pairs of nodes are printed."""
_MOST_OPERATIONS = 300_000
"""How many operations are done for the time of a step; more would take seconds."""
_SUFFIXES = ("png", "svg", "pdf")


@app.command()
def show(
    file: _TraceArgument,
    step: Annotated[int | None, typer.Option(help="Print the operations of this step, one per line.")] = None,
) -> None:
    """Print what a trace holds: its lanes, and what a step of it works on and sends."""
    trace = load_trace(file)
    if step is not None:
        _check_step(trace, step, str(file))
        return _print_step(trace, step)
    counts = totals.operations_by_kind(trace)
    say(
        f"{file}: {len(trace.nodes)} nodes, {len(trace.lanes)} lanes, {trace.steps} steps, "
        f"{sum(counts.values()):,} operations ({', '.join(f'{count:,} {kind}' for kind, count in counts.items())})"
    )
    for key, value in trace.about.items():
        say(f"{key}: {value}")
    if trace.steps:
        _print_lanes(trace)
        _print_work(trace)
        _print_pairs(trace)
        _print_unlinked(trace)
    return None


@app.command()
def draw(
    file: _TraceArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help=f"Picture to write: {', '.join(_SUFFIXES)}.")],
    step: Annotated[int, typer.Option(help="The first step that is drawn.")] = 0,
    steps: Annotated[int, typer.Option(help="How many steps are drawn.", min=1)] = 1,
    played: Annotated[
        Path | None, typer.Option(help="When everything happened: what `testbed play -o` has kept of this trace.")
    ] = None,
) -> None:
    """Draw a trace as a Gantt chart: as it was played, or as it would be if messages took no time."""
    from testbed.report import style
    from testbed.report.trace_chart import trace_chart

    if output.suffix[1:] not in _SUFFIXES:
        raise UserError(f"cannot draw to {output}: the name of a picture ends in .{', .'.join(_SUFFIXES)}")
    trace, how, when = load_trace(file), "if messages take no time", None
    if played is not None:
        when = read_played(played)
        trace = repeated(trace, max(1, -(-when.steps // max(1, trace.steps))))  # as `play --repeat` does
        how = f"over {_links(when)}, on the {when.clock} clock"
    _check_step(trace, step, str(file))
    last = min(step + steps, trace.steps)
    lanes = play_unlinked(trace, last) if when is None else _as_played(trace, when, last, str(played))
    with writing("the picture", output), style.applied():
        drawing = trace_chart(trace, lanes, step, last, how, str(played or file))
        drawing.figure.savefig(output)
    say(f"{drawing.title}. {drawing.caption} -> {output}")


@app.command("export")
def export_chakra(
    file: _TraceArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="NAME.et; NAME.0.et, NAME.1.et ... are written.")],
) -> None:
    """Write a trace as Chakra execution traces, which ASTRA-sim reads: one file per node."""
    from testbed.play.chakra import save_chakra

    trace = load_trace(file)
    with writing("the Chakra trace", output):
        written = save_chakra(trace, output)
    for path in written:
        paths.give_to_user(path)
    say(f"{len(written)} files: {written[0]} to {written[-1].name}")


@app.command("import")
def import_chakra(
    file: Annotated[Path, typer.Argument(metavar="NAME.et", help="A Chakra trace: NAME.0.et, NAME.1.et ...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Trace to write.")],
    flops: Annotated[str | None, typer.Option(help="What an NPU does, e.g. 10TFLOPS, where no durations are.")] = None,
) -> None:
    """Make a trace of Chakra execution traces: COMP, COMM_SEND and COMM_RECV nodes, and collectives as rings."""
    from testbed.play.chakra import load_chakra

    _write(load_chakra(file, flops_per_s=units.parse_flops(flops) if flops else None), output)


@app.command("join")
def join_ranks(
    files: Annotated[
        list[Path], typer.Argument(metavar="NAME.RANK.rank...", help="What recorders wrote, of all ranks.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="Trace to write.")],
) -> None:
    """Make a trace of what `testbed.play.recorder` has recorded of a PyTorch job."""
    from testbed.play.join import join

    _write(join(files), output)


def _write(trace: Trace, output: Path) -> None:
    with writing("the trace", output):
        trace.write(output)
    show(output)


def _as_played(trace: Trace, played: Played, steps: int, where: str) -> tuple[PlayedLane, ...]:
    """Return when the first steps happened. SpecError where it was another trace, or fewer steps."""
    if [len(lane.begin_ns) for lane in played.lanes] != [lane.starts[played.steps] for lane in trace.lanes]:
        raise SpecError(f"{where} is not about this trace: it has other lanes, or other operations in them")
    if steps > played.steps and played.steady is None:
        raise SpecError(f"{where} has {played.steps} steps, and step {steps - 1} is to be drawn, counted from 0")
    return extended(played, trace, steps).lanes


def _links(played: Played) -> str:
    return "+".join(dict.fromkeys(link["profile"] for link in played.lab["links"]))


def _check_step(trace: Trace, step: int, where: str) -> None:
    if not 0 <= step < trace.steps:
        raise SpecError(f"{where} has no step {step}; it has {trace.steps}, counted from 0")


def _print_lanes(trace: Trace) -> None:
    shapes = dict.fromkeys(
        (trace.nodes[lane.node], lane.name, f"{len(lane) / trace.steps:,.6g}") for lane in trace.lanes
    )
    _print_some(("node", "lane", "operations per step"), list(shapes), "lanes")


def _print_work(trace: Trace) -> None:
    rows = []
    for total in totals.work_by_label(trace):
        most = total.ns_by_node.index(max(total.ns_by_node))
        every = units.format_time(sum(total.ns_by_node) / trace.steps)
        busiest = units.format_time(total.ns_by_node[most] / trace.steps)
        rows.append((trace.labels[total.label], every, trace.nodes[most], busiest))
    headings = ("work", "per step, all nodes", "busiest node", "per step")
    print_table(headings, rows, right=headings[1:2])


def _print_pairs(trace: Trace) -> None:
    rows = []
    for pair in sorted(totals.bytes_by_pair(trace), key=lambda pair: -pair.payload_bytes):
        count, size = pair.messages / trace.steps, units.format_size(pair.payload_bytes / trace.steps)
        rows.append((trace.nodes[pair.sender], trace.nodes[pair.receiver], f"{count:,.6g}", size))
    _print_some(("from", "to", "messages per step", "per step"), rows, "pairs of nodes, which send less")


def _print_some(headings: Sequence[str], rows: Sequence[Sequence[str]], what: str) -> None:
    """Print the first rows, whose third column is a number, and how many there are besides."""
    print_table(headings, rows[:_MOST_ROWS], right=headings[2:3])
    if len(rows) > _MOST_ROWS:
        say(f"... and {len(rows) - _MOST_ROWS} more {what}")


def _print_unlinked(trace: Trace) -> None:
    operations = sum(map(len, trace.lanes))
    steps = max(1, min(trace.steps, _MOST_OPERATIONS * trace.steps // max(operations, 1)))
    last = step_ends(trace, play_unlinked(trace, steps), steps)[-1]
    say(f"a step takes {units.format_time(last / steps)} if messages take no time (mean of the first {steps})")


def _print_step(trace: Trace, step: int) -> None:
    rows = []
    for lane in trace.lanes:
        for number, operation in enumerate(lane.operations(step)):
            what = (KINDS[operation.kind], trace.labels[operation.label], _words(trace, operation))
            rows.append((trace.nodes[lane.node], lane.name, str(number), *what))
    print_table(("node", "lane", "number", "operation", "label", "what"), rows, right=("number",))


def _words(trace: Trace, operation: Operation) -> str:
    """Say what an operation does to whom."""
    if operation.kind == WORK:
        return units.format_time(operation.value)
    if operation.kind == SEND:
        return f"message {operation.tag} to {trace.nodes[operation.peer]}, {units.format_size(operation.value)}"
    if operation.kind == RECEIVE:
        waking = f", and up to {units.format_time(operation.value)} to wake up" if operation.value else ""
        return f"message {operation.tag} from {trace.nodes[operation.peer]}{waking}"
    return f"event {operation.tag}" + (f" until it is {operation.value}" if operation.kind == WAIT else "")
