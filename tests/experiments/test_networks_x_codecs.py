"""networks_x_codecs: what it asks for, and its maps from results that are pretended."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import matplotlib.image
import pandas
import pytest

from testbed import profiles
from testbed.codecs.catalogue import placement
from testbed.devices import device_codec_ns, load_device, rates_of
from testbed.sweep import plan
from tests.commands import Command, draw
from tests.synthetic_grid import write_grid

NAME = "networks_x_codecs"
FOLDER = Command.shipped / NAME


@pytest.fixture(scope="module")
def cells():  # type: ignore[no-untyped-def]
    return plan.cells(plan.load_experiment(NAME), "netem")


@pytest.mark.slow
def test_a_whole_grid_and_every_shipped_profile_for_each_codec_and_device(cells) -> None:  # type: ignore[no-untyped-def]
    networks = {cell.network: cell.profiles[0] for cell in cells}
    grid = [profile for name, profile in networks.items() if name.startswith("link-")]
    rates = {profile.up.rate_bps for profile in grid if profile.up}
    delays = {profile.up.delay_ns for profile in grid if profile.up}
    assert len(grid) == len(rates) * len(delays) >= 48
    assert set(profiles.profile_files()) <= set(networks)
    each = Counter((cell.codec, cell.network) for cell in cells)
    assert len({cell.codec for cell in cells}) == 8
    # Three devices over the grid, the laptop over the shipped profiles.
    assert {count for (_, network), count in each.items() if network.startswith("link-")} == {3}
    assert {count for (_, network), count in each.items() if not network.startswith("link-")} == {1}
    assert len({(cell.pipeline, cell.topology, cell.training, cell.workload.model) for cell in cells}) == 1


def test_every_codec_has_a_cost_on_every_device(cells) -> None:  # type: ignore[no-untyped-def]
    for codec in {cell.codec for cell in cells}:
        for spec in placement.parse_placement(codec).specs():
            for device in ("laptop-cpu", "rtx-4090", "a100"):
                encode, decode = device_codec_ns(spec, "backward", (1, 256, 768), rates_of(load_device(device)))
                assert encode > 0
                assert decode > 0


@pytest.mark.slow
def test_the_maps_are_drawn(tmp_path: Path) -> None:
    results, output = write_grid(tmp_path / "results"), tmp_path / "drawn"
    said = draw(FOLDER, results, output)
    for name in ("choice", "speed-up", "limits"):
        assert matplotlib.image.imread(output / f"{name}.png").std() > 0
    assert len(pandas.read_csv(output / "summary.csv")) == 42
    for part in ("| codec |", "| int8 |", "slow", "quick", "1 of 42 runs"):
        assert part in said
    # Other cells keep their rows, and the maps are those of all.
    table = output / "summary.csv"
    whole = pandas.read_csv(table)
    stale = pandas.concat([whole, whole.iloc[:1].assign(network="elsewhere")]).assign(step_s=9.0)
    stale.to_csv(table, index=False)
    (output / "choice.png").unlink()
    draw(FOLDER, results, output)
    merged = pandas.read_csv(table)
    assert list(merged[merged.step_s == 9.0].network) == ["elsewhere"]
    pandas.testing.assert_frame_equal(merged[merged.network != "elsewhere"].reset_index(drop=True), whole)
    assert (output / "choice.png").exists()
