"""What the kit found, one record a check and direction, and how a check says it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from testbed.message_key import Direction

Verdict = Literal["PASS", "FAIL", "-"]


class Finding(NamedTuple):
    """One check of one direction."""

    check: str
    direction: Direction
    verdict: Verdict
    """'-': the check has nothing to ask of this codec; the detail says why."""
    detail: str


class Broken(Exception):
    """Raised by a check: what was asked and what was seen instead."""


class NothingToAsk(Exception):
    """Raised by a check that does not apply; says why."""


def require(condition: bool, otherwise: str) -> None:
    """Broken unless the condition holds."""
    if not condition:
        raise Broken(otherwise)
