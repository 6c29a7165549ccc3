"""An observer that keeps what it is told, and links on which every message takes as long."""

from __future__ import annotations

from typing import Any

from testbed.jobs import loop


class Recording:
    """Keeps what ended: (node, lane, action, value, begin, end)."""

    def __init__(self) -> None:
        self.done: list[tuple[int, str, Any, Any, int, int]] = []

    def did(self, lane: loop.Lane, action: Any, value: Any, begin_ns: int, end_ns: int) -> None:
        self.done.append((lane.node, lane.name, action, value, begin_ns, end_ns))

    def of(self, kind: type) -> list[tuple[int, str, Any, Any, int, int]]:
        return [each for each in self.done if isinstance(each[2], kind)]


class DelayedLinks(loop.NoLinks):
    """Every message takes as long."""

    def __init__(self, delay_ns: int) -> None:
        self.delay_ns = delay_ns

    def carry(self, clock: loop.Clock, source: int, target: int, size: int, deliver: Any) -> None:
        clock.at(clock.now_ns + self.delay_ns, deliver)
