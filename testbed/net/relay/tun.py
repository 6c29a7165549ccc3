"""TUN devices: network interfaces whose packets a program reads and writes as bytes."""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from testbed.errors import CapabilityError, LabError

_TUNSETIFF = 0x400454CA
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
QUEUE_PACKETS = 10_000
"""Queue length of the device. A sender may write a whole TCP window at once, and only the emulated queue may drop."""


def open_tun(name: str) -> int:
    """Create the TUN device `name`, still down, in the calling thread's network namespace; returns its file descriptor.

    Non-blocking, no packet-information header, one IP packet per read and per write. The caller that sets it up sets
    its queue to QUEUE_PACKETS by netlink, because the ioctl is refused in a user namespace. The device ends when its
    last descriptor is closed. CapabilityError where this machine or user cannot; LabError for other failures.
    """
    try:
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CapabilityError(
            f"cannot create the TUN device {name}: cannot open /dev/net/tun ({error.strerror}); run as root on a "
            "kernel with TUN (modprobe tun; in a container: --device /dev/net/tun)"
        ) from None
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EPERM:
            raise CapabilityError(
                f"cannot create the TUN device {name}: not permitted; run as root (CAP_NET_ADMIN)"
            ) from None
        raise LabError(f"cannot create the TUN device {name}: {error.strerror}") from None
    return fd
