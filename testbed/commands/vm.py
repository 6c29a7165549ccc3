"""The guest kernel's command."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from testbed import vm as guest
from testbed.commands.console import need_clock_kernel, say
from testbed.errors import SpecError


def vm(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="What to run inside.", show_default=False)
    ] = None,
    build: Annotated[
        bool, typer.Option("--build", help="Build the guest kernel if it is not here (some minutes, once).")
    ] = False,
    kernel: Annotated[
        Path | None, typer.Option("--kernel", help="Take the guest kernel from this file, for good.")
    ] = None,
    export: Annotated[Path | None, typer.Option("--export", help="Write the guest kernel to this file (2 MB).")] = None,
    virtual_clock: Annotated[
        bool,
        typer.Option("--virtual-clock", help="Time stands still while programs compute, and jumps when all sleep."),
    ] = False,
    memory: Annotated[str, typer.Option(help="Memory of the guest.")] = "4G",
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds after which the guest is stopped; exit status 124.")
    ] = None,
    share: Annotated[
        list[Path], typer.Option(help="A folder that the guest may write to; the current one always is.")
    ] = [],  # noqa: B006
) -> None:
    """Run a command in a guest kernel that has sch_netem; files, output and exit status are carried over.

    Needs no root.
    """
    if kernel is not None and build:
        raise SpecError("--kernel takes a kernel that was built elsewhere, --build builds one here; choose one of them")
    if not (command or build or kernel or export):
        raise SpecError("nothing to do; write -- and a command to run in the guest, or give --build or --kernel")
    if kernel is not None:
        taken = guest.import_kernel(kernel)
        say(f"Linux {taken.version} with a virtual clock is in {taken.folder}")
    elif build:
        _build()
    if export is not None:
        guest.export_kernel(need_clock_kernel(), export)
        say(f"{export}: {export.stat().st_size / 1e6:.2f} MB")
    if not command:
        return
    with guest.start_guest(
        need_clock_kernel(), command, memory=memory, time_limit_s=time_limit, share=share, virtual_clock=virtual_clock
    ) as running:
        raise typer.Exit(running.wait())


def _build() -> None:
    known = guest.find_clock_kernel()
    kernel = known or guest.build_kernel(say=say)
    started = time.monotonic()
    guest.try_kernel(kernel)
    say(
        f"Linux {kernel.version} with a virtual clock {'was here already' if known else 'was built'}; it boots, runs "
        f"`true` and ends in {time.monotonic() - started:.1f} s"
    )
