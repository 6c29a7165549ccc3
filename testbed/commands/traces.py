"""The `trace` commands. A trace records what a job's nodes do: print, draw, export, import or join traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from testbed import paths, units
from testbed.commands.console import print_table, say, writing
from testbed.errors import SpecError, UserError
from testbed.player.split import repeated
from testbed.player.steady import extended
from testbed.trace import totals
from testbed.trace.check import load_trace
from testbed.trace.format import KINDS, RECEIVE, SEND, WAIT, WORK, Operation, Trace
from testbed.trace.played import Played, PlayedLane, read_played
from testbed.trace.simulate import simulate, step_ends

app = typer.Typer(
    help="Show, draw, export, import and join traces of jobs: work, sends and waits of every node (docs/traces.md).",
    no_args_is_help=True,
)
_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Recordings of an observed job or of torch.profiler.")]
_TraceArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A trace.")]
_MOST_ROWS = 16
"""Maximum number of lanes, and of node pairs, printed."""
_MOST_OPERATIONS = 300_000
"""Maximum number of operations simulated for the step time; more would take seconds."""
_SUFFIXES = ("png", "svg", "pdf")


@app.command()
def show(
    file: _TraceArgument,
    step: Annotated[int | None, typer.Option(help="Print the operations of this step, one per line.")] = None,
) -> None:
    """Print a trace's lanes, and the work and traffic of a step."""
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
        _print_simulated(trace)
    return None


@app.command()
def draw(
    file: _TraceArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help=f"Picture to write, as {', '.join(_SUFFIXES)}.")],
    step: Annotated[int, typer.Option(help="First step to draw.")] = 0,
    steps: Annotated[int, typer.Option(help="Number of steps to draw.", min=1)] = 1,
    played: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Played times, as `testbed play -o` writes them.")
    ] = None,
) -> None:
    """Draw a trace as a Gantt chart, with its played times or as if messages took no time."""
    from testbed.report import style
    from testbed.report.trace_chart import trace_chart

    if output.suffix[1:] not in _SUFFIXES:
        raise UserError(f"cannot draw to {output}: the file name must end in .{', .'.join(_SUFFIXES)}")
    trace, how, when = load_trace(file), "if messages take no time", None
    if played is not None:
        when = read_played(played)
        trace = repeated(trace, max(1, -(-when.steps // max(1, trace.steps))))  # as `play --repeat` does
        how = f"over {_links(when)}, on the {when.clock} clock"
    _check_step(trace, step, str(file))
    last = min(step + steps, trace.steps)
    lanes = simulate(trace, last) if when is None else _as_played(trace, when, last, str(played))
    with writing("the picture", output), style.applied():
        drawing = trace_chart(trace, lanes, step, last, how, str(played or file))
        drawing.figure.savefig(output)
    say(f"{drawing.title}. {drawing.caption} -> {output}")


@app.command("export")
def export_chakra(
    file: _TraceArgument,
    output: Annotated[Path, typer.Option("-o", "--output", dir_okay=False, help="For NAME.0.et, NAME.1.et, ...")],
) -> None:
    """Write a trace as Chakra execution traces for ASTRA-sim, one file per node."""
    from testbed.trace.chakra import save_chakra

    trace = load_trace(file)
    with writing("the Chakra trace", output):
        written = save_chakra(trace, output)
    for path in written:
        paths.give_to_user(path)
    say(f"{len(written)} files: {written[0]} to {written[-1].name}")


@app.command("import")
def import_chakra(
    file: Annotated[Path, typer.Argument(metavar="NAME.et", dir_okay=False, help="For NAME.0.et, NAME.1.et, ...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Trace to write.")],
    flops: Annotated[str | None, typer.Option(help="NPU speed, e.g. 10TFLOP/s, if durations are missing.")] = None,
) -> None:
    """Convert Chakra execution traces to a trace: compute, sends, receives, and collectives as messages."""
    from testbed.trace.chakra import load_chakra

    _write(load_chakra(file, flops_per_s=units.parse_flops(flops) if flops else None), output)


@app.command("join")
def join_ranks(
    folder: _Folder,
    output: Annotated[Path, typer.Option("-o", "--output", help="Trace to write.")],
) -> None:
    """Convert the recording or profiles of a PyTorch job to a trace, with the messages that gloo sends."""
    from testbed.trace.join_ranks import join
    from testbed.trace.observations import read_observations

    _write(join(read_observations(folder)), output)


@app.command()
def observed(
    folder: _Folder,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the timeline to this file, for Perfetto.")
    ] = None,
) -> None:
    """Print the operations of an observed or profiled PyTorch job with their costs; write a timeline for Perfetto."""
    from testbed.trace.observations import read_observations, timeline, totals

    job = read_observations(folder)
    rows = [
        (
            total.what + " (sent)" * (total.level > 0),
            f"{total.operations:,}",
            units.format_size(total.payload_bytes),
            "?" if total.wire_bytes is None else units.format_size(total.wire_bytes),
            units.format_time(total.time_ns),
            units.format_time(total.waited_ns),
        )
        for total in totals(job)
    ]
    headings = ("operation", "count", "tensor bytes", "wire bytes", "total time", "waiting time")
    say(f"{folder}: {len(job)} ranks, {len(job[0].steps)} steps")
    print_table(headings, rows, right=headings[1:])
    if output is not None:
        from testbed.export.perfetto import write_observed

        with writing("the timeline", output):
            write_observed(timeline(job), output)


def _write(trace: Trace, output: Path) -> None:
    with writing("the trace", output):
        trace.write(output)
    show(output)


def _as_played(trace: Trace, played: Played, steps: int, where: str) -> tuple[PlayedLane, ...]:
    """Return the played times of the first steps. SpecError if they belong to another trace or to fewer steps."""
    if [len(lane.begin_ns) for lane in played.lanes] != [lane.starts[played.steps] for lane in trace.lanes]:
        raise SpecError(f"{where} was played from another trace: its lanes or their operations differ")
    if steps > played.steps and played.steady is None:
        raise SpecError(f"cannot draw step {steps - 1}: {where} has {played.steps} steps, counted from 0")
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
    """Print the first rows, whose third column is a number, and the count of the others."""
    print_table(headings, rows[:_MOST_ROWS], right=headings[2:3])
    if len(rows) > _MOST_ROWS:
        say(f"... and {len(rows) - _MOST_ROWS} more {what}")


def _print_simulated(trace: Trace) -> None:
    operations = sum(map(len, trace.lanes))
    steps = max(1, min(trace.steps, _MOST_OPERATIONS * trace.steps // max(operations, 1)))
    last = step_ends(trace, simulate(trace, steps), steps)[-1]
    say(f"a step takes {units.format_time(last / steps)} if messages take no time (mean of the first {steps})")


def _print_step(trace: Trace, step: int) -> None:
    rows = []
    for lane in trace.lanes:
        for number, operation in enumerate(lane.operations(step)):
            what = (KINDS[operation.kind], trace.labels[operation.label], _words(trace, operation))
            rows.append((trace.nodes[lane.node], lane.name, str(number), *what))
    print_table(("node", "lane", "number", "operation", "label", "what"), rows, right=("number",))


def _words(trace: Trace, operation: Operation) -> str:
    """Describe an operation: its duration, or its message and peer."""
    if operation.kind == WORK:
        return units.format_time(operation.value)
    if operation.kind == SEND:
        return f"message {operation.tag} to {trace.nodes[operation.peer]}, {units.format_size(operation.value)}"
    if operation.kind == RECEIVE:
        waking = f", plus up to {units.format_time(operation.value)} to wake up" if operation.value else ""
        return f"message {operation.tag} from {trace.nodes[operation.peer]}{waking}"
    return f"event {operation.tag}" + (f" until it is {operation.value}" if operation.kind == WAIT else "")
