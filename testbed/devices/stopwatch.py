"""Times work on a device until the device has finished it, and codecs with it. Needs torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from testbed.codecs.contract import Context
from testbed.codecs.make import make
from testbed.codecs.wrap import works_on_devices
from testbed.message_key import Direction, MessageKey

_WARM_UP = 3
"""First repetitions, which are not counted."""
_FEWEST, _MOST = 8, 200
"""Minimum and maximum repetitions, with those."""


class DeviceStopwatch:
    """A clock for the work of one device: CUDA events on its stream, or `perf_counter` on the CPU."""

    def __init__(self, device: str) -> None:
        """`device` is cpu or cuda."""
        self._device = device

    def time(self, work: Callable[[], Any]) -> tuple[int, Any]:
        """Return how long some work takes, in nanoseconds, and its result. The device is idle before and after."""
        if self._device == "cpu":
            begin_ns, result = time.perf_counter_ns(), work()
            return time.perf_counter_ns() - begin_ns, result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        begin.record()
        result = work()
        end.record()
        end.synchronize()
        return round(begin.elapsed_time(end) * 1e6), result

    def medians(self, once: Callable[[], dict[str, int]], seconds: float) -> dict[str, int]:
        """Repeat until `seconds` have passed and return the medians of the times that `once` returns by name."""
        taken, until_s = list[dict[str, int]](), time.monotonic() + seconds
        while len(taken) < _FEWEST or (len(taken) < _MOST and time.monotonic() < until_s):
            taken.append(once())
        return {name: round(statistics.median(times[name] for times in taken[_WARM_UP:])) for name in taken[0]}

    def codec(self, text: str, direction: Direction, shape: Sequence[int], seconds: float) -> dict[str, Any]:
        """Time a codec on normal values; return the medians of encode and decode in ns, and whether the values are
        copied to the CPU and back. Errors of the codec pass through.
        """
        sender, receiver = (make(text, Context(0, 0, direction)) for _ in range(2))
        copied, steps = not works_on_devices(sender), 0
        x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(0)).to(self._device)

        def once() -> dict[str, int]:
            nonlocal steps
            key, steps = MessageKey("train", steps, 0, tuple(range(shape[0]))), steps + 1
            encode_ns, payload = self.time(lambda: sender.encode(x.cpu() if copied else x, key))
            decode_ns, _ = self.time(lambda: receiver.decode(payload, key).to(self._device))
            return {"encode_ns": encode_ns, "decode_ns": decode_ns}

        return {"codec": text, "direction": direction, "copied": copied, **self.medians(once, seconds)}
