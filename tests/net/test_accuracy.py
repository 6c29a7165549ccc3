"""The accuracy grid: which points, what a result says, whether two engines agree; and one point for real."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from testbed.directions import LINK_DIRECTIONS
from testbed.net.certificate import accuracy
from testbed.net.certificate.accuracy import Accuracy, GridPoint, PointResult
from testbed.net.machine.capabilities import resolve_engine
from testbed.profiles import Bernoulli
from testbed.records import Certificate, Measurement
from testbed.report import link_accuracy as drawn

PLAIN = GridPoint(rate_bps=80_000_000, delay_ns=25_000_000, loss=None, busy=False)
LOSSY = PLAIN.model_copy(update={"loss": Bernoulli(probability=0.01)})
_EXACT: dict[str, tuple[str, float, float]] = {  # quantity -> unit, ideal, tolerance
    "rtt": ("ms", 50.0, 0.5),
    "goodput": ("bit/s", 77e6, 0.77e6),
    "message 262144": ("ms", 52.0, 1.5),
    "message 4194304": ("ms", 460.0, 13.8),
    "queue": ("ms", 50.0, 5.0),
    "jitter": ("ms", 0.0, 0.3),
}


def _measurement(kind: str, way: str, off: float) -> Measurement:
    """`off` tolerances away from what was asked."""
    unit, ideal, tolerance = _EXACT[kind]
    quantity, _, size = kind.partition(" ")
    return Measurement(
        link="node-0",
        direction=way,
        quantity=quantity,
        detail=f"{size} bytes after idle, cubic" if size else f"over {off:.3f}",
        unit=unit,
        expected=ideal,
        measured=ideal + off * tolerance,
        tolerance=tolerance,
        samples=5,
        verdict="PASS" if abs(off) <= 1 else "FAIL",
        note="",
    )


def _result(point: GridPoint = PLAIN, **off: float) -> PointResult:
    """Exact, but for the quantities named."""
    names = {name: name.replace(" ", "_") for name in _EXACT}
    found = [_measurement(name, way, off.get(field, 0.0)) for name, field in names.items() for way in LINK_DIRECTIONS]
    certificate = Certificate(
        form="full", engine="relay", taken_at="now", seconds=1.0, measurements=tuple(found), rejected=()
    )
    return PointResult(point=point, certificate=certificate, error="")


def _accuracy(*results: PointResult, **machine: Any) -> Accuracy:
    return Accuracy(engine="relay", engine_reason="asked for", machine=machine, results=results)


@pytest.mark.parametrize("engine", ["relay", "netem"])
def test_the_grid_has_every_rate_with_every_delay_and_both_loss_models(engine: Any) -> None:
    found = accuracy.grid(engine, busy=True)
    assert len(set(found)) == len(found)
    plain = {(p.rate_bps // 10**6, p.delay_ns // 10**6) for p in found if p.loss is None and not p.busy}
    rates = {10, 80, 300} | ({1000} if engine == "netem" else set())
    assert plain == {(rate, delay) for rate in rates for delay in (5, 25, 100)}
    assert {p.loss.model for p in found if p.loss} == {"bernoulli", "gilbert-elliott"}
    assert {p.model_copy(update={"busy": True}) for p in found if not p.busy} == {p for p in found if p.busy}
    assert len(accuracy.grid(engine, quick=True)) == 3
    assert set(accuracy.grid(engine, quick=True)) < set(found)


def test_every_point_is_a_profile_that_both_engines_carry() -> None:
    for point in accuracy.grid("netem", busy=True):
        profile = point.profile()
        assert profile.up == profile.down
        assert profile.up.rate_bps % 8 == 0
        assert profile.up.buffer_ns >= 2 * profile.up.delay_ns


@pytest.mark.parametrize("kind", ["rtt", "goodput", "message_262144", "message_4194304", "queue"])
def test_a_point_fails_when_one_quantity_is_off_and_says_which(kind: str) -> None:
    assert _result().passed
    off = _result(**{kind: 1.5})
    assert not off.passed
    assert [cell.endswith(drawn.FAILED) for cell in drawn.accuracy_rows(_accuracy(off))[0][3:-1]].count(True) == 1
    assert drawn.accuracy_rows(_accuracy(off))[0][-1] == "FAIL"
    assert not any(cell.endswith(drawn.FAILED) for cell in drawn.accuracy_rows(_accuracy(_result()))[0])


def test_a_point_is_judged_by_what_it_is_about() -> None:
    assert _result(jitter=3.0).passed
    assert not _result(LOSSY).passed  # nothing in it speaks of losses


def test_a_point_without_a_certificate_fails_and_says_why() -> None:
    failed = PointResult(point=PLAIN, certificate=None, error="the relay ended")
    assert not failed.passed
    assert "the relay ended" in drawn.accuracy_rows(_accuracy(failed))[0][-1]


def test_engines_agree_within_two_per_cent_or_a_third_of_a_millisecond() -> None:
    one = _accuracy(_result())
    assert all(found.holds for found in accuracy.agreement(one, one))
    assert all(found.holds for found in accuracy.agreement(one, _accuracy(_result(rtt=0.5))))  # 0.25 ms
    deeper = _accuracy(_result(queue=0.9))  # within its own tolerance of 10 %
    assert {found.quantity for found in accuracy.agreement(one, deeper) if not found.holds} == {"queue"}
    assert ("queue", "FAIL") in {(row[0], row[-1]) for row in drawn.agreement_rows(one, deeper)}
    other_point = _result(PLAIN.model_copy(update={"busy": True}))
    assert accuracy.agreement(one, _accuracy(other_point)) == ()


def test_links_that_failed_are_not_compared() -> None:
    one, failed = _accuracy(_result()), _accuracy(_result(goodput=-3.0))
    assert accuracy.agreement(one, failed) == accuracy.agreement(failed, one) == ()


def test_results_survive_their_file_and_become_a_page_in_the_grid_s_order() -> None:
    late, early = _result(PLAIN), _result(PLAIN.model_copy(update={"rate_bps": 10_000_000}))
    found = _accuracy(late, early, cpu_model="A Processor", cores=2, kernel="6.1", taken_at="2026-01-01T00:00:00")
    again = Accuracy.model_validate_json(found.model_dump_json())
    assert again == found
    page = drawn.accuracy_page([again, found])
    assert "A Processor, 2 processors, Linux 6.1, 2026-01-01" in page
    assert page.index("| 10 Mbit/s |") < page.index("| 80 Mbit/s |")
    assert "The engines against each other" in page
    for table in page.split("\n\n"):
        widths = {line.count("|") for line in table.splitlines() if line.startswith("|")}
        assert len(widths) <= 1


@pytest.mark.slow
def test_busy_loops_end_with_their_block_and_take_every_processor() -> None:
    def ticks() -> int:
        return sum(int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:3])

    with accuracy._busy_processors():
        time.sleep(0.2)  # their start
        before = ticks()
        time.sleep(0.5)
        used = (ticks() - before) / os.sysconf("SC_CLK_TCK")
    assert used > 0.25 * len(os.sched_getaffinity(0))  # half of what two idle processors would give


@pytest.mark.netem
@pytest.mark.virtual_clock
def test_one_point_for_real() -> None:
    engine, reason = resolve_engine("netem")
    point = PLAIN.model_copy(update={"rate_bps": 10_000_000, "delay_ns": 5_000_000})
    result = accuracy.measure_point(point, engine, reason)
    assert result.passed, [result.error, *(m for m in result.measurements() if m.verdict == "FAIL")]
    assert all(
        accuracy.column_measurements(result, column) for column in ("rtt", "goodput", "256 KiB", "4 MiB", "queue")
    )
