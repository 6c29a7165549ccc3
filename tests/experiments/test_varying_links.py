"""varying_links: what it asks for, and its figures from results that are pretended."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pandas
import pytest

from testbed import results
from testbed.profiles import load_profile
from testbed.sweep import plan
from tests.commands import Command, draw
from tests.synthetic import Pipeline, cell, record_sweep, write_run

NAME = "varying_links"
FOLDER = Command.shipped / NAME
SIZES = {"bf16": 32_768, "int4(group=64)": 8_704, "adaptive(45.0)": 12_000}


def test_what_chooses_is_live_on_the_virtual_clock_and_the_rest_is_played_over_the_same_links() -> None:
    cells = plan.cells(plan.load_experiment(NAME), "netem", clock="virtual")
    arms = {(one.codec, one.network): one for one in cells}
    assert len(arms) == len(cells)
    assert len({one.network for one in cells}) * len({one.codec for one in cells}) == len(cells)
    for one in cells:
        assert (one.timing == "live") == one.codec.startswith("adaptive")
        assert (one.clock, one.codec_cost) == ("virtual", "zero")
        assert one.profiles[0].varies
    assert len({(one.workload, one.pipeline, one.training, one.compute) for one in cells}) == 1


@pytest.mark.slow
def test_its_figures_and_verdicts(tmp_path: Path) -> None:
    home, output = results.make_folder(tmp_path / "results"), tmp_path / "drawn"
    cells = []
    for name in ("cable", "lte"):
        profile = load_profile(name)
        for codec, payload in SIZES.items():
            what = cell(codec, profile, steps=6)
            write_run(home, what, Pipeline(profile, payload_bytes=payload, raw_bytes=65_536))
            cells.append(what)
    record_sweep(home, cells)
    said = draw(FOLDER, home, output)
    assert matplotlib.image.imread(output / "steps.png").std() > 0
    runs = pandas.read_csv(output / "summary.csv").set_index(["network", "codec"])
    assert len(runs) == len(cells)
    for name in ("cable", "lte"):
        one = runs.loc[name]
        assert one.bits_per_value["bf16"] == pytest.approx(16, rel=0.01)
        ratio = one.mean_step_s["bf16"] / one.mean_step_s["adaptive(45.0)"]
        assert f"Over {name}, adaptive(45.0) is {ratio:.2f} times as fast as bf16" in " ".join(said.split())
    assert len(pandas.read_csv(output / "claims.csv")) == 4
