"""Caveats of a codec, shown wherever its name appears in a report, and the codecs it wraps: from its text alone."""

from __future__ import annotations

import functools

from testbed.codecs.catalogue import placement
from testbed.codecs.catalogue.placement import Placement
from testbed.errors import UserError

CONTROL = "negative control"
MEASURES = "adapts to its link"
_FIRST_KIND = {"delta-int8": "int8"}
"""Codecs that are wrappers under another name."""


@functools.cache
def _read(codec: str) -> Placement | None:
    # A result may be older than the table, or use a class that is not installed.
    try:
        return placement.parse_placement(codec)
    except UserError:
        return None


def remark(codec: str) -> str:
    """Return the caveat of a codec; empty for most."""
    chosen = _read(codec)
    if chosen is None:
        return ""
    return CONTROL if chosen.control else MEASURES if chosen.measures else ""


def labelled(codec: str) -> str:
    """Return the codec's name for a legend."""
    return f"{codec} ({CONTROL})" if remark(codec) == CONTROL else codec


def in_model(codec: str) -> bool:
    """Return whether a codec changes the model."""
    chosen = _read(codec)
    return chosen is not None and any(part.row.hook for spec in chosen.specs() for part in spec.parts())


def wrapped_codecs(codec: str) -> set[str]:
    """Return the texts of the codecs that a codec wraps in both directions."""
    chosen = _read(codec)
    if chosen is None:
        return set()
    wrapped = [{part.text for part in spec.parts()} - {spec.text} for spec in chosen.specs()]
    return set.intersection(*wrapped) | {kind for name, kind in _FIRST_KIND.items() if name == codec}


def taken(codec: str, boundary: int, direction: str, choice: str) -> str:
    """Return the text of the codec that a choice (see `records.SentRecord`) selects, or the name of the choice."""
    chosen = _read(codec)
    if chosen is None:
        return choice
    spec = chosen.at(boundary, "forward" if direction == "forward" else "backward")
    for part in spec.parts():
        for name, value in part.arguments:
            if part.row.measures and name == choice and not isinstance(value, int | float | str):
                return value.text
    return choice
