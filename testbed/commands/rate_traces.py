"""Commands about rate traces, which are lists of delivery opportunities: make one, convert one, look at one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed import units
from testbed.commands.console import say, writing
from testbed.errors import SpecError
from testbed.profiles import trace, trace_sources

app = typer.Typer(
    help="Rate traces, which a link's rate can follow (mahimahi's format): make one, convert one, look at one.",
    no_args_is_help=True,
)
OutputFlag = Annotated[Path, typer.Option("-o", "--output", help="File to write.")]


@app.command()
def generate(
    kind: Annotated[
        str,
        typer.Argument(
            help="How the rate moves: " + "; ".join(f"{k}: {v.what}" for k, v in trace_sources.KINDS.items())
        ),
    ],
    seed: Annotated[int, typer.Option(help="Same seed, same trace, on every machine.")],
    seconds: Annotated[int, typer.Option(help="Its length.")],
    mean_rate: Annotated[str, typer.Option(help="What it carries on average, e.g. 12Mbit.")],
    output: OutputFlag,
) -> None:
    """Make a trace from a seed."""
    recipe = trace_sources.checked_recipe(
        "rate-trace generate", kind=kind, seed=seed, seconds=seconds, mean_rate=mean_rate
    )
    _write(recipe.make(), output)


@app.command("convert")
def convert_csv(
    csv: Annotated[
        Path, typer.Argument(help="A CSV file with a header; each row's rate holds until the next row's time.")
    ],
    time_column: Annotated[str, typer.Option(help="Name of the column of times.")],
    rate_column: Annotated[str, typer.Option(help="Name of the column of rates.")],
    time_unit: Annotated[str, typer.Option(help=f"One of {', '.join(trace_sources.TIME_UNITS_MS)}.")],
    rate_unit: Annotated[str, typer.Option(help=f"One of {', '.join(trace_sources.RATE_UNITS_BPS)}.")],
    output: OutputFlag,
) -> None:
    """Make a trace from a CSV file of rates, in a time's and a rate's unit that you state."""
    try:
        text = csv.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SpecError(f"cannot read {csv}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{csv} is not UTF-8 text") from None
    columns = {"time_column": time_column, "rate_column": rate_column, "time_unit": time_unit, "rate_unit": rate_unit}
    _write(trace_sources.trace_from_csv(text, str(csv), **columns), output)


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A rate trace.")]) -> None:
    """Say how long a trace is, what it carries, and its slowest and fastest second."""
    _tell(file, trace.read_trace(file).times)


def _write(times: tuple[int, ...], output: Path) -> None:
    with writing("the trace", output):
        output.write_text(trace.format_trace(times), encoding="ascii")
    _tell(output, times)


def _tell(file: Path, times: tuple[int, ...]) -> None:
    seconds = trace.bin_rates(times, 1000)
    whole = seconds[: max(1, times[-1] // 1000)]  # the rest of a second says little
    say(
        f"{file}: {times[-1] / 1000:g} s, {len(times):,} packets of {trace.OPPORTUNITY_BYTES} bytes, "
        f"{units.format_rate(trace.mean_rate_bps(times))} on average; "
        f"slowest second {units.format_rate(min(whole))}, fastest {units.format_rate(max(whole))}"
    )
