"""The command that draws what stands in Markdown from the tables that it describes.

A page is drawn whole, or it is written by hand with drawn parts between two comments, `<!-- drawn: NAME -->` and
`<!-- drawn: end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from testbed import paths
from testbed.commands.console import out
from testbed.errors import UserError

ROOT = Path(__file__).parents[2]
"""The checkout; an installed package has no pages."""
_PART = re.compile(r"(<!-- drawn: (?!end)(?P<name>[\w-]+) -->\n).*?(<!-- drawn: end -->\n)", re.DOTALL)


def docs(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; name the pages that are stale, with exit status 1.")
    ] = False,
) -> None:
    """Draw the pages and tables that stand in Markdown: of profiles, devices, exported tables and codecs."""
    stale = stale_pages()
    for path, text in stale.items():
        if not check:
            path.write_text(text, encoding="utf8")
            paths.give_to_user(path)
        out.print(f"{path.relative_to(ROOT)} {'is stale' if check else 'drawn'}", highlight=False, soft_wrap=True)
    if not stale:
        out.print("every page is as it is drawn")
    elif check:
        out.print("python -m testbed docs draws them", highlight=False)
        raise typer.Exit(1)


def stale_pages() -> dict[Path, str]:
    """Return the pages that differ from what is drawn, each with its new text. UserError where there is no checkout."""
    if not (ROOT / "pyproject.toml").is_file():
        raise UserError(f"{ROOT} is no checkout of testbed, so it has no pages to draw")
    drawn = {ROOT / path: draw() for path, draw in _whole_pages().items()}
    for path in _pages_with_parts():
        drawn[path] = fill_parts(path.read_text(encoding="utf8"), _parts(), str(path.relative_to(ROOT)))
    return {path: text for path, text in drawn.items() if not path.is_file() or path.read_text(encoding="utf8") != text}


def fill_parts(page: str, parts: Mapping[str, Callable[[], str]], name: str) -> str:
    """Return a page's text with its drawn parts drawn anew. UserError for a part that is not known."""

    def draw(match: re.Match[str]) -> str:
        if match["name"] not in parts:
            raise UserError(f"{name} has a part {match['name']!r}, which is not drawn; known: {', '.join(parts)}")
        return f"{match[1]}{parts[match['name']]()}{match[3]}"

    return _PART.sub(draw, page)


def _whole_pages() -> Mapping[str, Callable[[], str]]:
    from testbed.devices.devices_page import draw_devices_page
    from testbed.export import draw_export_page
    from testbed.profiles.profiles_page import draw_profiles_page

    return {
        "netem_profiles/README.md": lambda: draw_profiles_page(ROOT / "netem_profiles"),
        "testbed/devices/README.md": draw_devices_page,
        "testbed/export/README.md": draw_export_page,
    }


def _parts() -> Mapping[str, Callable[[], str]]:
    from testbed.codecs.catalogue.codecs_page import draw_codec_table, draw_folder_table

    return {"codecs": draw_codec_table, "codec-folders": draw_folder_table}


def _pages_with_parts() -> list[Path]:
    pages = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("testbed/**/README.md"),
        *ROOT.glob("experiments/**/README.md"),
    ]
    return sorted(page for page in pages if _PART.search(page.read_text(encoding="utf8")))
