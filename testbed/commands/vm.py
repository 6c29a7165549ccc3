"""The guest kernel's command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from testbed.errors import UserError


def vm(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What to run inside.")],
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Get the guest kernel first if it is not here (38 MB).")
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
    from testbed import vm as guest

    kernel = guest.fetch_kernel() if fetch else guest.find_kernel()
    if kernel is None:
        raise UserError(
            "there is no guest kernel yet; get it (38 MB from Debian's packages) with: python -m testbed vm --fetch "
            "-- COMMAND"
        )
    raise typer.Exit(guest.run_in_guest(kernel, command, memory=memory, time_limit_s=time_limit, share=share))
