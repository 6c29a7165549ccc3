"""Anonymous network namespaces: held by a file descriptor of this process and by nothing else.

No name under /run/netns, no mount, no parked process: when the controller dies, however it dies, the kernel closes the
descriptor and the namespace, its devices and its qdiscs are gone. (Named namespaces outlive a kill -9.)
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from testbed.closing import Closing
from testbed.errors import CapabilityError, LabError

NEW_NETWORK, NEW_USER = 0x40000000, 0x10000000
"""The kinds of namespaces that labs use: CLONE_NEWNET and CLONE_NEWUSER."""
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kinds: int) -> None:
    """Move the calling thread into new namespaces of these kinds. OSError where that is refused."""
    if _libc.unshare(kinds) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def enter(descriptor: int, kind: int = NEW_NETWORK) -> None:
    """Move the calling thread into the namespace of this kind that a descriptor holds. OSError where that is refused.

    It stays there. Sockets opened before stay where they are.
    """
    if _libc.setns(descriptor, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter a namespace of the lab: {os.strerror(number)}")


def _open_current() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


class Namespace(Closing):
    """A network namespace; a context manager that lets go of it."""

    def __init__(self, name: str) -> None:
        """Make a fresh namespace with its loopback still down. `name` is for messages only."""
        self.name = name
        home = _open_current()
        try:
            unshare(NEW_NETWORK)
            try:
                self.fd = _open_current()
            finally:
                enter(home)
        except PermissionError:
            raise CapabilityError(
                f"cannot make a network namespace for {name}: not permitted; run as root (sudo python -m testbed ...)"
            ) from None
        except OSError as error:
            raise LabError(f"cannot make a network namespace for {name}: {error.strerror}") from None
        finally:
            os.close(home)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Keep the calling thread inside.

        Sockets and devices opened meanwhile, and children started, belong to it for good.
        """
        home = _open_current()
        try:
            enter(self.fd)
            try:
                yield
            finally:
                enter(home)
        finally:
            os.close(home)

    def close(self) -> None:
        """Let go; the namespace ends with the last process or socket inside it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
