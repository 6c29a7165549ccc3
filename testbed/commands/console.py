"""What the commands share: flags, printing of lines and tables, writing of files, the choice of engine and clock."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table

from testbed import paths, vm
from testbed.errors import CapabilityError, GuestKernelError, UnknownNameError, UserError
from testbed.frozen import explain
from testbed.profiles import LinkProfile, buffer_remark
from testbed.spec import Clock, Engine, Topology

if TYPE_CHECKING:
    from testbed.net.lab import LabSpec

_WHOLE = 10_000
"""Columns of what is not a terminal: a table has lines as long as it needs there, so that nothing of it is cut."""
out = Console(width=None if sys.stdout.isatty() else _WHOLE)
err = Console(stderr=True)

EngineFlag = Annotated[str, typer.Option(help="netem, relay, or auto: netem where it works when tried, else relay.")]
ClockFlag = Annotated[
    str,
    typer.Option(
        help="Of played cells, and of live ones whose codec_cost is zero or whose workers train data "
        "parallel: virtual (exact), real, or auto: virtual where that is possible."
    ),
]
TopologyFlag = Annotated[str, typer.Option(help="star: each node to a hub; line: each node to the next.")]
TimingFlag = Annotated[
    str, typer.Option(help="played: trained once, then played over each network; live: stages train over their links.")
]
ResultsFlag = Annotated[Path, typer.Option(help="Folder that results are written to.")]
SetFlag = Annotated[
    list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Change a field or an axis, e.g. training.steps=20.")
]
OnlyFlag = Annotated[
    list[str], typer.Option("--only", metavar="FIELD=VALUE", help="Only cells that have it, e.g. codec=int8.")
]
ExcludeFlag = Annotated[list[str], typer.Option("--exclude", metavar="FIELD=VALUE", help="No cell that has it.")]
RepeatsFlag = Annotated[int | None, typer.Option(help="Good runs that each cell is to have.")]


class _UnpaddedTable(Table):
    """A table whose lines end where their text does: padded to the longest, short ones would break in a pager."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        drawn = (part for part in super().__rich_console__(console, options) if isinstance(part, Segment))
        for line in Segment.split_lines(drawn):
            while line and not line[-1].text.strip():
                line.pop()
            yield from line[:-1]
            yield from (Segment(part.text.rstrip(), part.style) for part in line[-1:])
            yield Segment.line()


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Make a table of which only the last column gives way on a narrow terminal."""
    drawn = _UnpaddedTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(column, justify="right" if column in right else "left", no_wrap=column != columns[-1])
    return drawn


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print rows under headings; the columns named in `right` are aligned to the right."""
    drawn = table(*headings, right=tuple(right))
    for row in rows:
        drawn.add_row(*row)
    out.print(drawn)


def say(text: str, *, on: Console = out, style: str | None = None) -> None:
    """Print a line as it stands: nothing in it is markup, nothing is highlighted, and a terminal does not break it."""
    on.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def one_of(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise UnknownNameError where a flag's value is none of those that are known; `kind` says what they are."""
    if name not in (names := list(known)):
        raise UnknownNameError(kind, name, names)


def need_clock_kernel() -> vm.GuestKernel:
    """Return the guest kernel with a virtual clock. UserError, which says how to build it, where there is none."""
    if (kernel := vm.find_clock_kernel()) is None:
        raise UserError(
            "there is no kernel with a virtual clock here; build it (some minutes, once) with: python -m testbed vm "
            "--build, or take one that was built elsewhere: python -m testbed vm --kernel FILE"
        )
    return kernel


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Translate what the system says against writing a file, and give the file to the user who called sudo."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {what} to {path}: {error.strerror}") from None
    paths.give_to_user(path)


def lab_spec(asked: str, **fields: Any) -> LabSpec:
    """Return what a lab is to be. SpecError, which says what was asked for, where no lab can be so."""
    from testbed.net.lab import LabSpec

    try:
        return LabSpec(**fields)
    except ValidationError as error:
        raise explain(error, LabSpec, asked) from None


def typed(*arguments: str) -> str:
    """Return a command of this program as a line for a shell."""
    return shlex.join(["python", "-m", "testbed", *arguments])


def warn_of_buffers(networks: Iterable[tuple[Topology, Iterable[LinkProfile]]]) -> None:
    """Print which links have a smaller buffer than they need, because nobody stated one."""
    paths: dict[int, list[LinkProfile]] = {}
    for topology, profiles in networks:
        paths.setdefault(2 if topology == "star" else 1, []).extend(profiles)
    for links_in_path, profiles in paths.items():
        if (remark := buffer_remark(profiles, links_in_path)) is not None:
            say(remark)


def choose_engine(engine: str) -> tuple[Engine, str]:
    """Choose the engine and say why.

    From here on an ordinary user is in a user namespace where the machine allows it.
    """
    from testbed.net.machine import capabilities, rootless

    if os.geteuid() != 0:
        rootless.enter()
    one_of("engine", engine, ("auto", "netem", "relay"))
    return capabilities.resolve_engine(engine)  # type: ignore[arg-type]


def choose_clock(clock: str) -> tuple[Clock, str]:
    """Choose the clock of played cells and say why: virtual where the guest kernel is at hand or can be built.

    CapabilityError, which says what to do, where `virtual` was asked for and is not possible.
    """
    one_of("clock", clock, ("auto", "virtual", "real"))
    if clock == "real":
        return "real", "asked for"
    try:
        reason = vm.virtual_clock()
    except (CapabilityError, GuestKernelError) as error:
        if clock == "virtual":
            raise
        return "real", f"auto: the virtual clock is not possible here: {error}"
    return "virtual", f"{'asked for' if clock == 'virtual' else 'auto'}: {reason}"
