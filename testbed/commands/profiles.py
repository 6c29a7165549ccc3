"""Commands about link profiles."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from testbed import profiles
from testbed.commands.console import out, say
from testbed.errors import UserError
from testbed.profiles.link_profile import LinkProfile
from testbed.profiles.profiles_page import profile_line

_WIDE = 110
"""Minimum terminal width for the columns loss, varies and TCP."""

_WORDS = ("profile", "varies", "TCP")


def list_profiles(
    name: Annotated[
        str | None, typer.Argument(help="Profile to show in full: its name, or the path of its file.")
    ] = None,
    change: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. up.rate=40Mbit.")
    ] = [],  # noqa: B006
) -> None:
    """List the link profiles, or print one as a complete profile file with every default resolved."""
    if name is not None:
        shown = profiles.load_profile(name, change)
        say(f"# {shown.name}\n{profiles.write_profile(shown)}".rstrip("\n"))
    elif change:
        raise UserError("--set changes one profile; name it: python -m testbed profiles NAME --set up.rate=40Mbit")
    else:
        out.print(
            profile_table([profiles.load_profile(known) for known in sorted(profiles.profile_files())], out.width)
        )
        say("python -m testbed profiles NAME shows one in full.")


def profile_table(listed: list[LinkProfile], width: int) -> Table:
    """Make a table with one line per profile. A narrow terminal gets fewer columns and a truncated last one."""
    columns = ["profile", "Mbit/s up", "down", "RTT ms"] + (["loss %", "varies", "TCP"] if width >= _WIDE else [])
    lines = [profile_line(profile) for profile in listed]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        widest = max(len(told[place]) for told in [columns, *lines])  # rich would otherwise cut all columns alike
        table.add_column(column, justify="left" if column in _WORDS else "right", no_wrap=True, min_width=widest)
    table.add_column("description", no_wrap=True)
    for told in lines:
        table.add_row(*map(Text, told[: len(columns)]), Text(told.summary, no_wrap=True, overflow="ellipsis"))
    return table
