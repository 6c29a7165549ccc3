"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Container, Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Container[str] = ()) -> str:
    """A line a row; the columns named in `right` are aligned to the right."""
    rule = ["---:" if heading in right else "---" for heading in headings]
    return "".join(f"| {' | '.join(line)} |\n" for line in (headings, rule, *rows))
