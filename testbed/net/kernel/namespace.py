"""Anonymous network namespaces, held only by a file descriptor of this process.

There is no name under /run/netns, no mount and no parked process: when the controller dies, in any way, the kernel
closes the descriptor and removes the namespace with its devices and qdiscs. (Named namespaces outlive a kill -9.)
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from testbed.closing import Closing
from testbed.errors import CapabilityError, LabError

NEW_NETWORK, NEW_USER, NEW_PROCESSES, NEW_MOUNTS = 0x40000000, 0x10000000, 0x20000000, 0x00020000
NEW_HOSTNAME = 0x04000000
"""Kinds of namespaces that labs use: CLONE_NEWNET, _NEWUSER, _NEWPID, _NEWNS and _NEWUTS."""
_HOSTNAME = "/proc/thread-self/ns/uts"
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kinds: int) -> None:
    """Move the calling thread into new namespaces of these kinds. OSError where the kernel refuses."""
    if _libc.unshare(kinds) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def enter(descriptor: int, kind: int = NEW_NETWORK) -> None:
    """Move the calling thread into a descriptor's namespace of this kind. OSError where the kernel refuses.

    The move is permanent. Sockets opened before keep their namespace.
    """
    if _libc.setns(descriptor, kind) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot enter a namespace of the lab: {os.strerror(number)}")


def _open_current() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


class Hostname(Closing):
    """A UTS namespace with its own hostname; a context manager that releases it."""

    def __init__(self, name: str) -> None:
        """Create it. OSError where the kernel refuses."""
        with _staying_at_home():
            unshare(NEW_HOSTNAME)
            socket.sethostname(name)
            self.fd = os.open(_HOSTNAME, os.O_RDONLY | os.O_CLOEXEC)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Keep the calling thread inside; children started meanwhile stay in it permanently."""
        with _staying_at_home():
            enter(self.fd, NEW_HOSTNAME)
            yield

    def close(self) -> None:
        """Release it; the namespace ends with the last process inside."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@contextmanager
def _staying_at_home() -> Iterator[None]:
    """Restore the calling thread's own hostname on exit."""
    home = os.open(_HOSTNAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        enter(home, NEW_HOSTNAME)
        os.close(home)


class Namespace(Closing):
    """A network namespace; a context manager that releases it."""

    def __init__(self, name: str) -> None:
        """Create a namespace, with its loopback still down. `name` only appears in error messages."""
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
                f"cannot make a network namespace for {name}: not permitted; run as root (sudo .venv/bin/testbed ...)"
            ) from None
        except OSError as error:
            raise LabError(f"cannot make a network namespace for {name}: {error.strerror}") from None
        finally:
            os.close(home)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the namespace with the calling thread.

        Sockets and devices opened, and children started, inside belong to it permanently.
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
        """Release it; the namespace ends with the last process or socket inside it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
