"""On the virtual clock: times are those of a closed form, and the same nanoseconds in every boot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from testbed.player.guests import play_jobs
from testbed.player.play_job import DirectorCall, PlayJob
from testbed.records import LabRecord
from testbed.trace.format import Trace
from testbed.trace.played import Played, read_played
from testbed.trace.synthetic import pipeline_trace
from testbed.vm.kernel import GuestKernel
from tests.labs import lab_spec
from tests.trace.made_traces import messages

pytestmark = [pytest.mark.slow, pytest.mark.clock_kernel]

RATE_BPS, DELAY_NS = 80_000_000, 10_000_000
"""Of each link of `consumer-80mbps`, one way."""
_HEADERS, _SEGMENT = 52, 1448
_PAUSE_NS = 500_000_000
"""Longer than everything that a message sets off."""


def job(folder: Path, name: str, trace: Trace, profile: str = "consumer-80mbps", **changes: object) -> PlayJob:
    trace.write(folder / f"{name}.trace")
    lab = lab_spec((profile,), "netem", nodes=len(trace.nodes))
    return PlayJob(trace=folder / f"{name}.trace", lab=lab, output=folder / "results" / name, **changes)  # type: ignore[arg-type]


def play(folder: Path, kernel: GuestKernel, *jobs: PlayJob) -> list[Played]:
    outcomes = play_jobs(jobs, clock="virtual", folder=folder / "work", kernel=kernel)
    assert [outcome.error for outcome in outcomes] == [None] * len(jobs)
    assert not list((folder / "work").iterdir())
    return [read_played(job.output) for job in jobs]


def test_a_message_takes_what_rate_and_delay_say(tmp_path: Path, kernel: GuestKernel) -> None:
    """In a star it crosses two links: the second begins when it has the first packet."""
    size = 10 * _SEGMENT  # the first window
    (played,) = play(tmp_path, kernel, job(tmp_path, "ping", messages(*[size] * 4, pause_ns=_PAUSE_NS)))
    packet_ns = (_SEGMENT + _HEADERS) * 8 * 1_000_000_000 // RATE_BPS
    expected = 11 * packet_ns + 2 * DELAY_NS
    receiver = played.lanes[1]
    for first, last in zip(receiver.first_byte_ns, receiver.last_byte_ns, strict=True):
        assert abs(last - first - expected) < 0.001 * expected


def test_two_boots_give_the_same_bytes_and_what_is_unshaped_takes_no_time(tmp_path: Path, kernel: GuestKernel) -> None:
    trace = pipeline_trace(
        stages=3, microbatches=4, steps=3, message_bytes=100_000, forward_ns=3_000_000, backward_ns=5_000_000
    )
    shared = "consumer-80mbps, queue=cake, background=2 cubic up + 1 bbr down + web down + call up"
    results = []
    for boot in ("one", "two"):
        names = {"plain": "consumer-80mbps", "shared": shared, "unshaped": "datacenter"}
        wanted = [job(tmp_path, f"{boot}-{name}", trace, profile) for name, profile in names.items()]
        plain, beside, unshaped = play(tmp_path, kernel, *wanted)
        carried = LabRecord.model_validate(beside.lab).background or ()
        assert [each.flow for each in carried[:5]] == ["1 cubic up"] * 2 + ["1 bbr down", "web down", "call 2.6Mbit up"]
        assert len(carried) == 15
        assert all(each.carried_bytes > 0 for each in carried)
        assert max(lane.end_ns[-1] for lane in beside.lanes) > 1.1 * max(lane.end_ns[-1] for lane in plain.lanes)
        results.append([each.output.read_bytes() for each in wanted])
        ends = max(lane.end_ns[-1] for lane in unshaped.lanes) / unshaped.steps
        assert ends == pytest.approx(4 * 3_000_000 + 4 * 5_000_000 + 2 * (3_000_000 + 5_000_000), rel=1e-3)
    assert results[0] == results[1]


def test_what_a_jobs_director_chooses_is_played_as_if_it_had_stood_there(tmp_path: Path, kernel: GuestKernel) -> None:
    def pings(sizes: Sequence[int]) -> Trace:
        return messages(*sizes, pause_ns=_PAUSE_NS, steps=True)

    chosen = DirectorCall(made_by="tests.player.directors:Growing", arguments={"more_bytes": 7000})
    jobs = [
        job(tmp_path, "chosen", pings([5000] * 4), director=chosen),
        job(tmp_path, "written", pings([5000 + 7000 * step for step in range(4)]), prove_steady=False),
    ]
    ours, theirs = play(tmp_path, kernel, *jobs)
    assert ours.lanes == theirs.lanes
