"""The `docs` command: generates Markdown pages and tables from the code's tables and the experiments' CSVs.

A page is generated whole, or written by hand with generated blocks (testbed/report/blocks.py). The blocks of an
experiment's README, and its claims.csv, come from its figures.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from testbed import paths
from testbed.commands.console import say
from testbed.errors import UserError

ROOT = Path(__file__).parents[2]
"""The checkout; an installed package has no pages."""


def docs(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; list the stale pages, with exit status 1 if any.")
    ] = False,
) -> None:
    """Generate the Markdown pages and tables for profiles, devices, exported tables, codecs, experiments and claims."""
    stale = False
    for path, text in stale_pages():
        stale = True
        if not check:
            path.write_text(text, encoding="utf8", newline="")
            paths.give_to_user(path)
        say(f"{path.relative_to(ROOT)} {'is stale' if check else 'generated'}")
    if not stale:
        say("every generated page is up to date")
    elif check:
        say("python -m testbed docs generates them")
        raise typer.Exit(1)


def stale_pages() -> Iterator[tuple[Path, str]]:
    """Yield each page that is out of date, with its new text. UserError outside a checkout.

    Pages are generated lazily, in order of dependency: an experiment's claims, then its README, then the page of all
    claims. The caller writes each one before it asks for the next.
    """
    from testbed.report.blocks import fill_blocks, read_blocks

    if not (ROOT / "pyproject.toml").is_file():
        raise UserError(f"{ROOT} is not a checkout of testbed, so it has no pages to generate; run this in a checkout")
    for folder in sorted(path.parent for path in ROOT.glob("experiments/*/figures.py")):
        yield from stale_in_experiment(folder)
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("testbed/**/README.md")]
    for path in sorted(page for page in pages if read_blocks(page)):
        page = path.read_text(encoding="utf8")
        yield from _if_stale(path, fill_blocks(page, _blocks(), str(path.relative_to(ROOT))))
    for name, draw in _whole_pages().items():
        yield from _if_stale(ROOT / name, draw())


def stale_in_experiment(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield claims.csv and README.md of an experiment if they differ from the output of its figures.py."""
    from testbed.report import claims, publishing
    from testbed.report.blocks import fill_blocks

    with publishing.figures_program(folder) as figures:
        if made := publishing.claims_of(vars(figures), folder):
            yield from _if_stale(folder / claims.FILE, claims.format_claims(made))
        readme = folder / "README.md"
        page, where = readme.read_text(encoding="utf8"), str(readme.relative_to(ROOT))
        yield from _if_stale(readme, fill_blocks(page, publishing.blocks_of(vars(figures), folder), where))


def _if_stale(path: Path, text: str) -> Iterator[tuple[Path, str]]:
    if not path.is_file() or path.read_text(encoding="utf8") != text:
        yield path, text


def _whole_pages() -> Mapping[str, Callable[[], str]]:
    from testbed.devices.devices_page import draw_devices_page
    from testbed.export import draw_export_page
    from testbed.profiles.profiles_page import draw_profiles_page

    return {
        "netem_profiles/README.md": lambda: draw_profiles_page(ROOT / "netem_profiles"),
        "testbed/devices/README.md": draw_devices_page,
        "testbed/export/README.md": draw_export_page,
        "docs/claims.md": _claims_page,
    }


def _claims_page() -> str:
    from testbed.frozen import read_toml
    from testbed.report.claims import FILE, Headline, claims_page

    headlines = map(Headline.model_validate, read_toml(ROOT / "docs" / "headlines.toml")["headline"])
    folders = sorted(path.parent for path in ROOT.glob(f"experiments/*/{FILE}"))
    return claims_page(headlines, folders, "../experiments")


def _blocks() -> dict[str, str]:
    from testbed.codecs.catalogue.codecs_page import draw_codec_table, draw_folder_table
    from testbed.faults import draw_faults_table

    return {"codecs": draw_codec_table(), "codec-folders": draw_folder_table(), "faults": draw_faults_table()}
