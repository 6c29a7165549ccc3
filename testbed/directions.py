"""The two directions of a link, as named by profiles, plans, relay, probe, records and reports."""

from __future__ import annotations

from typing import Literal

LinkDirection = Literal["up", "down"]
"""`up` leads from a link's near end, a node, to its far end: the hub of a star, or the next node of a line."""
LINK_DIRECTIONS: tuple[LinkDirection, LinkDirection] = ("up", "down")

EitherOrBoth = Literal[LinkDirection, "both"]
"""Directions covered by a measurement: a round trip covers both."""
