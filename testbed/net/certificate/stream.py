"""TCP, judged: messages after idle, and goodput."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from testbed.net.certificate import expect
from testbed.net.certificate.verdict import Verdicts
from testbed.net.probe import Way
from testbed.profiles import Pipe
from testbed.records import Measurement

_MESSAGE_TOLERANCE = 0.03
_MESSAGE_TOLERANCE_MS = 0.5
"""After a pause sender, relay and receiver must each be woken before they work: 0.2 to 0.35 ms, on a virtual machine."""
_GOODPUT_TOLERANCE = 0.01


class StreamVerdicts(Verdicts):
    """Of one link."""

    def stream(self, way: Way, pipe: Pipe | None) -> Iterator[Measurement]:
        sizes = sorted({message.size for message in self._readings.messages if message.way == way})
        for size in sizes:
            yield self._message(way, pipe, size)
        if not sizes and "stream" in self._readings.faults:
            yield self._make(
                "message", way, "ms", expected=None, measured=None, tolerance=None, samples=0, phase="stream"
            )
        for bulk in self._readings.bulk:
            if bulk.way == way and bulk.span_ns:
                yield self._goodput(way, pipe, bulk.size * 8e9 / bulk.span_ns, bulk.span_ns / 1e9)

    def _left_to_tcp(self, pipe: Pipe) -> str | None:
        """Why TCP's time is not the link's alone; None where it is. Acknowledgements come back through the other pipe."""
        pipes = [pipe for pipe in (self._profile.up, self._profile.down) if pipe]
        if any(pipe.loss for pipe in pipes):
            return "retransmission"
        if any(pipe.reorder or pipe.jitter_reorders for pipe in pipes):
            return "what TCP makes of reordered packets"
        if any(pipe.duplicate for pipe in pipes):
            return "what TCP makes of copies"
        if expect.outgrown(self._profile, pipe):
            return f"what {self._profile.congestion_control} makes of a buffer smaller than rate times round trip"
        return None

    def _message(self, way: Way, pipe: Pipe | None, size: int) -> Measurement:
        readings, profile = self._readings, self._profile
        found = [message for message in readings.messages if message.way == way and message.size == size]
        expected = tolerance = None
        remarks: list[str] = []
        why: list[str] = []
        if pipe is None:
            remarks.append("unshaped")
        else:
            expected = expect.message_ms(profile, pipe, size, readings.packet_payload_bytes)
            # Jitter holds the first packets up, and with them the wire; the rest follows at the rate.
            tolerance = max(_MESSAGE_TOLERANCE_MS, _MESSAGE_TOLERANCE * expected) + 2 * pipe.jitter_ns / 1e6
            if reason := self._left_to_tcp(pipe):
                tolerance = None
                remarks.append(f"information: {reason} is part of the link that was asked for")
            elif profile.slow_start_after_idle and profile.congestion_control != "bbr":
                tolerance = None
                remarks.append("information: slow start after idle is part of the link that was asked for")
            # Both directions' delays, for the window is freed by acknowledgements.
            needed = pipe.rate_bps * sum(p.delay_ns for p in (profile.up, profile.down) if p) / 8e9
            if readings.window_bytes.get(way, 0) < needed:
                why.append(
                    f"the congestion window stayed at {readings.window_bytes.get(way, 0)} bytes, the link needs {needed:.0f}"
                )
            if retransmits := sum(message.retransmits for message in found):
                why.append(f"{retransmits} packets were sent again")
        return self._make(
            "message",
            way,
            "ms",
            detail=f"{size} bytes after idle, {profile.congestion_control}",
            expected=expected,
            measured=median(message.elapsed_ns for message in found) / 1e6,
            tolerance=tolerance,
            samples=len(found),
            phase="stream",
            remarks=tuple(remarks),
            why=tuple(why),
        )

    def _goodput(self, way: Way, pipe: Pipe | None, found: float, seconds: float) -> Measurement:
        expected = tolerance = None
        remark = "unshaped"
        if pipe is not None:
            expected = expect.goodput_bps(self._profile, pipe, self._readings.packet_payload_bytes)
            reason = self._left_to_tcp(pipe)
            tolerance = _GOODPUT_TOLERANCE * expected if reason is None else None
            remark = f"information: {reason} is part of the link that was asked for" if reason else ""
        return self._make(
            "goodput",
            way,
            "bit/s",
            detail=f"TCP {self._profile.congestion_control} over {seconds:.1f} s",
            expected=expected,
            measured=found,
            tolerance=tolerance,
            samples=1,
            phase="stream",
            remarks=(remark,) if remark else (),
        )
