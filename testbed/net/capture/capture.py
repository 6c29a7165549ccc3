"""Capture the packets at the ends of links in one pcapng file: one interface per end, nanoseconds, first bytes only.

Lost packets are counted, in the file and in `Capture.story`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from testbed.closing import Closing
from testbed.errors import LabError, SpecError
from testbed.process import Child

_PATIENCE_S = 30


class CapturePoint(NamedTuple):
    """Where to capture."""

    name: str
    """The interface's name in the file."""
    namespace_fd: int
    device: str


class Capture(Closing):
    """A running capture, started from the main thread; a context manager that ends it."""

    story: str
    """Summary of captured and lost packets, once it has ended."""

    def __init__(self, path: Path, points: Sequence[CapturePoint]) -> None:
        """Start it, and return once it captures packets.

        LabError when it cannot capture; SpecError for a file that cannot be written.
        """
        self._path, self.story = path, ""
        try:
            file = path.open("wb")
        except OSError as error:
            raise SpecError(f"cannot write the capture {path}: {error.strerror}") from None
        with file:
            self._process = Child(
                "testbed.net.capture",
                {"file": file.fileno(), "points": [point._asdict() for point in points]},
                attempt=f"capture into {path}",
                failure=LabError,
                fds=[file.fileno(), *(point.namespace_fd for point in points)],
            )
        self._process.answer()

    def close(self) -> None:
        """Save the packets seen so far, and end."""
        try:
            counts = self._process.last_answer(_PATIENCE_S)
            self.story = (
                f"captured {counts['kept']} packets in {self._path.name}, {counts['lost']} lost by the capture itself"
            )
        except LabError:
            self.story = f"the capture {self._path.name} ended too early"
        finally:
            self._process.close()
