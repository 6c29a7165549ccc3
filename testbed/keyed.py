"""Keys for random numbers that depend only on their purpose."""

from __future__ import annotations

import hashlib


def key(purpose: str, size_bytes: int = 16) -> int:
    """Return a number of `size_bytes` bytes that is unique to `purpose` and the same on every machine.

    It is the BLAKE2b digest of `purpose`, little-endian.
    """
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=size_bytes).digest(), "little")
