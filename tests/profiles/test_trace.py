"""Traces: the format, bins, rates to opportunities, CSV, and how a profile names one."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed import profiles
from testbed.errors import SpecError, UnknownNameError
from testbed.profiles import rate_trace
from testbed.profiles.timeline import TRACE_STEP_MS, timeline
from testbed.profiles.trace_sources import RATE_UNITS_BPS, TIME_UNITS_MS, trace_from_csv

PACKET = 12_000_000  # bits per second times milliseconds: 1500 bytes

_times = (
    st.lists(st.integers(0, 50_000), min_size=1, max_size=300)
    .map(sorted)
    .filter(lambda times: times[-1] > 0)
    .map(tuple)
)
_steps = st.lists(st.tuples(st.integers(1, 3_000), st.integers(0, 50_000_000)), min_size=1, max_size=8)


# --- the format


@settings(deadline=None)
@given(_times)
def test_a_trace_reads_back_as_itself(times: tuple[int, ...]) -> None:
    assert rate_trace.parse_trace(rate_trace.format_trace(times), "t") == times


@settings(deadline=None)
@given(st.text(st.sampled_from("0123456789\n\r\t .-x\0٣"), max_size=60))
def test_any_text_is_a_trace_or_a_spec_error(text: str) -> None:
    try:
        times = rate_trace.parse_trace(text, "here")
    except SpecError as error:
        assert str(error).startswith("here")  # noqa: PT017
    else:
        assert list(times) == sorted(times)
        assert times[-1] > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n5\n3\n", "here, line 3: 3 follows 5; a trace's times must not decrease"),
        ("1\n2.5\n", "here, line 2: '2.5' is not a whole number of milliseconds"),
        ("-1\n", "here, line 1: '-1' is not a whole number"),
        ("1 2\n", "here, line 1: '1 2' is not a whole number"),
        ("\n\n", "here has no delivery opportunity"),
        ("0\n0\n", "here: all opportunities are at 0 ms, so the trace has no length"),
        ("86400001\n", "here is 24.0 hours long; shorten it to at most 24"),
    ],
)
def test_what_is_wrong_in_a_trace_is_told_by_line(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        rate_trace.parse_trace(text, "here")
    assert message in str(caught.value)


# --- bins


@settings(deadline=None)
@given(_times, st.integers(1, 2_000))
def test_bins_lose_nothing(times: tuple[int, ...], bin_ms: int) -> None:
    counts = rate_trace.bins(times, bin_ms)
    assert sum(counts) == len(times)
    assert len(counts) == -(-times[-1] // bin_ms)
    edges = range(bin_ms, len(counts) * bin_ms, bin_ms)
    assert list(accumulate(counts))[: len(edges)] == [bisect_right(times, edge) for edge in edges]
    lengths = [bin_ms] * (len(counts) - 1) + [times[-1] - bin_ms * (len(counts) - 1)]
    carried = sum(rate * length for rate, length in zip(rate_trace.bin_rates(times, bin_ms), lengths, strict=True))
    assert carried == pytest.approx(len(times) * PACKET)


# --- from rates


@settings(deadline=None)
@given(_steps)
def test_at_every_moment_a_trace_has_carried_what_its_rates_fill(steps: list[tuple[int, int]]) -> None:
    filled = sum(duration * rate for duration, rate in steps)
    if filled < PACKET:
        with pytest.raises(SpecError, match="not one packet of 1500 bytes fits into the trace"):
            rate_trace.trace_from_rates(steps)
        return
    times = rate_trace.trace_from_rates(steps)
    end = sum(duration for duration, _ in steps)
    assert times[-1] == end
    assert len(times) - filled // PACKET in (0, 1)  # the one that marks the end
    assert list(times) == sorted(times)
    moment = integral = 0
    for duration, rate in steps:
        for probe in {1, duration // 2, duration - 1} - {0, duration}:
            assert bisect_right(times, moment + probe) == (integral + rate * probe) // PACKET
        moment += duration
        integral += duration * rate


@pytest.mark.parametrize("steps", [[(1000, -1)], [(0, 1000)], [(-5, 1000)]])
def test_negative_rates_and_times_are_refused(steps: list[tuple[int, int]]) -> None:
    with pytest.raises(SpecError, match="cannot make a trace of"):
        rate_trace.trace_from_rates(steps)


def test_a_trace_that_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(SpecError, match="more than 5,000,000 packets; make it shorter or slower"):
        rate_trace.trace_from_rates([(86_400_000, 100_000_000_000)])


# --- CSV

_COLUMNS = {"time_column": "t", "rate_column": "r", "time_unit": "s", "rate_unit": "Mbit/s"}


def _convert(text: str, **changes: str) -> tuple[int, ...]:
    return trace_from_csv(text, "x.csv", **{**_COLUMNS, **changes})


def test_a_row_of_a_csv_file_holds_until_the_next() -> None:
    assert _convert("t,place,r\n10,a,12\n11,b,24\n12.5,c,99\n") == rate_trace.trace_from_rates(
        [(1000, 12_000_000), (1500, 24_000_000)]
    )


@pytest.mark.parametrize("time_unit", TIME_UNITS_MS)
@pytest.mark.parametrize("rate_unit", RATE_UNITS_BPS)
def test_every_unit_means_the_same_trace(time_unit: str, rate_unit: str) -> None:
    second, rate = 1000 / TIME_UNITS_MS[time_unit], 24e6 / RATE_UNITS_BPS[rate_unit]
    text = f"t,r\n0,{rate!r}\n{second!r},0\n"
    assert _convert(text, time_unit=time_unit, rate_unit=rate_unit) == rate_trace.trace_from_rates([(1000, 24_000_000)])


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("t,r\n0,1\n1,1\n", {"rate_column": "rate"}, "there is no column of x.csv 'rate'. Known: r, t."),
        ("", {}, "there is no column of x.csv 't'. Known: none"),
        ("t,r\n0,1\n1,1\n", {"time_unit": "h"}, "there is no unit of time 'h'. Known: ms, s, us."),
        ("t,r\n0,1\n1,1\n", {"rate_unit": "Mbps"}, "there is no unit of rate 'Mbps'; did you mean"),
        ("t,r\n0,1\n1,fast\n", {}, "x.csv, line 3: r 'fast' is not a number"),
        ("t,r\n0,1\n1\n", {}, "x.csv, line 3: r None is not a number"),
        ("t,r\n0,1\nnan,1\n", {}, "x.csv, line 3: t 'nan' is not a number"),
        ("t,r\n0,-1\n1,1\n", {}, "x.csv, line 2: r '-1' is not a rate of 0 to 100 Gbit/s; is its unit Mbit/s?"),
        ("t,r\n0,1\n0,1\n", {}, "x.csv, line 3: t '0' is not later than in the previous row; sort the rows"),
        ("t,r\n0,1\n", {}, "x.csv has 1 rows but needs two"),
        (
            "t,r\n0,1\n1,1\n2,1\n",
            {"time_unit": "us"},
            "two rows fall into one millisecond, the unit of a trace; is t's unit us?",
        ),
        ('t,r\n0,"1\n', {}, "x.csv, after line 1: unexpected end of data"),
    ],
)
def test_what_is_wrong_in_a_csv_file_is_told(text: str, changes: dict[str, str], message: str) -> None:
    with pytest.raises((SpecError, UnknownNameError)) as caught:
        _convert(text, **changes)
    assert message in str(caught.value)


@settings(deadline=None)
@given(st.text(st.sampled_from('tr0123456789,\n".-e '), max_size=60))
def test_any_csv_is_a_trace_or_a_message(text: str) -> None:
    try:
        times = _convert("t,r\n" + text)
    except (SpecError, UnknownNameError):
        return
    assert times[-1] > 0


# --- in a profile

_PROFILE = """extends = "lte"
[up]
rate = "12Mbit"
trace = { file = "my.trace", loop = true, offset = "0s" }
"""


def _folder(folder: Path, times: tuple[int, ...]) -> Path:
    (folder / "my.trace").write_text(rate_trace.format_trace(times), encoding="ascii")
    (folder / "mine.toml").write_text(_PROFILE, encoding="utf8")
    return folder / "mine.toml"


def test_a_trace_lies_beside_the_profile_that_names_it(tmp_path: Path) -> None:
    times = rate_trace.trace_from_rates([(5_000, 8_000_000), (5_000, 16_000_000)])
    pipe = profiles.read_profile(_folder(tmp_path, times)).up
    assert (pipe.trace.length_ms, pipe.trace.opportunities) == (10_000, len(times))
    assert rate_trace.load_trace(pipe.trace) == times
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "child.toml").write_text('extends = "../mine.toml"\nmtu = 1400\n', encoding="utf8")
    assert profiles.read_profile(tmp_path / "below" / "child.toml").up == pipe


def test_another_content_is_another_profile(tmp_path: Path) -> None:
    before = profiles.read_profile(_folder(tmp_path, rate_trace.trace_from_rates([(10_000, 12_000_000)]))).up
    after = profiles.read_profile(
        _folder(tmp_path, rate_trace.trace_from_rates([(5_000, 8_000_000), (5_000, 16_000_000)]))
    ).up
    assert before != after
    assert before.trace is not None
    with pytest.raises(SpecError, match=r"cannot find the trace my\.trace with its content when the profile was read"):
        rate_trace.load_trace(before.trace)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("up.rate=13Mbit", "up.rate is 13 Mbit/s, but the trace my.trace carries 12 Mbit/s on average; set that"),
        ("up.trace.offset=10s", "up.trace: offset 10000ms is not before the trace's end at 10000ms"),
        ("up.trace.offset=0.5ms", "up.trace.offset: '0.5ms' is not a whole number of milliseconds"),
        ("up.trace.offset=5", "up.trace.offset: time 5 is not a number with a unit"),
        ("up.trace.loop=1", "up.trace.loop must be true or false, found 1"),
        ("up.trace.file=3", "up.trace.file must be the path of a trace, found 3"),
        ("up.trace.file=none.trace", "up.trace.file: cannot read the trace none.trace: No such file or directory"),
        ("up.trace=my.trace", "up.trace must be a table with file, loop, offset, or 'none', found 'my.trace'"),
        ('up.schedule=[{at="1s",rate="8Mbit"}]', "up: it has both a schedule and a trace; remove one"),
    ],
)
def test_a_mistake_about_a_trace_is_told(tmp_path: Path, override: str, message: str) -> None:
    path = _folder(tmp_path, rate_trace.trace_from_rates([(10_000, 12_000_000)]))
    with pytest.raises(SpecError) as caught:
        profiles.read_profile(path, [override])
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_a_trace_in_the_wrong_order_is_refused_with_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"mine\.toml.*: up\.trace\.file: trace .*my\.trace, line 2: 1 follows 7"):
        profiles.read_profile(_folder(tmp_path, (7, 1)))
    path = _folder(tmp_path, (1, 2))
    (tmp_path / "my.trace").write_bytes(b"\xff\xfe1\n")
    with pytest.raises(SpecError, match=r"my\.trace is not text"):
        profiles.read_profile(path)


# --- as steps


@settings(deadline=None)
@given(steps=_steps, offset_ms=st.integers(0, 20_000), loop=st.booleans())
def test_the_steps_of_a_trace_carry_what_the_trace_does(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int]], offset_ms: int, loop: bool
) -> None:
    steps = [(duration, rate + 240_000) for duration, rate in steps]  # no stand-still: that is another law
    if sum(duration * rate for duration, rate in steps) < PACKET:
        return
    times = rate_trace.trace_from_rates(steps)
    offset_ms %= times[-1]
    file = tmp_path_factory.getbasetemp() / "some.trace"
    file.write_text(rate_trace.format_trace(times), encoding="ascii")
    record = profiles.RateTrace(
        file="x",
        digest=rate_trace.read_trace(file).digest,
        length_ms=times[-1],
        opportunities=len(times),
        loop=loop,
        offset_ms=offset_ms,
    )
    pipe = profiles.load_profile("lte").up
    line = timeline(pipe.model_copy(update={"trace": record}))
    assert [step.at_ns for step in line.steps] == sorted({step.at_ns for step in line.steps})
    assert line.steps[0].at_ns == 0
    length_ns = times[-1] * 1_000_000
    slowest = 120_000
    if loop:
        assert line.repeat_ns == length_ns
        # A round carries the trace: no less than a byte a second and a step rounded away, no more than the slowest rate
        # adds.
        least = len(times) * 12_000 - (len(line.steps) + 1) * 8 * TRACE_STEP_MS / 1000
        assert least <= line.bits_between(0, length_ns) <= len(times) * 12_000 + slowest * times[-1] / 1000
    else:
        assert line.repeat_ns is None
        assert line.at(length_ns - offset_ms * 1_000_000) == line.steps[-1]
        assert line.steps[-1].rate_bps == pipe.rate_bps
