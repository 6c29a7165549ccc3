"""Generated blocks of a Markdown page: the lines between `<!-- generated: NAME -->` and `<!-- end -->`.

The rest of the page is written by hand. Each comment is on a separate line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from testbed import paths
from testbed.errors import SpecError

_BEGIN = re.compile(r"<!-- generated: (?P<name>[\w-]+) -->")
_END = "<!-- end -->"


def parse_blocks(page: str, where: str) -> dict[str, str]:
    """Return the text of each block of a page by its name, without its final line break.

    SpecError, naming `where`, for a block that is not closed, is nested, or has a duplicate name.
    """
    return {name: text for name, text in _parts(page, where) if name}


def fill_blocks(page: str, blocks: Mapping[str, str], where: str) -> str:
    """Return a page with the text of its blocks replaced. SpecError for a block that `blocks` lacks, and as in
    `parse_blocks`.

    Further entries of `blocks` are ignored; `write_blocks` rejects them.
    """
    if missing := [name for name in parse_blocks(page, where) if name not in blocks]:
        raise SpecError(
            f"{where} has the block {missing[0]!r}, but no program generates it; known: {', '.join(sorted(blocks))}"
        )
    if bad := [name for name, text in blocks.items() if any(map(_is_mark, text.split("\n")))]:
        raise ValueError(f"block {bad[0]!r} contains a line that begins or ends a block")
    lines = []
    for name, text in _parts(page, where):
        body = blocks[name].strip("\n") if name else text
        lines += [f"<!-- generated: {name} -->", *([body] if body else []), _END] if name else [body]
    return "\n".join(lines)


def read_blocks(readme: Path) -> dict[str, str]:
    """Return the text of each block of a file by its name. SpecError as in `parse_blocks`."""
    return parse_blocks(readme.read_text(encoding="utf8"), str(readme))


def write_blocks(readme: Path, blocks: Mapping[str, str]) -> None:
    """Write the blocks to a file, which must have exactly these blocks. SpecError otherwise."""
    page = readme.read_text(encoding="utf8")
    filled = fill_blocks(page, blocks, str(readme))
    if absent := blocks.keys() - parse_blocks(page, str(readme)).keys():
        name = min(absent)
        raise SpecError(f"{readme} has no block {name!r}; add the lines <!-- generated: {name} --> and {_END}")
    if filled != page:
        readme.write_text(filled, encoding="utf8")
        paths.give_to_user(readme)


def _parts(page: str, where: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a page's parts in order; the name of a handwritten part is empty."""
    name, lines, seen = "", list[str](), set[str]()
    for number, line in enumerate(page.split("\n"), 1):
        begin = _BEGIN.fullmatch(line)
        if begin is None and line != _END:
            lines.append(line)
            continue
        if (begin is None) == (not name):
            fault = f"the block {name!r} is not closed before this one" if begin else "no block is open here"
            raise SpecError(f"{where}, line {number}: {fault}")
        if begin is not None and begin["name"] in seen:
            raise SpecError(f"{where}, line {number}: there are two blocks {begin['name']!r}")
        if name or lines:
            yield name, "\n".join(lines)
        name, lines = begin["name"] if begin else "", []
        seen.add(name)
    if name:
        raise SpecError(f"{where}: the block {name!r} is not closed by {_END}")
    if lines:
        yield "", "\n".join(lines)


def _is_mark(line: str) -> bool:
    return line == _END or _BEGIN.fullmatch(line) is not None
