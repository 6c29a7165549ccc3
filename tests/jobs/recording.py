"""An observer that keeps what it is told."""

from __future__ import annotations

from typing import Any

from testbed.jobs.loop import Lane


class Recording:
    """Keeps what ended: (node, lane, action, value, begin, end)."""

    def __init__(self) -> None:
        self.done: list[tuple[int, str, Any, Any, int, int]] = []

    def did(self, lane: Lane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        self.done.append((lane.node, lane.name, action, value, begin_ns, end_ns))

    def of(self, kind: type) -> list[tuple[int, str, Any, Any, int, int]]:
        return [each for each in self.done if isinstance(each[2], kind)]
