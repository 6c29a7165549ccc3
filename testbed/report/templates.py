"""Writes pages atomically, from the templates in html/, with style and script inlined."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from testbed import paths


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "html"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def write_page(page: Path, template: str, **values: Any) -> Path:
    """Render `html/TEMPLATE.html.j2` to a file in an existing folder; a reader sees the old page or the new one."""
    text = _environment().get_template(f"{template}.html.j2").render(values)
    paths.write_atomically(page, text)
    return page
