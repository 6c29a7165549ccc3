"""Faults of a cell in guests: the same nanoseconds again and beside busy loops, and live as played.

That nothing differs before a fault is tested with the player alone, which needs no training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from testbed import results
from testbed.faults import NodeFault
from testbed.metrics.steps import align
from testbed.player.guests import play_jobs
from testbed.player.play_job import PlayJob
from testbed.player.virtual import OverLinks, guest_lab, play_virtual
from testbed.profiles import LinkProfile, PipeFault, load_profile
from testbed.records import FaultRecord, LabRecord, WorstStep
from testbed.results import Run
from testbed.trace.format import WORK
from testbed.trace.played import read_played
from testbed.trace.synthetic import pipeline_trace
from testbed.vm.kernel import GuestKernel
from tests.boots import busy
from tests.commands import Command, sets
from tests.known import known

pytestmark = [pytest.mark.slow, pytest.mark.clock_kernel]

S = 10**9
AT_S = 2
BBR = "consumer-80mbps, congestion_control=bbr"
CONFIRMED_NS = 10_000
"""Within which the kernel has the new values, and has been asked for them."""


def sweep(
    folder: Path, timing: str, outages_s: Sequence[int], profiles: Sequence[str], *fields: str, at_ns: int = AT_S * S
) -> dict[tuple[int, str], Run]:
    """Run a cell for each outage and profile; return the only run of each by outage and congestion control."""
    rows = [f'{{ at = "{at_ns}ns", for = "{long}s", outage = true, link = 0 }}' for long in outages_s]
    runs = sweep_faults(folder, timing, rows, profiles, *fields)
    named = {(known(run.cell.fault)[0].for_ns // S, run.cell.links[0].congestion_control): run for run in runs}
    assert len(named) == len(runs) == len(outages_s) * len(profiles)
    return named


def sweep_faults(
    folder: Path, timing: str, faults: Sequence[str], profiles: Sequence[str], *fields: str, status: int = 0
) -> list[Run]:
    """Run a cell for each list of faults and profile; return the runs that finished."""
    folder.mkdir()
    axes = f'codec = ["int8"]\nprofile = {json.dumps(profiles)}\nfault = [{", ".join(f"[{row}]" for row in faults)}]'
    with Command.standing(folder, "netem") as command:
        into = command.write_experiment("live_checks = 0", axes)
        more = sets("pipeline.stages=2", "training.steps=40", "training.evaluate_every=0", "codec_cost=zero", *fields)
        arguments = "sweep", "sweep.toml", "--timing", timing, "--clock", "virtual", *more
        command.finish(*arguments, status=status)
    cells = results.last_sweep(into).cells
    return [run for cell_id in cells for run in results.finished_runs(into, cell_id)]


def worst(run: Run) -> WorstStep:
    """The worst step of a run, which must be that of its outage, and have come to an end."""
    told, outage = known(known(run.summary).worst), known(run.lab.faults)
    assert [(each.link, each.direction, each.loss) for each in told.links] == [
        ("node-0", "up", 1.0),
        ("node-0", "down", 1.0),
    ]
    for each in outage:
        for stated_ns, done_ns in ((each.fault.at_ns, each.began_ns), (each.fault.end_ns, each.ended_ns)):
            assert 0 <= known(done_ns) - stated_ns < CONFIRMED_NS
    assert told.at_s < AT_S + 0.1
    assert told.at_s + told.seconds > outage[0].fault.end_ns / S
    assert known(told.recovered_s) >= told.seconds
    return told


def _most_s(outage_s: float) -> float:
    """TCP tries again after twice its last pause: what is in flight when the outage begins decides, between one and
    about two times the outage.
    """
    return 2.1 * outage_s + 1.5


def test_an_outage_is_the_same_again_and_beside_busy_loops_and_live(tmp_path: Path) -> None:
    profiles = ["consumer-80mbps", BBR]
    first = sweep(tmp_path / "first", "played", (1, 10, 60), profiles)
    with busy(2):
        again = sweep(tmp_path / "again", "played", (1, 10, 60), profiles)
    for name, run in first.items():
        for node in range(2):
            file = f"steps-{node}.jsonl"
            assert (run.folder / file).read_bytes() == (again[name].folder / file).read_bytes()
        told = worst(run)
        assert told.seconds < _most_s(name[0])
    page = (first[10, "cubic"].folder.parents[1] / "cells" / f"{first[10, 'cubic'].cell.id}.html").read_text()
    assert "The worst step" in page
    assert 'class="fault"' in page
    assert "node-0 up: outage at 2 s for 10 s" in page
    (limited,) = sweep(tmp_path / "limited", "played", (60,), profiles[:1], "tcp_rto_max_ms=5000").values()
    assert worst(limited).seconds < 60 + 2 * 5 + 1.5 < worst(first[60, "cubic"]).seconds
    (live,) = sweep(tmp_path / "live", "live", (10,), profiles[:1]).values()
    # A live run connects after its links are played: the outage must meet the same packets.
    later_ns = since_played_ns(live) - since_played_ns(first[10, "cubic"])
    assert 0 < later_ns < S / 10
    at_ns = AT_S * S - later_ns
    (played,) = sweep(tmp_path / "in phase", "played", (10,), profiles[:1], at_ns=at_ns).values()
    assert worst(played).seconds == pytest.approx(worst(live).seconds, rel=0.03)


def since_played_ns(run: Run) -> int:
    """When its fifth step began, on the links' clock."""
    return run.steps(0)[5].start_ns - known(run.lab.played_at_ns)


def node_faults(at_ns: int) -> str:
    """Stage 1 is stopped for a second, and stage 0 slow for two."""
    rows = "node = 1, for = '1s', stop = true", "node = 0, for = '2s', slow = 3.0"
    return ", ".join(f"{{ {row}, at = '{at_ns}ns' }}" for row in rows)


def test_a_live_node_is_stopped_or_slow_as_a_played_one_and_a_killed_one_is_named(tmp_path: Path) -> None:
    profiles = ["consumer-80mbps"]
    killed = '{ node = 1, at = "1.9s", kill = true }'
    (live,) = sweep_faults(tmp_path / "live", "live", [node_faults(AT_S * S), killed], profiles, status=1)
    with busy(2):
        (again,) = sweep_faults(tmp_path / "again", "live", [node_faults(AT_S * S)], profiles)
    assert live.all_steps() == again.all_steps()
    (failed,) = (run for run in results.runs(tmp_path / "live" / "results" / "live") if run.folder != live.folder)
    assert known(known(failed.summary).error).endswith("recorded steps, as stated: node 1: killed at 1.9 s")
    begin_ns = min(steps[0].start_ns for steps in live.all_steps()) - known(live.lab.played_at_ns)
    (played,) = sweep_faults(tmp_path / "played", "played", [node_faults(AT_S * S - begin_ns)], profiles)

    def lengths_s(run: Run) -> list[float]:
        return [step.seconds for step in align(run.all_steps()) if step.phase == "train"]

    ours, theirs = lengths_s(live), lengths_s(played)
    assert max(theirs) > 1
    assert ours == pytest.approx(theirs, rel=0.01)


def test_a_damaged_message_ends_a_live_run_at_the_same_nanosecond_in_two_boots(tmp_path: Path) -> None:
    damaged, ended = '{ node = 1, at = "1.9s", frame = "damaged" }', list[Run]()
    for name, loops in (("once", 0), ("beside loops", 2)):
        with busy(loops):
            assert not sweep_faults(tmp_path / name, "live", [damaged], ["consumer-80mbps"], status=1)
        ended += results.runs(tmp_path / name / "results" / name)
    assert "is damaged: its CRC does not match" in known(known(ended[0].summary).error)
    assert known(ended[0].summary).error == known(ended[1].summary).error
    assert ended[0].all_steps() == ended[1].all_steps()
    assert 10 < len(ended[0].steps(0)) < 40


def test_a_node_is_stopped_or_slow_from_the_stated_time_on_and_no_longer(tmp_path: Path, kernel: GuestKernel) -> None:
    """Nothing differs before; then a stop costs its length and a part of a step, and slow work its factor."""
    trace = pipeline_trace(
        stages=2, microbatches=2, steps=14, message_bytes=100_000, forward_ns=30_000_000, backward_ns=50_000_000
    )
    trace.write(tmp_path / "it.trace")
    at_ns, long_ns = 2 * S, 2 * S
    stop, slow = NodeFault(node=1, at_ns=at_ns, for_ns=long_ns), NodeFault(node=0, at_ns=at_ns, for_ns=long_ns, slow=3)
    later = stop.model_copy(update={"at_ns": 3600 * S}), slow.model_copy(update={"at_ns": 3600 * S})
    jobs = [
        PlayJob(
            trace=tmp_path / "it.trace",
            lab=guest_lab("line", [load_profile("link(10Mbit, 25ms)")], 2),
            node_faults=faults,
            prove_steady=False,
            output=tmp_path / "played" / str(number),
        )
        for number, faults in enumerate([(), later, (stop,), (stop,), (slow,)])
    ]
    outcomes = play_jobs(jobs, clock="virtual", folder=tmp_path / "work", kernel=kernel)
    assert [outcome.error for outcome in outcomes] == [None] * len(jobs)
    calm, unhurt, stopped, again, slowed = (read_played(job.output).lanes for job in jobs)
    assert unhurt == calm
    assert again == stopped
    for lanes, node in ((stopped, 1), (slowed, 0)):
        for lane, as_calm in zip(lanes, calm, strict=True):
            ends = zip(lane.end_ns, as_calm.end_ns, strict=True)
            assert all(ours == theirs for ours, theirs in ends if theirs <= at_ns)
        works = [
            (begin, end - begin, value)
            for lane, of in zip(lanes, trace.lanes, strict=True)
            if of.node == node
            for begin, end, kind, value in zip(lane.begin_ns, lane.end_ns, of.kind, of.value, strict=False)
            if kind == WORK and value
        ]
        outside = [took == value for begin, took, value in works if begin + took <= at_ns or begin >= at_ns + long_ns]
        assert outside
        assert all(outside)
        within = [(took, value) for begin, took, value in works if at_ns <= begin and begin + took <= at_ns + long_ns]
        assert all(took == 3 * value for took, value in within)
        assert bool(within) == (node == 0)
    last, as_calm = (max(lane.end_ns[-1] for lane in lanes) for lanes in (stopped, calm))
    assert long_ns - S / 2 < last - as_calm < long_ns + S / 2


def with_fault(profile: LinkProfile, **fault: float) -> LinkProfile:
    """The link, with a fault in both directions."""
    faults = (PipeFault.model_validate(fault),)
    ways = {
        way: pipe.model_copy(update={"faults": faults}) for way in ("up", "down") if (pipe := getattr(profile, way))
    }
    return profile.model_copy(update=ways)


def test_until_a_fault_begins_every_time_is_as_without_it() -> None:
    link = load_profile("link(10Mbit, 25ms)")
    assert link.layer == "ip", "the layer in which a collapse needs a table of sizes"
    effects = [{"loss": 1.0}, {"rate_bps": 800_000}, {"delay_ns": S // 2}]
    effects += [{"reorder": 0.1}, {"duplicate": 0.1}, {"corrupt": 0.1}]
    during = [with_fault(link, at_ns=2 * S, for_ns=S, **effect) for effect in effects]
    later = [with_fault(link, at_ns=3600 * S, for_ns=S, **effect) for effect in effects]
    trace = pipeline_trace(
        stages=2, microbatches=2, steps=12, message_bytes=100_000, forward_ns=3_000_000, backward_ns=5_000_000
    )
    labs = [guest_lab("line", [each], 2) for each in (link, *later, *during)]
    calm, *faulty = play_virtual([OverLinks(trace, lab) for lab in labs], prove_steady=False)
    assert all(played.lanes == calm.lanes for played in faulty[: len(later)])
    for played in faulty[len(later) :]:
        times = [
            (ours, theirs)
            for lane, as_calm in zip(played.lanes, calm.lanes, strict=True)
            for ours, theirs in zip(lane.end_ns, as_calm.end_ns, strict=True)
        ]
        assert all(ours == theirs for ours, theirs in times if theirs <= 2 * S)
        assert any(ours > theirs for ours, theirs in times)
        for each in known(LabRecord.model_validate(played.lab).faults):
            assert isinstance(each, FaultRecord)
            assert 0 <= known(each.began_ns) - 2 * S < CONFIRMED_NS
