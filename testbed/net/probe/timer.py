"""Sleeping, and how much longer it took than asked: what the host did to the probe while it measured."""

from __future__ import annotations

import time

BUCKETS = 64


class Timer:
    """Counts every sleep by its lateness, in the relay's own buckets (see `testbed.net.relay.lateness_percentile`)."""

    def __init__(self) -> None:
        self.lateness = [0] * BUCKETS
        """Element k: sleeps that ended less than 2**k us, and no less than half that, after they should have."""

    def sleep(self, seconds: float) -> None:
        due = time.monotonic_ns() + round(seconds * 1e9)
        time.sleep(seconds)
        self.lateness[(max(0, time.monotonic_ns() - due) // 1000).bit_length()] += 1
