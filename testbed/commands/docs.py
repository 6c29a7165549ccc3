"""The command that generates what stands in Markdown from the tables and CSVs that it describes.

A page is generated whole, or written by hand with generated blocks (testbed/report/blocks.py). Those of an experiment's
README come from its figures.py, and its claims.csv with them.
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
        bool, typer.Option("--check", help="Write nothing; name the pages that are stale, with exit status 1.")
    ] = False,
) -> None:
    """Generate the pages and tables that stand in Markdown: profiles, devices, exported tables, codecs, experiments
    and claims.
    """
    stale = False
    for path, text in stale_pages():
        stale = True
        if not check:
            path.write_text(text, encoding="utf8", newline="")
            paths.give_to_user(path)
        say(f"{path.relative_to(ROOT)} {'is stale' if check else 'generated'}")
    if not stale:
        say("every page is as it is generated")
    elif check:
        say("python -m testbed docs generates them")
        raise typer.Exit(1)


def stale_pages() -> Iterator[tuple[Path, str]]:
    """Yield the pages that differ from what is generated, each with its new text. UserError where there is no checkout.

    Each page is generated when its turn comes, so it counts what was written of those before it: an experiment's
    claims, then its README, then the page of all claims.
    """
    from testbed.report.blocks import fill_blocks, read_blocks

    if not (ROOT / "pyproject.toml").is_file():
        raise UserError(f"{ROOT} is no checkout of testbed, so it has no pages to generate")
    for folder in sorted(path.parent for path in ROOT.glob("experiments/*/figures.py")):
        yield from stale_in_experiment(folder)
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("testbed/**/README.md")]
    for path in sorted(page for page in pages if read_blocks(page)):
        page = path.read_text(encoding="utf8")
        yield from _if_stale(path, fill_blocks(page, _blocks(), str(path.relative_to(ROOT))))
    for name, draw in _whole_pages().items():
        yield from _if_stale(ROOT / name, draw())


def stale_in_experiment(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield claims.csv and README.md of an experiment where they are not what its figures.py makes of its CSVs."""
    from testbed.report import claims, experiments
    from testbed.report.blocks import fill_blocks

    with experiments.figures_program(folder) as figures:
        if hasattr(figures, "claims"):
            yield from _if_stale(folder / claims.FILE, claims.format_claims(figures.claims(folder)))
        if hasattr(figures, "blocks"):
            readme = folder / "README.md"
            page, where = readme.read_text(encoding="utf8"), str(readme.relative_to(ROOT))
            yield from _if_stale(readme, fill_blocks(page, figures.blocks(folder), where))


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
    from testbed.report.claims import FILE, claims_page

    return claims_page(sorted(path.parent for path in ROOT.glob(f"experiments/*/{FILE}")), "../experiments")


def _blocks() -> dict[str, str]:
    from testbed.codecs.catalogue.codecs_page import draw_codec_table, draw_folder_table

    return {"codecs": draw_codec_table(), "codec-folders": draw_folder_table()}
