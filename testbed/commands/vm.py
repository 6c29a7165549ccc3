"""The `vm` command: runs programs in the guest kernel, and builds, imports or exports that kernel."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from testbed import vm as guest
from testbed.commands.console import need_clock_kernel, say
from testbed.errors import SpecError


def vm(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND...", help="Command to run inside.", show_default=False)
    ] = None,
    build: Annotated[
        bool,
        typer.Option("--build", help="Build a guest kernel and use it instead of the bundled one (some minutes)."),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="With --build: rebuild the bundled kernel and compare the bytes."),
    ] = False,
    kernel: Annotated[Path | None, typer.Option("--kernel", help="Install the guest kernel from this file.")] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="With --kernel: install a kernel whose SHA-256 is not the bundled one's.")
    ] = False,
    export: Annotated[Path | None, typer.Option("--export", help="Write the guest kernel to this file (2 MB).")] = None,
    virtual_clock: Annotated[
        bool, typer.Option("--virtual-clock", help="Time stops while programs compute and skips ahead when all sleep.")
    ] = False,
    memory: Annotated[str, typer.Option(help="Memory of the guest.")] = "4G",
    time_limit: Annotated[
        float | None, typer.Option(help="Stop the guest after this many seconds, with exit status 124.")
    ] = None,
    share: Annotated[
        list[Path], typer.Option(help="Folder that the guest may write to, besides the current one.")
    ] = [],  # noqa: B006
) -> None:
    """Run a command in a guest kernel that has sch_netem. Files, output and exit status pass through.

    Needs no root.
    """
    if kernel is not None and build:
        raise SpecError("--kernel installs a kernel built elsewhere, --build builds one here; pass only one of them")
    if verify and not build:
        raise SpecError("--verify needs --build: it rebuilds the bundled kernel and compares the bytes")
    if not (command or build or kernel or export):
        raise SpecError("nothing to do; add -- and a command to run in the guest, or pass --build or --kernel")
    if kernel is not None:
        taken = guest.import_kernel(kernel, approve=partial(_approve, yes=yes))
        say(f"Linux {taken.version} with a virtual clock installed in {taken.folder}")
    elif verify:
        same = guest.verify_kernel(say=say)
        say(f"the rebuilt kernel equals the bundled one: SHA-256 {same.sha256}")
    elif build:
        _build()
    if export is not None:
        exported = need_clock_kernel()
        guest.export_kernel(exported, export)
        say(f"{export}: {export.stat().st_size / 1e6:.2f} MB; SHA-256 of its kernel: {exported.sha256}")
    if not command:
        return
    with guest.start_guest(
        need_clock_kernel(), command, memory=memory, time_limit_s=time_limit, share=share, virtual_clock=virtual_clock
    ) as running:
        raise typer.Exit(running.wait())


def _approve(kernel: guest.GuestKernel, *, yes: bool) -> None:
    """Print the SHA-256 of a kernel to install. SpecError unless it is the bundled one's, or the user agrees."""
    say(f"SHA-256 of its kernel: {kernel.sha256}")
    if guest.is_bundled(kernel):
        return
    say("This is not the bundled kernel: it may be any program, and every virtual run will start it with your rights.")
    if not (yes or (sys.stdin.isatty() and typer.confirm("Install it? Only if its builder published this SHA-256."))):
        raise SpecError(
            "the kernel was not installed: its SHA-256 is not the bundled one's; compare it with the one that the "
            "file's builder published (`testbed vm --export` prints it), then repeat with --yes"
        )


def _build() -> None:
    kernel = guest.build_kernel(say=say)
    started = time.monotonic()
    guest.try_kernel(kernel)
    say(
        f"Linux {kernel.version} with a virtual clock, {kernel.origin}: boots, runs `true` and halts in "
        f"{time.monotonic() - started:.1f} s. To return to the bundled kernel: rm -r {kernel.folder}"
    )
