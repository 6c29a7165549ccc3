"""Cells: which links a lab of a cell has, and what a frame crosses on its way."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from testbed.profiles import load_profile
from testbed.spec import Cell, SiteSpec, Topology, recipe_of, route
from tests.small_replicas import a_recipe, cell_of
from tests.synthetic import cell


def _cell(topology: Topology, *profiles: str) -> Cell:
    return cell("fp32", tuple(load_profile(name) for name in profiles), topology=topology)


def test_there_is_a_profile_for_all_links_or_one_for_each() -> None:
    assert _cell("line", "cable", "lte").shaped
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


def test_a_site_adds_its_link_to_a_frame_s_way_and_to_the_cell_s_links_and_id() -> None:
    plain = _cell("star", "cable")
    site = SiteSpec(nodes=(0, 1), profile=load_profile("lte"))
    ours = Cell.model_validate(plain.model_dump() | {"sites": (site.model_dump(),)})
    assert "sites" not in plain.model_dump_json()
    assert ours.id != plain.id
    assert ours.id == Cell.model_validate_json(ours.model_dump_json()).id
    assert ours.network == "cable@lte-0.1"
    assert [(hop.link, hop.side) for hop in route(ours, 1, 2)] == [(1, "up"), (3, "up"), (2, "down")]
    assert [(hop.link, hop.side) for hop in route(ours, 0, 1)] == [(0, "up"), (1, "down")]
    assert ours.link_names == ("node-0", "node-1", "node-2", "site-0")
    assert ours.links[3] == site.profile
    with pytest.raises(ValidationError, match="node 7"):
        Cell.model_validate(plain.model_dump() | {"sites": ({"nodes": (7,), "profile": site.profile.model_dump()},)})


def test_a_cells_id_changes_with_anything_in_it_and_with_nothing_else() -> None:
    ours = _cell("star", "cable")
    assert ours.id == Cell.model_validate_json(ours.model_dump_json()).id
    changes = (
        {"topology": "line"},
        {"profiles": (load_profile("cable", ["up.rate=40Mbit"]),)},
        {"engine": "netem" if ours.engine == "relay" else "relay"},
        {"training": ours.training.model_copy(update={"seed": 7})},
    )
    ids = {ours.id, *(ours.model_copy(update=change).id for change in changes)}
    assert len(ids) == 1 + len(changes)
    assert all(each.startswith("fp32-cable-") for each in ids)


def test_checkpoints_are_in_no_id_and_no_record() -> None:
    ours = cell_of(a_recipe())
    kept = ours.model_copy(update={"training": ours.training.model_copy(update={"checkpoint_every": 5})})
    assert recipe_of(kept).training.checkpoint_every == 5
    assert kept.model_dump_json() == ours.model_dump_json()
    assert (kept.id, recipe_of(kept).id) == (ours.id, recipe_of(ours).id)
