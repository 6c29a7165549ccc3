"""`python -m testbed.codecs.check CODEC`: the table of the kit, and exit status 1 where something failed.

A program of its own, so that the command line needs no torch, and torch has one thread.
"""

from __future__ import annotations

import sys

import torch
from rich.console import Console
from rich.table import Table

from testbed.codecs.check.suite import check
from testbed.errors import TestbedError


def main(text: str) -> int:
    """Print the table as it comes, and say how many passed."""
    console = Console(width=None if sys.stdout.isatty() else 150)
    torch.set_num_threads(1)
    try:
        found = list(check(text))
    except TestbedError as error:
        print(f"testbed: error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_status
    rows = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("check", "direction", "", "what was seen"):
        rows.add_column(heading, no_wrap=heading != "what was seen")
    for one in found:
        style = {"FAIL": "red", "-": "dim"}.get(one.verdict, "")
        rows.add_row(one.check, one.direction, one.verdict, one.detail.replace("[", r"\["), style=style)
    console.print(rows)
    failed = sum(one.verdict == "FAIL" for one in found)
    asked = sum(one.verdict != "-" for one in found)
    console.print(f"{text}: {asked - failed} of {asked} checks passed", highlight=False, markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m testbed.codecs.check CODEC, for example 'int8' or 'package.module:Class'")
    sys.exit(main(sys.argv[1]))
