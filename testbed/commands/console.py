"""Shared by the commands: flags, printing of lines and tables, writing of files, the choice of engine and clock."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from testbed import paths, vm
from testbed.errors import CapabilityError, GuestKernelError, SpecError, UnknownNameError, UserError, printable
from testbed.frozen import validated
from testbed.profiles import LinkProfile, buffer_remark, load_profile
from testbed.spec import Clock, Engine, Sites, SiteSpec, Topology
from testbed.terminal import Terminal

if TYPE_CHECKING:
    from testbed.net.lab import LabSpec

_WHOLE = 10_000
"""Console width when output is not a terminal, so that no table is cut."""
out = Terminal(width=None if sys.stdout.isatty() else _WHOLE)
err = Terminal(stderr=True)

EngineFlag = Annotated[str, typer.Option(help="netem, relay, or auto: netem if a trial succeeds, otherwise relay.")]
ClockFlag = Annotated[
    str,
    typer.Option(
        help="virtual (exact), real, or auto: virtual where possible. Applies to played cells, and to live cells "
        "that are data parallel or have codec_cost zero."
    ),
]
TopologyFlag = Annotated[
    str, typer.Option(help="star: a link from each node to a hub; line: links between neighbours.")
]
SiteFlag = Annotated[
    list[str],
    typer.Option(
        metavar="PROFILE:NODES",
        help="In a star: nodes behind a router whose link to the hub they share, e.g. cable:0,1.",
    ),
]
TimingFlag = Annotated[
    str, typer.Option(help="played: train once, then play over each network; live: train over the links.")
]
DeviceFlag = Annotated[str, typer.Option(help="Where played cells and live stages are trained: cpu, or cuda, a GPU.")]
ResultsFlag = Annotated[Path, typer.Option(help="Folder for the results.")]
SetFlag = Annotated[
    list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Override a field or an axis, e.g. training.steps=20.")
]
OnlyFlag = Annotated[
    list[str], typer.Option("--only", metavar="FIELD=VALUE", help="Run only cells with this value, e.g. codec=int8.")
]
ExcludeFlag = Annotated[list[str], typer.Option("--exclude", metavar="FIELD=VALUE", help="Skip cells with this value.")]
RepeatsFlag = Annotated[int | None, typer.Option(help="Successful runs per cell; at least 3 over random links.")]


class _UnpaddedTable(Table):
    """A table without trailing spaces: lines padded to the longest one would wrap in a pager."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        drawn = (part for part in super().__rich_console__(console, options) if isinstance(part, Segment))
        for line in Segment.split_lines(drawn):
            while line and not line[-1].text.strip():
                line.pop()
            yield from line[:-1]
            yield from (Segment(part.text.rstrip(), part.style) for part in line[-1:])
            yield Segment.line()


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Make a table whose last column alone wraps on a narrow terminal."""
    drawn = _UnpaddedTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(column, justify="right" if column in right else "left", no_wrap=column != columns[-1])
    return drawn


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Sequence[str] = ()) -> None:
    """Print rows under headings; the columns named in `right` are right-aligned."""
    rows = [*rows]
    texts = [[printable(str(cell)) for cell in row] for row in (headings, *rows)]
    if out.is_terminal or any("\n" in cell or "\t" in cell for row in texts for cell in row):
        drawn = table(*headings, right=tuple(right))
        for row in rows:
            drawn.add_row(*row)
        out.print(drawn)
        return
    # Elsewhere nothing is wrapped or styled, and rich takes a millisecond for a row.
    widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        placed = zip(headings, row, gaps, strict=True)
        parts = (gap + cell if heading in right else cell + gap for heading, cell, gap in placed)
        out.file.write("  ".join(parts).rstrip() + "\n")


def say(text: str, *, on: Console = out, style: str | None = None) -> None:
    """Print a line without highlighting or wrapping."""
    on.print(text, style=style, highlight=False, soft_wrap=True)


def one_of(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise UnknownNameError if a flag's value is not among `known`; `kind` names the values in the message."""
    if name not in (names := list(known)):
        raise UnknownNameError(kind, name, names)


def need_clock_kernel() -> vm.GuestKernel:
    """Return the guest kernel with a virtual clock. UserError if this machine cannot run it."""
    if (kernel := vm.find_clock_kernel()) is None:
        raise UserError("the virtual clock needs a guest kernel, which runs on x86-64 only; use the real clock")
    return kernel


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Translate an OSError while writing a file to UserError, and hand the file to the user who called sudo."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {what} to {path}: {error.strerror}") from None
    paths.give_to_user(path)


def refuse_engine(engine: str, kernel: object | None) -> None:
    """Refuse an engine that the virtual clock, whose kernel this is, does not have."""
    if kernel is not None and engine not in ("auto", "netem"):
        raise UserError(f"--engine {engine}: the virtual clock has netem alone; omit it, or add --clock real")


def lab_spec(asked: str, **fields: Any) -> LabSpec:
    """Return the spec of a lab. SpecError if no lab can satisfy it; `asked` names the request in the message."""
    from testbed.net.lab import LabSpec

    return validated(LabSpec, fields, asked)


def read_sites(texts: Iterable[str]) -> Sites:
    """Return the sites of --site PROFILE:NODES; None without any. SpecError for a malformed one."""
    sites = []
    for text in texts:
        profile, _, nodes = text.rpartition(":")
        if not profile or not re.fullmatch(r"\s*\d{1,9}\s*(,\s*\d{1,9}\s*)*", nodes, re.ASCII):
            raise SpecError(f"--site {text!r} is not PROFILE:NODES; write for example cable:0,1")
        sites.append(SiteSpec(nodes=tuple(map(int, nodes.split(","))), profile=load_profile(profile.strip())))
    return tuple(sites) or None


def typed(*arguments: str) -> str:
    """Return a testbed command as a shell line."""
    return shlex.join(["python", "-m", "testbed", *arguments])


def warn_of_buffers(networks: Iterable[tuple[Topology, Iterable[LinkProfile]]]) -> None:
    """Print a warning for links whose default buffer is smaller than they need."""
    paths: dict[int, list[LinkProfile]] = {}
    for topology, profiles in networks:
        paths.setdefault(2 if topology == "star" else 1, []).extend(profiles)
    for links_in_path, profiles in paths.items():
        if (remark := buffer_remark(profiles, links_in_path)) is not None:
            say(remark)


def choose_engine(engine: str) -> tuple[Engine, str]:
    """Choose the engine; return it with the reason.

    Moves an unprivileged process into a user namespace where the machine allows it.
    """
    from testbed.net.machine import capabilities, rootless

    if os.geteuid() != 0:
        rootless.enter()
    one_of("engine", engine, ("auto", "netem", "relay"))
    return capabilities.resolve_engine(engine)  # type: ignore[arg-type]


def choose_clock(clock: str) -> tuple[Clock, str]:
    """Choose the clock of played cells; return it with the reason. `auto`: virtual if the guest kernel runs here.

    CapabilityError, with a remedy, if `virtual` was requested and is impossible.
    """
    one_of("clock", clock, ("auto", "virtual", "real"))
    if clock == "real":
        return "real", "asked for"
    try:
        reason = vm.virtual_clock()
    except (CapabilityError, GuestKernelError) as error:
        if clock == "virtual":
            raise
        return "real", f"auto: the virtual clock is unavailable here: {error}"
    return "virtual", f"{'asked for' if clock == 'virtual' else 'auto'}: {reason}"
