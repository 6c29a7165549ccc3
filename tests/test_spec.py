"""Cells: which links a lab of a cell has, and what a frame crosses on its way."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from testbed.profiles import LinkProfile, load_profile
from testbed.spec import Cell, Topology, link_count, route
from tests.synthetic import cell


def _cell(topology: Topology, *profiles: str) -> Cell:
    return cell("fp32", tuple(load_profile(name) for name in profiles), topology=topology)


def _names(links: tuple[LinkProfile, ...]) -> list[str]:
    return [link.name for link in links]


def test_one_profile_is_that_of_every_link() -> None:
    assert _names(_cell("star", "cable").links) == ["cable"] * 3
    assert _names(_cell("line", "cable").links) == ["cable"] * 2
    assert link_count("star", 5) == 5
    assert link_count("line", 5) == 4


def test_each_link_can_have_its_own() -> None:
    ours = _cell("line", "cable", "lte")
    assert _names(ours.links) == ["cable", "lte"]
    assert ours.network == "cable+lte"
    assert ours.shaped
    assert not _cell("star", "datacenter").shaped
    for topology, count in (("star", 3), ("line", 2)):
        says = f"a {topology} of 3 stages, which has {count} links; state one for all"
        with pytest.raises(ValidationError, match=says):
            _cell(topology, *["cable"] * (5 - count))


def test_in_a_star_a_frame_crosses_the_senders_uplink_and_the_receivers_downlink() -> None:
    ours = _cell("star", "cable", "lte", "datacenter")
    assert [(hop.link, hop.side, hop.profile.name) for hop in route(ours, 0, 1)] == [
        (0, "up", "cable"),
        (1, "down", "lte"),
    ]
    assert [(hop.link, hop.side) for hop in route(ours, 1, 0)] == [(1, "up"), (0, "down")]
    assert route(ours, 1, 2)[1].pipe is None


def test_in_a_line_it_crosses_the_one_link_between_them() -> None:
    ours = _cell("line", "cable", "lte")
    assert [(hop.link, hop.side, hop.pipe) for hop in route(ours, 1, 2)] == [(1, "up", load_profile("lte").up)]
    assert [(hop.link, hop.side, hop.pipe) for hop in route(ours, 2, 1)] == [(1, "down", load_profile("lte").down)]


def test_a_cells_id_changes_with_anything_in_it() -> None:
    ours = _cell("star", "cable")
    assert ours.id == _cell("star", "cable").id
    assert ours.id != _cell("line", "cable").id
    faster = (load_profile("cable", ["up.rate=40Mbit"]),)
    assert ours.model_copy(update={"profiles": faster}).id != ours.id
    assert ours.id.startswith("fp32-cable-")


def test_records_are_frozen() -> None:
    with pytest.raises(ValidationError):
        load_profile("cable").mtu = 9000  # type: ignore[misc]
