"""What the machine can do is found by trying; what cannot be done is told with a way out."""

from __future__ import annotations

import os

import pytest

from testbed.errors import CapabilityError, ShapingError
from testbed.net.machine import capabilities, timekeeping
from testbed.net.machine.timekeeping import Timekeeping


@pytest.mark.root
def test_findings_are_complete_and_say_what_to_do() -> None:
    found = capabilities.try_capabilities()
    assert len({finding.name for finding in found}) == len(found)
    for finding in found:
        assert finding.detail
        assert bool(finding.remedy) == (not finding.ok)
        assert ";" not in finding.detail  # what an error advises is left to the remedy
    tried = {finding.name: finding for finding in found}
    assert tried["network namespaces"].ok
    assert tried["TUN device"].ok
    assert not (tried["netem"].ok and tried["TUN device"].needed)
    assert ("netem's other effects" in tried) == tried["netem"].ok
    assert {"veth and offloads", "congestion control", "timers", "processors", "disk"} <= set(tried)


@pytest.mark.netem
def test_every_effect_of_netem_works_where_netem_does() -> None:
    found = next(finding for finding in capabilities.try_capabilities() if finding.name == "netem's other effects")
    assert found.ok, found.detail
    assert "Gilbert-Elliott" in found.detail


@pytest.mark.root
def test_without_a_namespace_the_rest_is_not_tried_and_one_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> None:
        raise CapabilityError(f"cannot make a network namespace for {name}: not permitted; run as root")

    monkeypatch.setattr(capabilities, "Namespace", refused)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    tried = {finding.name: finding for finding in capabilities.try_capabilities()}
    assert not tried["network namespaces"].ok
    assert "sudo" in tried["network namespaces"].remedy
    for name in ("veth and offloads", "netem", "TUN device"):
        assert not tried[name].ok
        assert tried[name].detail.startswith("not tried")
        assert not tried[name].remedy
    with pytest.raises(CapabilityError, match="sudo"):
        capabilities.resolve_engine("auto")


@pytest.mark.root
def test_an_effect_that_netem_refuses_is_named_and_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shape(netlink: object, **changes: object) -> None:
        if "slot" in changes:
            raise ShapingError("a scratch link: the kernel has no slot")

    monkeypatch.setattr(capabilities, "_shape", shape)
    found = next(finding for finding in capabilities.try_capabilities() if finding.name == "netem's other effects")
    assert not found.ok
    assert not found.needed
    assert "slot (a scratch link: the kernel has no slot)" in found.detail
    assert "jitter" not in found.detail


@pytest.mark.parametrize(
    ("changes", "timers_ok", "load_ok"),
    [
        ({}, True, True),
        ({"late_p99_ms": 5.0}, False, True),
        ({"fine_timers": False}, False, True),
        ({"busy": 0.9}, True, False),
    ],
)
def test_a_machine_that_keeps_no_time_is_told_apart_from_one_that_is_busy(
    changes: dict[str, object], timers_ok: bool, load_ok: bool
) -> None:
    sound = Timekeeping(
        sleep_ms=2,
        late_p99_ms=0.1,
        late_worst_ms=0.2,
        real_time=True,
        fine_timers=True,
        processors=2,
        busy=0.1,
        load=0.3,
    )
    found = sound._replace(**changes)  # type: ignore[arg-type]
    for judge, expected in ((timekeeping.judge_timers, timers_ok), (timekeeping.judge_load, load_ok)):
        if expected:
            assert judge(found)
        else:
            with pytest.raises(CapabilityError):
                judge(found)


def test_sleeps_are_measured_and_the_scheduling_class_is_put_back() -> None:
    before = os.sched_getscheduler(0)
    found = timekeeping.measure_timekeeping()
    assert os.sched_getscheduler(0) == before
    assert 0 <= found.late_p99_ms <= found.late_worst_ms
    assert found.processors >= 1
    assert 0 <= found.busy <= 1


@pytest.mark.root
def test_trying_leaves_nothing_behind() -> None:
    capabilities.try_capabilities()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    scheduling = os.sched_getscheduler(0)
    capabilities.try_capabilities()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert os.sched_getscheduler(0) == scheduling


@pytest.mark.root
@pytest.mark.parametrize(
    ("error", "engine"),
    [(None, "netem"), (CapabilityError("no sch_netem; x"), "relay"), (ShapingError("the kernel has another"), "relay")],
)
def test_auto_takes_netem_where_it_works_else_the_relay_and_says_why(
    error: Exception | None, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attempt() -> str:
        if error is not None:
            raise error
        return "it works"

    monkeypatch.setattr(capabilities, "try_netem", attempt)
    chosen, reason = capabilities.resolve_engine("auto")
    assert chosen == engine
    assert (str(error).split(";")[0] if error else "it works") in reason


@pytest.mark.root
@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("auto", r"neither engine works here\. netem: .* relay: .*testbed vm"),
        ("netem", "this kernel has no such thing"),
        ("relay", "this kernel has no such thing"),
    ],
)
def test_what_is_asked_for_is_never_replaced_and_neither_is_an_error_with_both_reasons(
    asked: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> str:
        raise CapabilityError("this kernel has no such thing; do something else")

    monkeypatch.setattr(capabilities, "try_netem", refuses)
    monkeypatch.setattr(capabilities, "try_tun", refuses)
    with pytest.raises(CapabilityError, match=words):
        capabilities.resolve_engine(asked)
