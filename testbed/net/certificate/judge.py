"""What a link should have shown, from its profile, against what the probe read: pure functions from Readings to Measurements.

packets.py and stream.py judge, expect.py holds the arithmetic, fitness.py what the host did meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator

from testbed.net.certificate.packets import PacketVerdicts
from testbed.net.certificate.stream import StreamVerdicts
from testbed.net.probe import WAYS
from testbed.records import Measurement

__all__ = ["Judge"]


class Judge(PacketVerdicts, StreamVerdicts):
    """One link's readings as measurements."""

    def measurements(self) -> Iterator[Measurement]:
        """Of a link that holds still."""
        yield self.rtt()
        for way in WAYS:
            pipe = self._profile.pipe(way)
            if pipe is not None:
                yield from self.light(way, pipe)
                yield from self.overload(way, pipe)
            yield from self.stream(way, pipe)

    def varying(self, started_ns: int) -> Iterator[Measurement]:
        """Of a link that was played from `started_ns`, CLOCK_MONOTONIC."""
        for way in WAYS:
            pipe = self._profile.pipe(way)
            if pipe is not None and pipe.varies:
                yield self.schedule(way, pipe, started_ns)
