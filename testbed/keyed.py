"""Keys for random numbers that depend on nothing but what they are for."""

from __future__ import annotations

import hashlib


def key(purpose: str, size_bytes: int = 16) -> int:
    """Return a number of `size_bytes` bytes that differs whenever `purpose` does, on every machine the same.

    It is BLAKE2b's digest, little-endian.
    """
    return int.from_bytes(hashlib.blake2b(purpose.encode(), digest_size=size_bytes).digest(), "little")
