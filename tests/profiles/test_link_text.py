"""Links written where a profile is named."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.profiles import buffer_remark, load_profile


@given(megabits=st.integers(1, 100_000), delay_us=st.integers(0, 10_000_000), space=st.sampled_from(["", " ", "  "]))
def test_rate_and_delay_are_those_of_both_directions(megabits: int, delay_us: int, space: str) -> None:
    link = load_profile(f"link({megabits}Mbit,{space}{delay_us}us)")
    assert re.fullmatch(r"[\w.%-]+", link.name)
    for pipe in (link.up, link.down):
        assert pipe.rate_bps == megabits * 10**6
        assert pipe.delay_ns == delay_us * 1000
        assert pipe.loss is None


def test_it_is_the_profile_that_it_says_it_starts_from() -> None:
    written, shipped = load_profile("link(80Mbit, 10ms)"), load_profile("consumer-80mbps")
    silent = {"name", "summary", "source"}
    assert written.model_dump(exclude=silent) == shipped.model_dump(exclude=silent)


def test_what_follows_changes_both_directions_one_or_the_link() -> None:
    link = load_profile("link(20Mbit, 50ms, loss=0.1%, up.rate=5Mbit, mtu=1400, down.seed=7)")
    assert link.up
    assert link.down
    assert (link.up.rate_bps, link.down.rate_bps, link.mtu, link.down.seed) == (5_000_000, 20_000_000, 1400, 7)
    assert link.up.mean_loss == link.down.mean_loss == pytest.approx(0.001)
    burst = '{model="gilbert-elliott", enter_bad="1%", leave_bad="30%", lost_in_bad="100%", lost_in_good="0%"}'
    bursty = load_profile(f"link(20Mbit, 50ms, loss={burst})")
    assert bursty.up
    assert bursty.up.loss


def test_the_same_link_is_one_however_it_is_written() -> None:
    links = {load_profile(text) for text in ("link(80Mbit, 10ms)", " link(80000kbit,0.01s)", "link (80Mbit , 10ms )")}
    assert [link.name for link in links] == ["link-80Mbit-10ms"]
    assert len({load_profile(f"link(80Mbit, 10ms{more})").name for more in ("", ", loss=1%", ", up.loss=1%")}) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("link()", "write link"),
        ("link(80Mbit)", "write link"),
        ("link(80Mbit, 10ms", "write link"),
        ("link(80Mbit, 10ms,)", "write link"),
        ("link(rate=80Mbit, 10ms)", "write link"),
        ("link(80, 10ms)", "80"),
        ("link(80Mbit, 10)", "10"),
        ("link(80Mbit, 10ms, colour=red)", "colour"),
        ("link(80Mbit, 10ms, seed=7)", "seed"),
        ("link(80Mbit, 20s)", "delay"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str) -> None:
    with pytest.raises(SpecError, match=says) as error:
        load_profile(text)
    assert text in str(error.value)


def test_a_buffer_that_nobody_stated_is_named_where_it_is_too_small() -> None:
    said = buffer_remark([load_profile(f"link(7Mbit, {delay}ms)") for delay in (90, 10, 200)], 1)
    assert said.startswith("link-7Mbit-90ms, link-7Mbit-200ms has no stated buffer; the default 100ms is less than")
    assert "buffer=400ms" in said


@pytest.mark.parametrize(
    ("link", "links_in_path", "small"),
    [
        ("link(7Mbit, 50ms)", 1, False),
        ("link(7Mbit, 51ms)", 1, True),
        ("link(7Mbit, 26ms)", 2, True),
        ("link(7Mbit, 90ms, buffer=100ms)", 1, False),  # somebody wants it so
        ("link(7Mbit, 90ms, loss=0.1%)", 1, True),
        ("link(7Mbit, 90ms, congestion_control=bbr)", 1, False),
        ("geo", 1, False),
    ],
)
def test_who_states_a_buffer_hears_nothing_of_it(link: str, links_in_path: int, small: bool) -> None:
    assert (buffer_remark([load_profile(link)], links_in_path) is not None) == small
