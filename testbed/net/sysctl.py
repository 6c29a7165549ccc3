"""Kernel parameters of a network namespace: written, read back, compared.

`/proc/sys/net` shows the namespace of the thread that opens it, so callers stand inside: `with namespace.entered(): ...`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from testbed.errors import CapabilityError, ShapingError

_ROOT = Path("/proc/sys")
_ALLOWED = "net.ipv4.tcp_allowed_congestion_control"
_AVAILABLE = "net.ipv4.tcp_available_congestion_control"


def _path(name: str) -> Path:
    return _ROOT / name.replace(".", "/")


def read(name: str) -> str | None:
    """A parameter's value with single spaces, or None where this kernel has no such parameter."""
    try:
        return " ".join(_path(name).read_text(encoding="ascii").split())
    except FileNotFoundError:
        return None


def write(name: str, value: str) -> str:
    """Set a parameter and return what was read back. ShapingError when that differs, CapabilityError when it may not be set."""
    try:
        _path(name).write_text(value + "\n", encoding="ascii")
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.EROFS):
            raise CapabilityError(
                f"cannot set {name} = {value}: {error.strerror}; run as root, on a machine (or in a container started with "
                "--privileged) whose /proc/sys can be written"
            ) from None
        if error.errno == errno.ENOENT and not _path(name).exists():
            raise CapabilityError(f"cannot set {name} = {value}: this kernel has no such parameter") from None
        raise ShapingError(f"cannot set {name} = {value}: {error.strerror}") from None
    found = read(name)
    if found != " ".join(value.split()):
        raise ShapingError(f"asked for {name} = {value}, the kernel has {found}")
    return found


def apply(values: Mapping[str, str]) -> dict[str, str]:
    """Set several parameters, in order; what was read back."""
    return {name: write(name, value) for name, value in values.items()}


def without_ipv6() -> dict[str, str]:
    """Switch IPv6 off, so that no router solicitation crosses a link; empty where the kernel has none."""
    names = [f"net.ipv6.conf.{scope}.disable_ipv6" for scope in ("all", "default")]
    return apply({name: "1" for name in names if read(name) is not None})


@contextmanager
def congestion_control_allowed(algorithm: str) -> Iterator[None]:
    """While this is open, namespaces may choose `algorithm` as their default; call from the initial namespace.

    The kernel lets other namespaces choose from `tcp_allowed_congestion_control` only (on a machine whose default is bbr, not
    even cubic is there). The old list is restored at once; sockets and namespaces keep what they chose. CapabilityError for an
    algorithm that this kernel has not, or a list that cannot be changed from here.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())  # also loads the module
        except FileNotFoundError:
            raise CapabilityError(
                f"this kernel has no congestion control {algorithm!r}; it has: {read(_AVAILABLE)}. "
                f"Load it (modprobe tcp_{algorithm}) or choose another in the profile"
            ) from None
        except PermissionError:
            raise CapabilityError(f"not permitted to use congestion control {algorithm!r}; run as root") from None
    if not _path(_ALLOWED).exists():
        # A container: the list belongs to the host's namespace. What is allowed there works; what is not, `write` will say.
        yield
        return
    lock = os.open(_path(_ALLOWED), os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # or two labs built at the same moment would restore each other's list
        before = (read(_ALLOWED) or "").split()
        if algorithm in before:
            yield
            return
        _allow([*before, algorithm])
        try:
            yield
        finally:
            _allow(before)
    finally:
        os.close(lock)


def _allow(algorithms: list[str]) -> None:
    attempt = f"{_ALLOWED}={' '.join(algorithms)}"
    try:
        _path(_ALLOWED).write_text(" ".join(algorithms) + "\n", encoding="ascii")
    except OSError as error:
        raise CapabilityError(f'cannot set {attempt}: {error.strerror}; on the host, as root: sysctl -w "{attempt}"') from None
    if set((read(_ALLOWED) or "").split()) != set(algorithms):  # the kernel has an order of its own
        raise ShapingError(f"asked for {attempt}, the kernel has {read(_ALLOWED)}")


def set_congestion_control(algorithm: str) -> dict[str, str]:
    """Make `algorithm` the default of the calling thread's namespace; open `congestion_control_allowed` around it."""
    name = "net.ipv4.tcp_congestion_control"
    try:
        return {name: write(name, algorithm)}
    except CapabilityError as error:
        raise CapabilityError(
            f"{error}; or allow it on the host: sysctl -w {_ALLOWED}=... with {algorithm} in the list"
        ) from None
