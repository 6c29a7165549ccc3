"""Ctrl-C while a sweep runs: once, what can be finished in seconds is finished; twice, everything stops at once."""

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
    """Takes SIGINT over, in the main thread of a program; a context manager. It is raised as ever, but not while
    `patient`.
    """

    asked: bool
    """Whether there was a Ctrl-C that was not raised: who is patient looks, ends soon, and raises KeyboardInterrupt
    then."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """`say` tells the person who pressed it what happens."""
        self._say = say
        self._patient = self.asked = False
        self._previous: signal._HANDLER = None

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Note the first Ctrl-C in here, and raise the second."""
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
        if threading.current_thread() is threading.main_thread():  # elsewhere Python gives no signals
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def close(self) -> None:
        """Give SIGINT back."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
