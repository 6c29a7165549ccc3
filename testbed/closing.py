"""Base class of objects with a `close` method that `with` calls."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """Base of a context manager whose `close` releases its resources."""

    def close(self) -> None:
        """Release all resources. Safe to call twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
