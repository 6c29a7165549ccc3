"""What the commands share: the two consoles, the look of a table, flags, and the choice of an engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table

from testbed.profiles import LinkProfile, buffer_remark
from testbed.spec import Clock, Engine, Topology

_WHOLE = 10_000
"""Columns of what is not a terminal: a table has lines as long as it needs there, so that nothing of it is cut."""
out = Console(width=None if sys.stdout.isatty() else _WHOLE)
err = Console(stderr=True)

EngineFlag = Annotated[str, typer.Option(help="netem, relay, or auto: netem where it works when tried, else relay.")]
ClockFlag = Annotated[
    str,
    typer.Option(
        help="Of played cells, and of live ones whose codec_cost is zero: virtual (exact), real, or auto: virtual "
        "where that is possible."
    ),
]
TimingFlag = Annotated[
    str,
    typer.Option(help="played: trained once, then played over each network; live: stages train over their links."),
]
ResultsFlag = Annotated[Path, typer.Option(help="Folder that results are written to.")]
SetFlag = Annotated[
    list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Change a field or an axis, e.g. training.steps=20.")
]
OnlyFlag = Annotated[
    list[str],
    typer.Option("--only", metavar="FIELD=VALUE", help="Only cells that have it, e.g. codec=int8."),
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


def typed(*arguments: str) -> list[str]:
    """Return a command of this program as words for a shell."""
    return ["python", "-m", "testbed", *arguments]


def warn_of_buffers(networks: Iterable[tuple[Topology, Iterable[LinkProfile]]]) -> None:
    """Print which links have a smaller buffer than they need, because nobody stated one."""
    paths: dict[int, list[LinkProfile]] = {}
    for topology, profiles in networks:
        paths.setdefault(2 if topology == "star" else 1, []).extend(profiles)
    for links_in_path, profiles in paths.items():
        if (remark := buffer_remark(profiles, links_in_path)) is not None:
            out.print(remark, markup=False, highlight=False, soft_wrap=True)


def choose_engine(engine: str) -> tuple[Engine, str]:
    """Choose the engine and say why.

    From here on an ordinary user is in a user namespace where the machine allows it.
    """
    from testbed.errors import UnknownNameError
    from testbed.net.machine import capabilities, rootless

    if os.geteuid() != 0:
        rootless.enter()
    if engine not in ("auto", "netem", "relay"):
        raise UnknownNameError("engine", engine, ("auto", "netem", "relay"))
    return capabilities.resolve_engine(engine)  # type: ignore[arg-type]


def choose_clock(clock: str) -> tuple[Clock, str]:
    """Choose the clock of played cells and say why: virtual where the guest kernel is at hand or can be built.

    CapabilityError, which says what to do, where `virtual` was asked for and is not possible.
    """
    from testbed import vm
    from testbed.errors import CapabilityError, GuestKernelError, UnknownNameError

    if clock not in ("auto", "virtual", "real"):
        raise UnknownNameError("clock", clock, ("auto", "virtual", "real"))
    if clock == "real":
        return "real", "asked for"
    try:
        reason = vm.virtual_clock()
    except (CapabilityError, GuestKernelError) as error:
        if clock == "virtual":
            raise
        return "real", f"auto: the virtual clock is not possible here: {error}"
    return "virtual", f"{'asked for' if clock == 'virtual' else 'auto'}: {reason}"
