"""The faults of a cell: how rows are read and drawn, what they do to a link, and that nothing changes before them."""

from __future__ import annotations

from typing import Any

import pytest

from testbed import faults, profiles
from testbed.errors import SpecError, UserError
from testbed.faults import EXACT, KINDS, REFUSED, LinkFault, read_faults
from testbed.net.kernel.queue_plan import plan_shaping
from testbed.net.relay.client import pipe_table
from testbed.net.topology import plan_lab
from testbed.profiles import Change, Pipe, PipeFault, Schedule
from testbed.profiles.timeline import timeline
from testbed.spec import Cell
from testbed.sweep import plan
from testbed.sweep.live_session import network_of
from tests import synthetic

S = 10**9
LINKS = {"node-0": profiles.load_profile("cable"), "node-1": profiles.load_profile("consumer-80mbps")}
OUTAGE = {"at": "12s", "for": "10s", "outage": True}
PIPE = synthetic.pipe(80_000_000, 10_000_000, buffer_bytes=1_000_000)


def read(*rows: dict[str, Any], run: str = "played") -> tuple[LinkFault, ...]:
    return read_faults(list(rows), LINKS, run) or ()


def failing(pipe: Pipe, *stated: PipeFault) -> Pipe:
    return pipe.model_copy(update={"faults": stated})


def cell(*fields: str, engine: Any = "netem", clock: Any = "virtual") -> Cell:
    experiment = plan.load_experiment("default").model_copy(update={"axes": {"codec": ["int8"], "profile": ["cable"]}})
    return plan.cells(experiment, engine, clock, overrides=fields)[0]


def test_a_row_is_for_every_link_and_both_ways_unless_it_says_otherwise() -> None:
    assert [(fault.link, fault.way, fault.at_ns, fault.for_ns) for fault in read(OUTAGE)] == [
        ("node-0", "both", 12 * S, 10 * S),
        ("node-1", "both", 12 * S, 10 * S),
    ]
    (one,) = read({**OUTAGE, "link": 1, "way": "up"})
    assert one == read({**OUTAGE, "link": "node-1", "way": "up"})[0]
    assert one.words == "node-1 up: outage at 12 s for 10 s"
    (worse,) = read({"link": 0, "at": "1s", "for": "1s", "rate": "1Mbit", "delay": "1s", "loss": "5%", "corrupt": "1%"})
    assert worse.effects == {"rate_bps": 10**6, "delay_ns": S, "loss": 0.05, "corrupt": 0.01}


def test_rows_that_are_drawn_have_times_of_their_own() -> None:
    drawn = {"link": 0, "mtbf": "10min", "until": "5h", "for": "30s"}
    one, *others = (
        {fault.at_ns for fault in read(*rows)}
        for rows in (
            [{**drawn, "outage": True}],
            [{**drawn, "outage": True}, {**drawn, "rate": "1Mbit"}],
            [{**drawn, "outage": True, "seed": 1}],
        )
    )
    both, seeded = others
    assert one < both
    assert len(both) > 1.5 * len(one), "independent of the first row"
    assert not seeded & one


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**OUTAGE, "step": 3}, "known only when it runs"),
        ({**OUTAGE, "link": 2}, "link is 2; state a number"),
        ({**OUTAGE, "outage": "yes"}, "'yes' is not true"),
        ({"at": "1s", "for": "1s"}, "it changes nothing"),
        ({"at": "1s", "outage": True}, "lacks 'for'"),
        ({"for": "1s", "outage": True}, "either at, or mtbf and until"),
        ({**OUTAGE, "rat": "1Mbit"}, "rate"),
        ({"for": "1s", "outage": True, "mtbf": "1ms", "until": "1h"}, "at most 1000"),
    ],
)
def test_a_row_that_cannot_be_made_is_refused(row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read(row)


@pytest.mark.parametrize("run", ["played", "live_virtual", "live_real"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_table_is_what_refuses(kind: str, run: str) -> None:
    verdict = getattr(KINDS[kind], run)
    values = {"outage": True, "rate": "1Mbit", "delay": "1s", "stop": True, "slow": 2.0, "kill": True}
    values |= {"frame": "damaged"}
    row = {"at": "1s", kind: values.get(kind, "5%")}
    row |= {"node": 0} if kind in ("stop", "slow", "kill", "frame") else {}
    row |= {} if kind in ("kill", "frame") else {"for": "1s"}
    if verdict.startswith(REFUSED):
        with pytest.raises(SpecError) as refused:
            read(row, run=run)
        assert verdict in str(refused.value)
    else:
        assert read(row, run=run)
        assert verdict == EXACT or verdict.startswith("approximate")


def test_a_row_with_a_node_is_a_fault_of_it() -> None:
    row = {"node": 1, "at": "1s", "for": "1s"}
    stopped, slow = read({**row, "stop": True}, {**row, "node": 0, "slow": 3.0})
    assert (stopped.words, slow.words) == ("node 0: 3 times as slow at 1 s for 1 s", "node 1: stopped at 1 s for 1 s")
    (killed,) = read({"node": 1, "at": "1s", "kill": True}, run="live_virtual")
    assert killed.words == "node 1: killed at 1 s"
    (missing,) = read({"node": 1, "at": "1s", "frame": "missing"}, run="live_virtual")
    assert missing.words == "node 1: next message missing at 1 s"
    two = {"stop": True, "slow": 3.0}
    for wrong in ({}, two, {"slow": 0.5}, {"stop": True, "rate": "1Mbit"}, {"kill": True}, {"frame": "damaged"}):
        with pytest.raises(UserError):
            read({**row, **wrong})
    assert cell('fault=[{ node = 1, at = "1s", for = "2s", stop = true }]').node_faults[0].node == 1
    times = 'at = "1s", for = "2s"'
    for other in ("node = 1", "node = 64"):
        with pytest.raises(SpecError, match="another fault then, or is none of"):
            cell(f"fault=[{{ node = 1, {times}, stop = true }}, {{ {other}, {times}, slow = 2.0 }}]")


def test_a_node_can_be_slow_only_where_its_durations_are_stated() -> None:
    slow = 'fault=[{ node = 1, at = "1s", for = "2s", slow = 2.0 }]'
    with pytest.raises(SpecError, match="durations are not stated"):
        cell(slow, "timing=live", clock="real")


def test_drawn_faults_are_explicit_repeatable_and_each_link_has_its_own() -> None:
    row = {"for": "10s", "outage": True, "mtbf": "10min", "until": "20h"}
    drawn = read(row)
    assert drawn == read(row)
    assert [fault.at_ns for fault in drawn] == sorted(fault.at_ns for fault in drawn)
    by_link = {name: [fault.at_ns for fault in drawn if fault.link == name] for name in LINKS}
    assert not set(by_link["node-0"]) & set(by_link["node-1"])
    assert set(by_link["node-0"]).isdisjoint(fault.at_ns for fault in read({**row, "seed": 1}))
    for times in by_link.values():
        ups = [(after - before) / S - 10 for before, after in zip([-10 * S, *times], times, strict=False)]
        assert min(ups) > 0
        assert 600 / 1.5 < sum(ups) / len(ups) < 600 * 1.5


def test_a_fault_is_worse_than_what_goes_on_beneath_it() -> None:
    """At any time: the values of the schedule or of the fault, whichever are worse; and the rest as without faults."""
    values = {"delay_ns": 10_000_000, "jitter_ns": 0, "loss": None}
    changes = tuple(Change(at_ns=at * S, rate_bps=rate * 10**6, **values) for at, rate in ((0, 80), (1, 2), (2, 40)))
    pipe = PIPE.model_copy(update={"schedule": Schedule(changes=changes, repeat_ns=3 * S)})
    collapse = PipeFault(at_ns=round(4.5 * S), for_ns=2 * S, rate_bps=5 * 10**6)
    later = PipeFault(at_ns=5 * S, for_ns=4 * S, loss=1.0, delay_ns=S)
    line, calm = timeline(failing(pipe, collapse, later)), timeline(pipe)
    for tenth in range(120):
        now, beneath, at = (line.at(tenth * S // 10), calm.at(tenth * S // 10), tenth / 10)
        assert now.rate_bps == (min(beneath.rate_bps, 5 * 10**6) if 4.5 <= at < 6.5 else beneath.rate_bps)
        assert (now.lost, now.delay_ns) == ((1, S) if 5 <= at < 9 else (0, 10_000_000))
    edges = [0]
    while edges[-1] < 12 * S:
        edges.append(line.next_after(edges[-1]) or 10**18)
    assert edges[:-1] == [x * S // 2 for x in (0, 2, 4, 6, 8, 9, 10, 12, 13, 14, 16, 18, 20, 22)]
    assert line.bits_between(5 * S, 9 * S) == 0


@pytest.mark.parametrize("layer", ["ip", "ethernet"])
@pytest.mark.parametrize(
    "effects",
    [{"loss": 1.0}, {"delay_ns": S}, {"reorder": 0.1, "duplicate": 0.1, "corrupt": 0.1}, {"rate_bps": 8000}],
)
def test_until_a_fault_begins_its_link_is_shaped_as_without_it(layer: Any, effects: dict[str, Any]) -> None:
    pipe = failing(PIPE, PipeFault(at_ns=S, for_ns=S, **effects))
    line = timeline(pipe)
    calm = plan_shaping(PIPE, mtu=1500, layer=layer)
    for step in (None, line.at(0), line.at(S - 1)):
        before = plan_shaping(pipe, mtu=1500, layer=layer, step=step)
        assert before.children == calm.children
        # A size table counts packets as the negative overhead does; a seed without draws does nothing.
        same = {"packet_overhead": calm.netem.packet_overhead, "seed": calm.netem.seed}
        assert before.netem._replace(**same) == calm.netem
        assert bool(before.sizes) == ("rate_bps" in effects and layer == "ip")
    during = plan_shaping(pipe, mtu=1500, layer=layer, step=line.at(S))
    assert during != before
    after = plan_shaping(pipe, mtu=1500, layer=layer, step=line.at(2 * S))
    assert [child.kind for child in after.children] == ["htb", "bfifo"] * ("rate_bps" in effects)
    assert after.netem.rate_bytes == PIPE.rate_bps // 8


def test_a_cell_holds_its_faults_and_others_keep_their_ids() -> None:
    plain, failed = cell(), cell('fault=[{ at = "1s", for = "2s", outage = true, link = 0 }]')
    assert plain.id != failed.id
    assert "fault" not in plain.model_dump()
    assert "tcp_rto_max_ms" not in plain.model_dump()
    assert Cell.model_validate_json(failed.model_dump_json()) == failed
    assert not failed.by_chance, "an outage draws nothing"
    assert cell('fault=[{ at = "1s", for = "2s", corrupt = "5%" }]').by_chance
    first, *others = [link.pipes[0].faults for link in failed.links]
    assert first == (PipeFault(at_ns=S, for_ns=2 * S, loss=1.0),)
    assert not any(others)
    assert faults.patience_s(failed.fault or ()) == 64
    assert faults.patience_s(()) == 0


def test_the_longest_timer_of_tcp_is_stated_in_every_node() -> None:
    plan = plan_lab(**cell("tcp_rto_max_ms=5000").lab, engine="netem")
    stated = {space.role: space.sysctls.get("net.ipv4.tcp_rto_max_ms") for space in plan.namespaces}
    assert stated == {"node": "5000", "hub": "5000", "gateway": None}
    attempts = int(plan.namespaces[0].sysctls["net.ipv4.tcp_retries2"])
    assert 925 < 5 * attempts < 1100, "TCP gives up as late as by default, 924.6 s"
    assert network_of(cell()) != network_of(cell("tcp_rto_max_ms=5000")), "or live cells would share a lab"
    with pytest.raises(SpecError, match="tcp_rto_max_ms"):
        cell("tcp_rto_max_ms=500")


def test_time_is_dilated_with_the_link() -> None:
    pipe = failing(PIPE, PipeFault(at_ns=S, for_ns=2 * S, rate_bps=8_000_000)).dilated(10)
    assert pipe.faults == (PipeFault(at_ns=10 * S, for_ns=20 * S, rate_bps=800_000),)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('rate = "1Gbit"', "no worse than"),
        ('delay = "1us"', "no worse than"),
        ("kill = true", r"kill is refused, because one process plays all nodes"),
    ],
)
def test_a_cell_refuses_faults_that_are_none(row: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        cell(f'fault=[{{ at = "1s", for = "2s", {row} }}]')


def test_the_relay_follows_the_same_timeline_or_refuses() -> None:
    table = pipe_table(failing(PIPE, PipeFault(at_ns=S, for_ns=S, loss=1.0))) or {}
    lost = {"model": "bernoulli", "probability": 1.0}
    assert [(step["at_ns"], step["loss"]) for step in table["steps"]] == [(0, None), (S, lost), (2 * S, None)]
    with pytest.raises(SpecError, match="engine netem"):
        pipe_table(failing(PIPE, PipeFault(at_ns=S, for_ns=S, corrupt=0.1)))
    with pytest.raises(SpecError, match="only engine netem"):
        cell('fault=[{ at = "1s", for = "2s", reorder = "5%" }]', engine="relay", clock="real")
