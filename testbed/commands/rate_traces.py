"""The `rate-trace` commands. A rate trace is a list of delivery opportunities: generate, convert or show one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed import units
from testbed.commands.console import say, writing
from testbed.errors import SpecError
from testbed.profiles import rate_trace, trace_sources

app = typer.Typer(
    help="Generate, convert and show rate traces, which a link's rate can follow (mahimahi's format).",
    no_args_is_help=True,
)
OutputFlag = Annotated[Path, typer.Option("-o", "--output", help="File to write.")]


@app.command()
def generate(
    kind: Annotated[
        str, typer.Argument(help="Rate model. " + "; ".join(f"{k}: {v.what}" for k, v in trace_sources.KINDS.items()))
    ],
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same trace on every machine.")],
    seconds: Annotated[int, typer.Option(help="Length of the trace.")],
    mean_rate: Annotated[str, typer.Option(help="Average rate, e.g. 12Mbit.")],
    output: OutputFlag,
) -> None:
    """Generate a rate trace from a seed."""
    recipe = trace_sources.checked_recipe(
        "rate-trace generate", kind=kind, seed=seed, seconds=seconds, mean_rate=mean_rate
    )
    _write(recipe.make(), output)


@app.command("convert")
def convert_csv(
    csv: Annotated[
        Path, typer.Argument(help="CSV file with a header; each row's rate holds until the next row's time.")
    ],
    time_column: Annotated[str, typer.Option(help="Name of the column of times.")],
    rate_column: Annotated[str, typer.Option(help="Name of the column of rates.")],
    time_unit: Annotated[str, typer.Option(help=f"One of {', '.join(trace_sources.TIME_UNITS_MS)}.")],
    rate_unit: Annotated[str, typer.Option(help=f"One of {', '.join(trace_sources.RATE_UNITS_BPS)}.")],
    output: OutputFlag,
) -> None:
    """Convert a CSV file of times and rates, in the units that you state, to a rate trace."""
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
    """Print a rate trace's length, average rate, and slowest and fastest second."""
    _tell(file, rate_trace.read_trace(file).times)


def _write(times: tuple[int, ...], output: Path) -> None:
    with writing("the trace", output):
        output.write_text(rate_trace.format_trace(times), encoding="ascii")
    _tell(output, times)


def _tell(file: Path, times: tuple[int, ...]) -> None:
    seconds = rate_trace.bin_rates(times, 1000)
    whole = seconds[: max(1, times[-1] // 1000)]  # without the incomplete last second
    say(
        f"{file}: {times[-1] / 1000:g} s, {len(times):,} packets of {rate_trace.OPPORTUNITY_BYTES} bytes, "
        f"{units.format_rate(rate_trace.mean_rate_bps(times))} on average; "
        f"slowest second {units.format_rate(min(whole))}, fastest {units.format_rate(max(whole))}"
    )
