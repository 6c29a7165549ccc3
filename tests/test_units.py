from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import units
from testbed.errors import SpecError

_PARSERS = (units.parse_rate, units.parse_time, units.parse_size, units.parse_fraction)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_rate, "80Mbit", 80_000_000),
        (units.parse_rate, "1.5mbit/s", 1_500_000),
        (units.parse_rate, "18.88 Mbit", 18_880_000),
        (units.parse_time, "0.5us", 500),
        (units.parse_time, "25ms", 25_000_000),
        (units.parse_size, "64KiB", 65536),
        (units.parse_size, "256kB", 256_000),
        (units.parse_fraction, "0.1%", 0.001),
    ],
)
def test_reads_what_files_write(parse, text, value) -> None:
    assert parse(text) == value


@pytest.mark.parametrize("parse", _PARSERS)
@pytest.mark.parametrize(
    "text", ["", "80", "Mbit", "-3ms", "3 parsecs", "1e3ms", "٣ms", 80, None, True, 8.0, "nanms", "5 %%"]
)
def test_refuses_what_has_no_unit_or_another(parse, text) -> None:
    with pytest.raises(SpecError) as caught:
        parse(text)
    assert repr(text) in str(caught.value)


def test_refuses_parts_of_a_base_unit() -> None:
    with pytest.raises(SpecError, match="whole number of ns"):
        units.parse_time("0.5ns")
    with pytest.raises(SpecError, match="more than 100%"):
        units.parse_fraction("101%")


@given(st.integers(1, 10**12))
def test_a_formatted_rate_reads_back_within_its_digits(rate: int) -> None:
    number, unit = units.format_rate(rate).split()
    assert "e" in number or abs(units.parse_rate(f"{float(number):f}{unit}") - rate) <= rate * 1e-3 + 1


@given(st.text(max_size=20))
def test_any_text_is_a_number_or_a_spec_error(text: str) -> None:
    for parse in _PARSERS:
        with contextlib.suppress(SpecError):
            assert parse(text) >= 0


@given(st.integers(0, 10**15))
def test_what_is_written_reads_back_exactly(value: int) -> None:
    for write, parse in (
        (units.write_rate, units.parse_rate),
        (units.write_time, units.parse_time),
        (units.write_size, units.parse_size),
    ):
        assert parse(write(value)) == value


@given(st.floats(0, 1))
def test_a_written_fraction_reads_back_to_the_last_bit(share: float) -> None:
    assert units.parse_fraction(units.write_fraction(share)) == share


def test_numbers_are_written_in_the_unit_that_people_use() -> None:
    assert units.write_rate(18_880_000) == "18.88Mbit"
    assert units.write_time(12_500_000) == "12.5ms"
    assert units.write_time(86_400_000_000_000) == "86400s"
    assert units.write_size(1499) == "1.499kB"
    assert units.write_fraction(0.001) == "0.1%"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (75, "1 min 15 s"), (3600, "1 h 00 min"), (3599.6, "1 h 00 min"), (60, "1 min 00 s")],
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text
