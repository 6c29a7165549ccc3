"""Measurements on the real clock: a deviation fails while the host keeps time, and shows nothing while it is late."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from testbed.net.certificate.verdict import Fitness, Lateness
from tests.quiet import (
    ATTEMPTS,
    Deviates,
    Host,
    Quiet,
    certified_lateness,
    failures,
    lateness_ms,
    ticks_of_others,
    watch,
)
from tests.synthetic import cell, certificate, pipe, profile

pytest_plugins = ["pytester"]

CALM = Host(p99_ms=0.1, worst_ms=1.0, stolen=0.0, others=0.01)
LATE = [
    CALM._replace(p99_ms=1.5),
    CALM._replace(worst_ms=20.0),
    CALM._replace(stolen=0.02),
    CALM._replace(others=0.5),
]


def on(host: Host) -> Quiet:
    @contextlib.contextmanager
    def pretend() -> Iterator[Callable[[], Host]]:
        yield lambda: host

    return Quiet(pretend)


def off(result: int) -> list[str]:
    return [f"{result} is off"] if result else []


def test_what_does_not_deviate_is_measured_once_however_late_the_host() -> None:
    for host in (CALM, *LATE):
        assert on(host).measure(iter([0]).__next__, off) == 0


def test_a_deviation_that_does_not_come_again_passes() -> None:
    quiet = on(CALM)
    assert quiet.measure(iter([7, 8, 0]).__next__, off) == 0
    assert [text.partition(";")[0] for text in quiet.said[:2]] == ["7 is off", "8 is off"]
    assert len(quiet.said) == ATTEMPTS == 3


def test_a_deviation_that_stays_counts_unless_the_host_was_late_each_time() -> None:
    for host, told, late in [
        (CALM, (), False),
        (CALM, ("the relay was 5 ms late",), True),
        *((h, (), True) for h in LATE),
    ]:
        with pytest.raises(Deviates, match="3 is off") as caught:
            on(host).measure(iter([1, 2, 3]).__next__, off, lambda _, told=told: told)  # type: ignore[misc]
        assert caught.value.late == late
        assert str(host) in str(caught.value)
    with pytest.raises(Deviates) as caught:  # late in two attempts of three
        on(CALM).measure(iter([1, 2, 3]).__next__, off, lambda result: ["late"] * (result > 1))
    assert not caught.value.late


def test_a_certificate_is_judged_by_its_verdicts_and_only_a_late_probe_is_an_excuse() -> None:
    shaped = cell("int8", profile("home", pipe(80_000_000, 10_000_000), pipe(80_000_000, 10_000_000)))
    passed, failed = (certificate(shaped, verdict) for verdict in ("PASS", "FAIL"))
    assert failures(passed) == certified_lateness(passed) == []
    assert failures(failed)
    fitness = Fitness(relay=Lateness(9.0, 16.0, 500), probe=Lateness(0.1, 0.2, 500), stolen=0.0, busy=0.3)
    late_relay = passed.model_copy(update={"measurements": tuple(fitness.measurements())})
    assert failures(late_relay)
    assert certified_lateness(late_relay) == []
    with pytest.raises(Deviates) as caught:  # a relay that became slow: on a host that keeps time it must not pass
        on(CALM).certify(lambda: late_relay)
    assert not caught.value.late
    late_probe = passed.model_copy(
        update={"measurements": tuple(replace(fitness, relay=None, probe=Lateness(2.0, 4.0, 9)).measurements())}
    )
    assert certified_lateness(late_probe) == ["CPU contention: the probe was 2.00 ms late (p99)"]
    assert on(CALM).certify(iter([failed, passed]).__next__) is passed


def test_a_halt_counts_for_as_long_as_it_lasts() -> None:
    """20 ms in a second: 2 % of the packets are late, though only one nap of a thousand was."""
    assert lateness_ms(0.0002) == [pytest.approx(0.2)]
    assert lateness_ms(0.020) == [pytest.approx(20 - missed) for missed in range(20)]


def test_the_watch_knows_other_programs_from_our_own() -> None:
    """Our own children are none of the others; a process that left us is one."""
    away = "import os, time; child = os.fork(); print(child) if child else (os.close(1), time.sleep(60))"
    with subprocess.Popen(["sleep", "60"]) as ours, watch() as seen:
        left = int(subprocess.run([sys.executable, "-c", away], stdout=subprocess.PIPE, check=True).stdout)
        others = ticks_of_others()
        os.kill(left, signal.SIGKILL)
        ours.kill()
    assert left in others
    assert not others.keys() & {ours.pid, os.getpid()}
    assert 0 <= seen().p99_ms <= seen().worst_ms
    assert 0 <= seen().stolen <= 1


_SUITE = """
import pytest
from tests import quiet as clock

pytestmark = pytest.mark.quiet


@pytest.fixture
def quiet(quiet, late):
    import contextlib

    @contextlib.contextmanager
    def pretend():
        yield lambda: clock.Host(5.0 if late else 0.0, 0.0, 0.0, 0.0)

    quiet._watch = pretend
    return quiet


@pytest.mark.parametrize("late", [False, True])
def test_wrong(quiet):
    quiet.measure(int, lambda _: ["off by a mile"])


@pytest.mark.parametrize("late", [False, True])
def test_right(quiet):
    quiet.measure(int, lambda _: [])
"""


@pytest.mark.parametrize(
    ("required", "outcomes"),
    [("", {"failed": 1, "skipped": 1, "passed": 2}), ("quiet", {"failed": 2, "passed": 2})],
)
def test_a_late_host_skips_with_its_lateness_unless_it_is_required_to_keep_time(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, required: str, outcomes: dict[str, int]
) -> None:
    tests = Path(__file__).parent
    monkeypatch.setenv("TESTBED_REQUIRE", required)
    monkeypatch.setenv("PYTHONPATH", f"{tests}:{tests.parent}")
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nmarkers = ["quiet: x"]\n')
    pytester.makeconftest("from quiet_conftest import *")
    pytester.makepyfile(quiet_conftest=(tests / "conftest.py").read_text(), test_suite=_SUITE)
    done = pytester.runpytest_subprocess("-ra", "--alone", "-p", "no:cacheprovider")
    done.assert_outcomes(**outcomes)
    done.stdout.fnmatch_lines(["*off by a mile; a real-time sleeper was 5.00 ms late*"])
