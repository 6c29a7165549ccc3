"""Jobs: played one after the other, and those that fail cost only themselves."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from testbed.player import guests
from testbed.player.guests import Progress, play_jobs
from testbed.player.play_job import DirectorCall, PlayJob
from testbed.process import start_program
from testbed.records import Certificate
from testbed.trace.format import SEND, WORK, read_trace
from testbed.trace.played import read_played
from testbed.trace.synthetic import pipeline_trace
from tests.labs import lab_spec
from tests.trace.made_traces import messages, sent_bytes

pytestmark = pytest.mark.root


def job(folder: Path, name: str, *, nodes: int = 3, shape: str = "star", steps: int = 3) -> PlayJob:
    trace = pipeline_trace(
        stages=3, microbatches=4, steps=steps, message_bytes=200_000, forward_ns=500_000, backward_ns=900_000
    )
    trace.write(folder / f"{name}.trace")
    return PlayJob(
        trace=folder / f"{name}.trace",
        lab=lab_spec(("datacenter",), "relay", shape, nodes),
        output=folder / "results" / name,
    )


@pytest.mark.parametrize(
    ("profile", "repeats"),
    [
        ("consumer-80mbps", True),
        ("consumer-80mbps-bbr", False),
        ("lossy-80mbps", False),
        ("link(80Mbit, 10ms, queue=fq_codel)", False),
    ],
)
def test_only_over_links_without_chance_and_memory_may_steps_be_proved_to_repeat(
    profile: str, repeats: bool, tmp_path: Path
) -> None:
    wanted = PlayJob(trace=tmp_path / "t", lab=lab_spec((profile,), "relay", "line", 2), output=tmp_path / "out")
    assert wanted.repeatable == repeats


@pytest.mark.parametrize("shape", ["star", "line"])
def test_a_trace_over_an_unshaped_network_on_the_real_clock(tmp_path: Path, shape: str) -> None:
    wanted = job(tmp_path, "one", shape=shape)
    seen: list[Progress] = []
    (outcome,) = play_jobs([wanted], clock="real", folder=tmp_path / "work", progress=seen.append)
    assert outcome.error is None
    assert seen[-1].outcome == outcome
    played = read_played(wanted.output)
    assert (played.clock, played.steps, played.steady) == ("real", 3, None)
    trace = read_trace(wanted.trace)
    for lane, times in zip(trace.lanes, played.lanes, strict=True):
        assert len(times.begin_ns) == len(lane)
        for i, kind in enumerate(lane.kind):
            assert times.begin_ns[i] <= times.end_ns[i]
            if kind == WORK:
                assert times.end_ns[i] - times.begin_ns[i] == lane.value[i]
            if kind == SEND:
                assert times.begin_ns[i] <= times.first_byte_ns[i] <= times.last_byte_ns[i]
    middle = played.counters[-1][1]
    payload = sum(sent_bytes(trace, 1))
    assert payload < middle.sent_bytes < 1.1 * payload
    assert {(state.node, state.peer) for state in played.sockets[-1]} == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert not list((tmp_path / "work").iterdir())


def test_links_are_certified_with_the_same_messages_before_and_after_a_director_chose(tmp_path: Path) -> None:
    stated = (3000, 9000, 40_000)
    messages(*stated, pause_ns=1_000_000, steps=True).write(tmp_path / "sizes.trace")
    directed = PlayJob(
        trace=tmp_path / "sizes.trace",
        lab=lab_spec(("datacenter",), "relay", "line", 2),
        director=DirectorCall(made_by="tests.player.directors:Growing", arguments={"more_bytes": 70_000}),
        output=tmp_path / "played",
    )
    (outcome,) = play_jobs([directed], clock="real", folder=tmp_path / "work")
    assert outcome.error is None
    about = read_played(directed.output).about
    for when in ("before", "after"):
        measured = Certificate.model_validate(about[when]).measurements
        details = [each.detail for each in measured if each.quantity == "message" and each.direction == "up"]
        assert [int(detail.split()[0]) for detail in details] == list(stated), when


def test_a_job_that_fails_or_dies_costs_only_itself(tmp_path: Path) -> None:
    short, long = job(tmp_path, "short"), job(tmp_path, "long", steps=3000)
    too_small = job(tmp_path, "too-small", nodes=2)

    def kill(progress: Progress) -> None:
        if progress.job == 1 and progress.steps > 0:  # the long one, which is played first
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"testbed.player.play_in_guest" in command and str(tmp_path / "work").encode() in command[-3]:
                    os.kill(int(entry.name), signal.SIGKILL)

    outcomes = play_jobs([short, long, too_small], clock="real", folder=tmp_path / "work", progress=kill)
    assert [outcome.error is None for outcome in outcomes] == [True, False, False]
    assert "-9" in str(outcomes[1].error)
    assert "has 3 nodes, but the lab has 2" in str(outcomes[2].error)
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["short"]
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("deaths", [1, 100])
def test_one_that_dies_before_it_takes_a_job_costs_none_unless_all_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaths: int
) -> None:
    started = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start_program(*arguments, **options)
        started.append(process)
        if len(started) <= deaths:
            process.kill()
        return process

    monkeypatch.setattr(guests, "start_program", start)
    (outcome,) = play_jobs([job(tmp_path, "one")], clock="real", folder=tmp_path / "work")
    if deaths == 1:
        assert (outcome.error, len(started)) == (None, 2)
    else:
        assert "-9" in str(outcome.error)
        assert 1 < len(started) < deaths


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_one_that_others_keep_from_working_is_not_taken_for_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    for name in ("_PATIENCE_S", "_PATIENCE"):
        monkeypatch.setattr(guests, name, 1e-9)
    monkeypatch.setattr(guests, "granted_share", lambda pids: share)
    (outcome,) = play_jobs([job(tmp_path, "one")], clock="real", folder=tmp_path / "work")
    assert ("made no progress" in (outcome.error or "")) == bool(share)
    assert (outcome.error is None) != bool(share)
