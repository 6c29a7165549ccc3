"""What a person wrote of a page whose tables are generated."""

from testbed.report import blocks


def outside_blocks(page: str, where: str) -> str:
    """Return the handwritten parts of a page. SpecError as in `parse_blocks`."""
    return "\n".join(text for name, text in blocks._parts(page, where) if not name)
