"""What must be known about a codec wherever its name stands in a report, and what it wraps: from its text alone."""

from __future__ import annotations

import functools

from testbed.codecs.catalogue import placement
from testbed.codecs.catalogue.placement import Placement
from testbed.errors import UserError

CONTROL = "negative control"
MEASURES = "goes by what it measures of its link"
_FIRST_KIND = {"delta-int8": "int8"}
"""A codec that is a wrapper by another name."""


@functools.cache
def _read(codec: str) -> Placement | None:
    # A result may be older than the table, or of a class that is not at hand.
    try:
        return placement.parse_placement(codec)
    except UserError:
        return None


def remark(codec: str) -> str:
    """Return what must be said about a codec; for most that is nothing."""
    chosen = _read(codec)
    if chosen is None:
        return ""
    return CONTROL if chosen.control else MEASURES if chosen.measures else ""


def labelled(codec: str) -> str:
    """Return the codec's name for a legend."""
    return f"{codec} ({CONTROL})" if remark(codec) == CONTROL else codec


def in_model(codec: str) -> bool:
    """Say whether a codec changes the model."""
    chosen = _read(codec)
    return chosen is not None and any(part.row.hook for spec in chosen.specs() for part in spec.parts())


def wrapped_codecs(codec: str) -> set[str]:
    """Return the texts of the codecs that it wraps in both directions."""
    chosen = _read(codec)
    if chosen is None:
        return set()
    wrapped = [{part.text for part in spec.parts()} - {spec.text} for spec in chosen.specs()]
    return set.intersection(*wrapped) | {kind for name, kind in _FIRST_KIND.items() if name == codec}


def taken(codec: str, boundary: int, direction: str, choice: str) -> str:
    """Return the text of the codec that a choice (see `records.SentRecord`) stands for, or the choice's own name."""
    chosen = _read(codec)
    if chosen is None:
        return choice
    spec = chosen.at(boundary, "forward" if direction == "forward" else "backward")
    for part in spec.parts():
        for name, value in part.arguments:
            if part.row.measures and name == choice and not isinstance(value, int | float | str):
                return value.text
    return choice
