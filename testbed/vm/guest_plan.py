"""The plan of a guest: the orders of `guest` to `init`. The guest's kernel loads it before any process runs.

It is an initial RAM disk, which the kernel exposes as a file. Data from a pipe would arrive at a time chosen by the
host: the clock of a virtual guest advances while it waits for the host.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SHOWN_AT = Path("/sys/firmware/initrd")
_HEADER_BYTES = 110  # cpio, "newc": a magic number and thirteen fields of eight hexadecimal digits
_NAME = "plan"
_REGULAR_FILE = 0o100600


def archive(plan: Mapping[str, Any]) -> bytes:
    """Return a plan as a cpio archive that holds one file; the kernel reports anything that is not an archive."""
    return _entry(_NAME, json.dumps(plan).encode(), _REGULAR_FILE) + _entry("TRAILER!!!", b"", 0)


def parse_archive(data: bytes) -> dict[str, Any]:
    """Return the plan that `archive` packed."""
    size, name_bytes = (int(data[start : start + 8], 16) for start in (54, 94))
    start = _aligned(_HEADER_BYTES + name_bytes)
    plan: dict[str, Any] = json.loads(data[start : start + size])
    return plan


def receive() -> dict[str, Any]:
    """Return the plan of the guest that this process runs in; /sys must be mounted."""
    return parse_archive(_SHOWN_AT.read_bytes())


def _entry(name: str, content: bytes, mode: int) -> bytes:
    fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + "".join(f"{field:08x}" for field in fields).encode() + name.encode() + b"\0"
    return head.ljust(_aligned(len(head)), b"\0") + content.ljust(_aligned(len(content)), b"\0")


def _aligned(size: int) -> int:
    return -(-size // 4) * 4
