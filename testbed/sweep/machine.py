"""One measurement at a time on a machine: two at once would spoil each other's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from testbed import paths, results
from testbed.errors import UserError


@contextmanager
def machine() -> Iterator[None]:
    """Hold the machine. UserError when another testbed holds it."""
    folder = results.make_folder(paths.cache_folder(), "set XDG_CACHE_HOME to a folder of yours")
    lock = FileLock(folder / "machine.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            "another testbed is measuring on this machine; two at once would spoil each other's numbers"
        ) from None
    try:
        paths.give_to_user(folder / "machine.lock")
        yield
    finally:
        lock.release()
