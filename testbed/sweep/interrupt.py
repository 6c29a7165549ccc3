"""Handles Ctrl-C during a sweep: the first one lets work of a few seconds finish, the second stops everything."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

from testbed.closing import Closing

MESSAGE = "finishing the running step; press Ctrl-C again to stop at once"


class Interrupt(Closing):
    """Takes over SIGINT in the main thread; a context manager. Raises KeyboardInterrupt as usual, except while
    `patient`.
    """

    asked: bool
    """Whether a Ctrl-C is pending: code under `patient` polls this, ends soon, and then raises KeyboardInterrupt."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` prints a line for the user who pressed Ctrl-C."""
        self._say = say
        self._patient = self.asked = False
        self._previous: signal._HANDLER = None

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Record the first Ctrl-C in this block, and raise the second."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self._patient:
            raise KeyboardInterrupt
        self.asked = True
        self._say(MESSAGE)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to no other thread
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def close(self) -> None:
        """Restore the previous handler of SIGINT."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
