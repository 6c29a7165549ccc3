"""What a test goes on with only where it is there."""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value")


def known(value: Value | None) -> Value:
    """Return what must not be missing."""
    assert value is not None
    return value
