"""`testbed bench all` and `bench compare`: every benchmark in one file, and two such files side by side."""

from __future__ import annotations

import contextlib
import csv
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from time import monotonic
from typing import Annotated, Any, Final, Literal

import typer
from pydantic import Field, ValidationError

from testbed import paths, results
from testbed.commands.console import print_table, say
from testbed.errors import SpecError, StageError
from testbed.frozen import Frozen, dotted
from testbed.process import run_program

_COMMANDS: Final = (
    *("--help", "plan default", "vm --virtual-clock -- true", "bench clock -o clock"),
    *("bench codecs fp32 int8 blockwise-8 --model gpt2-mini -o codecs", "bench codecs -o codecs"),
    *("sweep default --quick", "report results/default", "bench links -o links", "exec --profile cable -- true"),
    "advise --model gpt2-xl --device a100 --nodes 8 --profile cable --batch 512",
)
_QUICK: Final = 5
"""Number of commands of the short form."""


class Benchmarks(Frozen):
    """The file of `bench all`."""

    format: Literal[1]
    machine: dict[str, Any]
    """The machine before the first measurement, as in a run's environment.json."""
    rows: dict[str, Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], Field(min_length=1)]]
    """What was measured, with its unit; a value per repetition."""


def measure_all(
    output: Annotated[Path, typer.Option("--json", dir_okay=False, help="File of results.")],
    quick: Annotated[bool, typer.Option("--quick", help="Some of each, and nothing on the real clock.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions.")] = 1,
) -> None:
    """Run every benchmark and some commands, and write all numbers and the machine's facts to one file."""
    from testbed.sweep.environment import describe_machine

    results.make_folder(output.absolute().parent, "name another file")
    machine, rows = describe_machine(), dict[str, list[float]]()
    for _ in range(repeats):
        with paths.scratch_folder("testbed-bench-") as folder:
            for name, value in (*_times(folder, _COMMANDS[: _QUICK if quick else None]), *_numbers(folder)):
                rows.setdefault(name, []).append(value)
        results.write_json(output, Benchmarks(format=1, machine=machine, rows=rows))


def _times(folder: Path, commands: Sequence[str]) -> Iterator[tuple[str, float]]:
    for command in commands:
        before, began_s = sum(getrusage(RUSAGE_CHILDREN)[:2]), monotonic()
        # A benchmark whose verdict is FAIL has measured; one that broke has no file to be read.
        with contextlib.suppress(*[StageError] * command.startswith("bench")):
            run_program("testbed", *shlex.split(command), attempt=f"run {command}", failure=StageError, cwd=folder)
        yield f"{command}, s", (took_s := monotonic() - began_s)
        yield f"{command}, processor s", sum(getrusage(RUSAGE_CHILDREN)[:2]) - before
        say(f"{command}: {took_s:.2f} s")


def _numbers(folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the numbers in the files that the benchmarks wrote."""
    from testbed.codecs.bench.measurements import CodecBenchmark
    from testbed.net.certificate.accuracy import Accuracy, readings

    for cost in results.read_json(folder / "codecs", CodecBenchmark).results:
        yield f"codecs: {cost.codec}, {cost.direction} {cost.package}".strip() + ", s", cost.codec_s
    for *what, unit, _, found, _ in list(csv.reader((folder / "clock").open(encoding="utf8")))[1:]:
        yield f"clock: {', '.join(what)}, {unit}", float(found)
    for result in results.read_json(folder / "links", Accuracy).results if (folder / "links").exists() else ():
        for key, (unit, value) in readings(result).items():
            yield f"links: {', '.join((result.point.name, *filter(None, key)))}, {unit}", value


def read_benchmarks(path: Path) -> Benchmarks:
    """Read a file of `bench all`. SpecError if it is damaged or has another format."""
    try:
        return Benchmarks.model_validate_json(path.read_bytes())
    except OSError as error:
        why = str(error.strerror)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        why = f"{dotted(first['loc'])} {first['msg']}"
    raise SpecError(f"cannot read {path} as a file of this version's bench all: {why}; measure again")


def compare(first: Path, second: Path) -> None:
    """Print each row's ratio of medians, with the least and largest ratio of two values, and what else differs."""
    one, other = read_benchmarks(first), read_benchmarks(second)
    for fact in sorted({*one.machine, *other.machine}):
        if one.machine.get(fact) != other.machine.get(fact):
            say(f"{fact}: {one.machine.get(fact)} in the first, {other.machine.get(fact)} in the second")
    rows = [(name, *ratio_words(one.rows.get(name), other.rows.get(name))) for name in {**one.rows, **other.rows}]
    print_table(("what", "first", "second", "second / first"), rows)


def ratio_words(first: Sequence[float] | None, second: Sequence[float] | None) -> tuple[str, str, str]:
    """Return both medians, and their ratio with its spread."""
    if first is None or second is None:
        return "-", "-", f"only in the {'first' if second is None else 'second'}"
    low, middle, high = min(second) / max(first), median(second) / median(first), max(second) / min(first)
    return f"{median(first):.6g}", f"{median(second):.6g}", f"{middle:.3f} ({low:.3f} to {high:.3f})"
