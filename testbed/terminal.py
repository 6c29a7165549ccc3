"""The console that every command prints through, so that no string from a file controls a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from testbed.errors import printable


class Terminal(Console):
    """A console without markup and emoji codes, which prints control characters as escapes. Styles are set by
    arguments and `Text`.
    """

    def __init__(self, **options: Any) -> None:
        """Takes the options of rich's console."""
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text, escaped before it is measured and laid out."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Lay out a renderable; a `Text` is escaped here, after it was measured."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))
