"""Runs the figure program of an experiment: its CSVs, figures, claims.csv and the generated blocks of its README.

Such a program, experiments/NAME/figures.py, ends with `publishing.run(globals())`. It may define

    write(results, output)   writes the CSVs derived from a sweep's results, and figures that need the results
    FIGURES                  figure name -> function that draws it from the folder of the CSVs
    BLOCKS                   name of a generated block of README.md -> function that returns it from that folder: text,
                             or a frame, which becomes a table; the text of the block `answer` is wrapped
    blocks(folder)           the same as one function that returns all of them
    NUMBER(folder, ...)      functions named in rows of claims.toml: see `claim_rows`

All but `write` read only the CSVs of that folder. `run` generates claims.csv and the block `claims` from claims.toml,
and copies published.csv and, for a cells.toml, the cells.csv of the results.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas
from matplotlib.figure import Figure

from testbed import paths
from testbed.errors import SpecError, printable, status_of
from testbed.report import blocks as markdown_blocks
from testbed.report import claim_rows, experiments, predicted, style
from testbed.report import claims as claim_files
from testbed.report.canvas import render_figure

_LARGEST_SVG = 300_000
"""Maximum size of a committed SVG, in bytes."""
_PUBLISHED = "published.csv"
Program = Mapping[str, Any]
"""The globals of a figures.py."""


def run(program: Program) -> None:
    """Write all outputs of a figure program, with the folders of the command line. An error exits with its message."""
    if status := status_of(lambda: _write_all(program)):
        sys.exit(status)


def _write_all(program: Program) -> None:
    folder = Path(program["__file__"]).resolve().parent
    results, output = folders(folder.name, program["__doc__"])
    if (folder / "cells.toml").is_file():
        copy(predicted.FILE, results, output)
    if (folder / _PUBLISHED).is_file():
        copy(_PUBLISHED, folder, output)
    with style.applied():
        if "write" in program:
            program["write"](results, output)
        for name, draw in program.get("FIGURES", {}).items():
            save_figure(draw(output), output, name)
    publish(output, blocks_of(program, output), claims_of(program, output))


def folders(name: str, what: str) -> tuple[Path, Path]:
    """Return (results, output) from the command line of a program of experiments/NAME; `what` is its help."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=Path("results") / name, help="result folder of the sweep (default: %(default)s)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("experiments") / name, help="folder for the output (%(default)s)"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    return arguments.results, arguments.output


def copy(name: str, source: Path, target: Path) -> None:
    """Copy a file into another folder; does nothing if it is the same. FileNotFoundError without the file."""
    (target / name).write_bytes((source / name).read_bytes())


def claims_of(program: Program, folder: Path) -> list[claim_files.Claim]:
    """Return the claims for which a folder's CSVs have numbers; none without a claims.toml next to the program.

    SpecError as from `claim_rows.claims`.
    """
    return claim_rows.claims(program, folder) if _has_claims(program) else []


def _has_claims(program: Program) -> bool:
    return Path(program["__file__"]).with_name(claim_rows.FILE).is_file()


def blocks_of(program: Program, folder: Path) -> dict[str, str]:
    """Return the generated blocks of the README, from the CSVs of a folder."""
    every = {name: block(folder) for name, block in program.get("BLOCKS", {}).items()}
    every |= program["blocks"](folder) if "blocks" in program else {}
    made = {
        name: experiments.markdown_of(block) if isinstance(block, pandas.DataFrame) else block
        for name, block in every.items()
    }
    if "answer" in made:
        made["answer"] = experiments.prose(made["answer"])
    if _has_claims(program):
        made["claims"] = claim_files.claims_table(claims_of(program, folder))
    return made


def publish(folder: Path, blocks: Mapping[str, str], claims: Iterable[claim_files.Claim] = ()) -> None:
    """Write claims.csv, update the blocks of the folder's README.md if it exists, and print them.

    SpecError if the README lacks a block or has another one.
    """
    if rows := list(claims):
        claim_files.write_claims(folder / claim_files.FILE, rows)
    readme = folder / "README.md"
    if readme.is_file():
        markdown_blocks.write_blocks(readme, blocks)
    sys.stdout.write(printable("\n\n".join(blocks.values())) + "\n")


@contextmanager
def figures_program(folder: Path) -> Iterator[ModuleType]:
    """Import experiments/NAME/figures.py temporarily, with its sibling modules. FileNotFoundError without one,
    SpecError in a process that sudo made root.
    """
    path, before = folder / "figures.py", set(sys.modules)
    if paths.invoking_user() is not None:
        raise SpecError(f"cannot import {path}: sudo would run it as root; run without sudo")
    specification = importlib.util.spec_from_file_location(f"figures of {folder.name}", path)
    assert specification is not None
    assert specification.loader is not None
    sys.path.insert(0, str(folder))
    try:
        module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - before:  # another experiment's module may have the same name
            if str(getattr(sys.modules[name], "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png, and NAME.svg if that is small, into an existing folder.

    The same figure gives the same bytes.
    """
    png, svg = (folder / f"{name}.{kind}" for kind in ("png", "svg"))
    with style.applied():
        png.write_bytes(render_figure(figure, "png", style.PAPER))
        drawn = render_figure(figure, "svg", style.PAPER)
    if len(drawn) > _LARGEST_SVG:
        svg.unlink(missing_ok=True)
        return [png]
    svg.write_bytes(drawn)
    return [png, svg]
