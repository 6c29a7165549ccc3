"""Somebody sets the machine's clock while a trace is played: no measured time moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.player.play_in_guest import play_job
from testbed.player.play_job import PlayJob
from testbed.trace.synthetic import pipeline_trace
from tests.labs import lab_spec

pytestmark = [pytest.mark.netem, pytest.mark.virtual_clock]

HOUR_NS = 3_600_000_000_000


def _jump(by_ns: int) -> Callable[[int], None]:
    def jump(step: int) -> None:
        time.clock_settime_ns(time.CLOCK_REALTIME, time.time_ns() + (by_ns if step % 2 else -by_ns))

    return jump


def test_a_clock_that_jumps_moves_no_step(tmp_path: Path) -> None:
    trace = pipeline_trace(
        stages=3, microbatches=2, steps=6, message_bytes=100_000, forward_ns=500_000, backward_ns=900_000
    )
    trace.write(tmp_path / "a.trace")
    job = PlayJob(
        trace=tmp_path / "a.trace",
        lab=lab_spec(("consumer-80mbps",), "netem"),
        output=tmp_path / "a.played",
        prove_steady=False,
    )
    ends = []
    for by_ns in (0, HOUR_NS, 24 * HOUR_NS):
        before_ns = time.time_ns()
        played = play_job(job, "virtual", _jump(by_ns))
        assert abs(time.time_ns() - before_ns) < HOUR_NS // 2  # it came back each time
        ends.append([lane.end_ns.tolist() for lane in played.lanes])
    assert max(ends[0][-1]) < HOUR_NS
    assert ends[1] == ends[0]
    assert ends[2] == ends[0]
