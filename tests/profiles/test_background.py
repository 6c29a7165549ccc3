"""Background flows in profiles, and changes after a profile's name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import SpecError, UserError
from testbed.frozen import canonical_json
from testbed.profiles import load_profile, profile_files, read_profile, split_networks, write_profile

FLOWS = st.one_of(
    st.builds(
        "{} {} {}".format,
        st.integers(1, 100),
        st.sampled_from(["cubic", "bbr", "reno"]),
        st.sampled_from(["up", "down"]),
    ),
    st.builds("web {}".format, st.sampled_from(["up", "down"])),
    st.builds("call {}kbit {}".format, st.integers(8, 10**6), st.sampled_from(["up", "down"])),
    st.sampled_from(["call up", "call down"]),
)
LISTS = st.lists(FLOWS, min_size=1, max_size=4)


def _texts(name: str) -> list[str]:
    return [flow.text for flow in load_profile(name).background or ()]


@given(texts=LISTS)
def test_flows_read_back_from_the_command_line_and_from_a_file(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    profile = load_profile(f"cable, background={' + '.join(texts)}")
    assert profile.background is not None
    again = _texts(f"cable, background={'+'.join(flow.text for flow in profile.background)}")
    assert again == [flow.text for flow in profile.background]
    file = tmp_path_factory.mktemp("profile") / f"{profile.name[:100]}.toml"
    file.write_text(write_profile(profile), encoding="utf8")
    assert read_profile(file).background == profile.background


@given(
    st.lists(
        st.one_of(
            st.sampled_from(["cable", "link(80Mbit, 10ms)"]),
            LISTS.map(lambda texts: f"lte, background={' + '.join(texts)}"),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_plus_between_flows_does_not_split_a_network(names: list[str]) -> None:
    assert split_networks("+".join(names)) == names


@given(st.text(max_size=40))
def test_hostile_text_is_a_user_error(text: str) -> None:
    try:
        profile = load_profile(f"cable, background={text}")
    except UserError:
        return
    assert profile.background is None or all(flow.text for flow in profile.background)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("cable, background=2 cubic", "is not a flow; write"),
        ("cable, background=0 cubic up", "is not a flow"),
        ("cable, background=1 $ up", "congestion"),
        ("cable, background=call 3 up", "3"),
        ("cable, background=101 cubic up", "101|100"),
        ("cable, background=1 cubic up +", "is not a flow"),
        ("datacenter, background=1 cubic up", "up is unshaped"),
        ("cable, colour=red", "colour"),
        ("cable,", "KEY=VALUE"),
        ("cable, seed=4", "seed"),
    ],
)
def test_what_is_wrong_is_said(name: str, says: str) -> None:
    with pytest.raises((SpecError, UserError), match=says):
        load_profile(name)


def test_changes_after_a_name_change_both_directions_one_or_the_link() -> None:
    plain, changed = load_profile("cable"), load_profile("cable, up.buffer=1s, loss=1%, mtu=1400")
    assert changed.up
    assert changed.down
    assert plain.up
    assert (changed.up.buffer_ns, changed.mtu) == (10**9, 1400)
    assert changed.up.mean_loss == changed.down.mean_loss == pytest.approx(0.01)
    assert changed.up.rate_bps == plain.up.rate_bps
    assert changed.name == "cable-loss-1%-mtu-1400-up.buffer-1s"
    assert "up.buffer=1s" in changed.summary
    assert changed.source.endswith("Changed: loss=1%, mtu=1400, up.buffer=1s.")


def test_what_no_profile_has_changes_no_profile() -> None:
    """A cell's id is the digest of this text."""
    for name in profile_files():
        assert "background" not in canonical_json(load_profile(name))


def test_a_dilated_link_dilates_what_others_send() -> None:
    profile = load_profile("link(80Mbit, 10ms, background=call up + web down + 2 bbr up)")
    call, web, bulk = profile.dilated(10).background or ()
    assert (call.rate_bps, call.pause_ns, web.pause_ns) == (260_000, 200_000_000, 20_000_000_000)
    assert profile.background is not None
    assert bulk == profile.background[2]
    assert profile.by_chance


def test_none_removes_what_a_file_states(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('extends = "cable"\nbackground = ["1 cubic up", "call down"]\n', encoding="utf8")
    assert _texts(str(file)) == ["1 cubic up", "call 2.6Mbit down"]
    assert load_profile(f"{file}, background=none").background is None
