"""What holds something until it is closed: `with` closes it."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Base of a context manager whose `close` undoes what it holds."""

    def close(self) -> None:
        """Give up what is held. Safe to call twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
