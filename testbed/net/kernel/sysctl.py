"""Kernel parameters of a network namespace: written, read back, compared.

`/proc/sys/net` shows the namespace of the opening thread, so callers must be inside: `with namespace.entered(): ...`.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from testbed.errors import CapabilityError, ShapingError

_LARGEST = 4096
_AVAILABLE = "net.ipv4.tcp_available_congestion_control"


def _open(name: str, flags: int) -> int:
    return os.open(f"/proc/sys/{name.replace('.', '/')}", flags | os.O_CLOEXEC)


def _held(descriptor: int) -> str:
    return " ".join(os.pread(descriptor, _LARGEST, 0).decode("ascii").split())


def read_parameter(name: str) -> str | None:
    """Read a parameter's value, with single spaces; None if this kernel lacks the parameter."""
    try:
        descriptor = _open(name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        return _held(descriptor)
    finally:
        os.close(descriptor)


def set_parameter(name: str, value: str) -> str:
    """Set a parameter and return the value read back.

    ShapingError when it differs, CapabilityError when it cannot be set.
    """
    try:
        descriptor = _open(name, os.O_RDWR)
        try:
            os.pwrite(descriptor, f"{value}\n".encode("ascii"), 0)
            held = _held(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.EROFS):
            raise CapabilityError(
                f"cannot set {name} = {value}: {error.strerror}; run as root, on a machine (or in a container started "
                "with --privileged) with a writable /proc/sys"
            ) from None
        if error.errno == errno.ENOENT and read_parameter(name) is None:
            raise CapabilityError(f"cannot set {name} = {value}: this kernel has no such parameter") from None
        raise ShapingError(f"cannot set {name} = {value}: {error.strerror}") from None
    if held != " ".join(value.split()):
        raise ShapingError(f"requested {name} = {value}, the kernel has {held}")
    return held


def set_parameters(values: Mapping[str, str]) -> dict[str, str]:
    """Set several parameters, in order, and return the values read back. Errors as for `set_parameter`."""
    return {name: set_parameter(name, value) for name, value in values.items()}


def switch_ipv6_off() -> dict[str, str]:
    """Disable IPv6, so that no router solicitation crosses a link; returns an empty mapping on kernels without IPv6."""
    if not Path("/proc/sys/net/ipv6").is_dir():
        return {}
    return set_parameters({f"net.ipv6.conf.{scope}.disable_ipv6": "1" for scope in ("all", "default")})


def require_congestion_control(algorithm: str) -> None:
    """Check that TCP has a congestion control, loading its module if needed. CapabilityError if it is missing.

    Labs set it in their routes, which accept any available algorithm. A namespace's default does not: namespaces other
    than the first may only use those in `tcp_allowed_congestion_control` (where the default is bbr, not even cubic is
    allowed).
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm.encode())  # also loads the module
        except FileNotFoundError:
            raise CapabilityError(
                f"this kernel has no congestion control {algorithm!r}; it has: {read_parameter(_AVAILABLE)}. "
                f"Load it (modprobe tcp_{algorithm}) or choose another in the profile"
            ) from None
        except PermissionError:
            raise CapabilityError(f"not permitted to use congestion control {algorithm!r}; run as root") from None
