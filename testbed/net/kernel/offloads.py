"""Disable a device's offloads, so that packets are real: at most the MTU, with valid checksums.

With offloads on, one "packet" between two veth ends can be 64 KB long; delay, loss and queue limits would treat it as
one. Uses the ethtool ioctl directly; call inside the device's namespace.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import socket
import struct
from typing import NamedTuple

from testbed.errors import CapabilityError, LabError, ShapingError

_SIOCETHTOOL = 0x8946
_GSTRINGS, _GSSET_INFO, _GFEATURES, _SFEATURES = 0x1B, 0x37, 0x3A, 0x3B
_FEATURES = 4  # ETH_SS_FEATURES
_NAME_BYTES = 32
_UNREAL = ("segmentation", "gso", "gro", "lro", "checksum", "scatter-gather")
"""Parts of the names of features that merge packets or leave them incomplete."""


def _ioctl(sock: socket.socket, device: str, request: bytes) -> bytes:
    buffer = array.array("B", request)
    address, _ = buffer.buffer_info()
    try:
        fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("@16sP16x", device.encode(), address))
    except OSError as error:
        attempt = f"ethtool command {request[0]:#x} on {device}"
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP):
            raise CapabilityError(f"{attempt}: {error.strerror}; cannot change offloads here; run as root") from None
        raise LabError(f"{attempt}: {os.strerror(error.errno or 0)}") from None
    return buffer.tobytes()


class _Features(NamedTuple):
    """The kernel's table of features, common to all devices."""

    total: int
    unreal: dict[int, str]
    """Features that make packets unreal, by index in the table."""


def _features(sock: socket.socket, device: str) -> _Features:
    info = _ioctl(sock, device, struct.pack("=IIQI", _GSSET_INFO, 0, 1 << _FEATURES, 0))
    (count,) = struct.unpack_from("=I", info, 16)
    table = _ioctl(sock, device, struct.pack("=III", _GSTRINGS, _FEATURES, count) + bytes(count * _NAME_BYTES))[12:]
    names = [table[i * _NAME_BYTES :][:_NAME_BYTES].split(b"\0")[0].decode() for i in range(count)]
    return _Features(count, {i: name for i, name in enumerate(names) if any(part in name for part in _UNREAL)})


def _read(sock: socket.socket, device: str, blocks: int) -> tuple[int, int]:
    """Read bit masks of changeable and of active features."""
    answer = _ioctl(sock, device, struct.pack("=II", _GFEATURES, blocks) + bytes(16 * blocks))
    rows = list(struct.iter_unpack("=4I", answer[8:]))  # available, requested, active, never changed
    changeable = sum((available & ~never) << 32 * block for block, (available, _, _, never) in enumerate(rows))
    return changeable, sum(active << 32 * block for block, (_, _, active, _) in enumerate(rows))


class Offloads:
    """Disables the offloads of several devices; reads the kernel's table of features once."""

    def __init__(self) -> None:
        self._known: _Features | None = None

    def switch_off(self, device: str) -> dict[str, bool]:
        """Disable features that make packets unreal; returns them as read back, all False.

        ShapingError when one stays on, CapabilityError when the caller may not change them.
        """
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            if self._known is None:
                self._known = _features(sock, device)
            total, unreal = self._known
            blocks = -(-total // 32)
            changeable, _ = _read(sock, device, blocks)
            off = changeable & sum(1 << i for i in unreal)
            # (valid, wanted) for each block
            request = b"".join(struct.pack("=II", off >> 32 * block & 0xFFFFFFFF, 0) for block in range(blocks))
            _ioctl(sock, device, struct.pack("=II", _SFEATURES, blocks) + request)
            _, active = _read(sock, device, blocks)
        held = {name: bool(active >> i & 1) for i, name in unreal.items()}
        if still := [name for name, on in held.items() if on]:
            raise ShapingError(f"{device}: requested all offloads off, the kernel keeps {', '.join(still)} on")
        return held
