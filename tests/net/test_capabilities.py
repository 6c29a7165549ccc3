"""What the machine can do is found by trying; what cannot be done is told with a way out."""

from __future__ import annotations

import os

import pytest

from testbed.errors import CapabilityError, ShapingError
from testbed.net import capabilities


def _refuses() -> str:
    raise CapabilityError("this kernel has no such thing; do something else")


def _works() -> str:
    return "it works"


@pytest.mark.root
def test_findings_are_complete_and_say_what_to_do() -> None:
    found = capabilities.findings()
    assert len({finding.name for finding in found}) == len(found)
    for finding in found:
        assert finding.detail
        assert bool(finding.remedy) == (not finding.ok)
    tried = {finding.name: finding for finding in found}
    assert tried["network namespaces"].ok
    assert tried["TUN device"].ok
    assert not (tried["sch_netem"].ok and tried["TUN device"].needed)


@pytest.mark.root
def test_trying_leaves_nothing_behind() -> None:
    capabilities.findings()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    scheduling = os.sched_getscheduler(0)
    capabilities.findings()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert os.sched_getscheduler(0) == scheduling


@pytest.mark.root
def test_auto_takes_netem_where_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "try_netem", _works)
    engine, reason = capabilities.resolve_engine("auto")
    assert engine == "netem"
    assert "it works" in reason


@pytest.mark.root
@pytest.mark.parametrize("error", [CapabilityError("no sch_netem; x"), ShapingError("the kernel has something else")])
def test_auto_takes_the_relay_where_netem_does_not_work_and_says_why(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> str:
        raise error

    monkeypatch.setattr(capabilities, "try_netem", fails)
    engine, reason = capabilities.resolve_engine("auto")
    assert engine == "relay"
    assert str(error).split(";")[0] in reason


@pytest.mark.root
def test_neither_engine_is_an_error_with_both_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "try_netem", _refuses)
    monkeypatch.setattr(capabilities, "try_tun", _refuses)
    with pytest.raises(CapabilityError, match=r"neither engine works here\. netem: .* relay: .*testbed vm"):
        capabilities.resolve_engine("auto")


@pytest.mark.root
@pytest.mark.parametrize("engine", ["netem", "relay"])
def test_what_is_asked_for_is_never_replaced(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "try_netem", _refuses)
    monkeypatch.setattr(capabilities, "try_tun", _refuses)
    with pytest.raises(CapabilityError, match="this kernel has no such thing"):
        capabilities.resolve_engine(engine)


def test_without_the_right_to_make_namespaces_the_message_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> None:
        raise CapabilityError(f"cannot make a network namespace for {name}")

    monkeypatch.setattr(capabilities, "Namespace", refused)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CapabilityError, match="sudo"):
        capabilities.resolve_engine("auto")
    for finding in capabilities.findings():
        assert finding.ok or "sudo" in finding.remedy or "readable" in finding.remedy
