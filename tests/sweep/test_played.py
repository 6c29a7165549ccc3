"""The default path through the command line: cells are trained once and played over every network, exactly."""

from __future__ import annotations

import pytest

from testbed import results
from testbed.results import Run
from tests.commands import Command, losses, sets
from tests.known import known

pytestmark = [pytest.mark.slow, pytest.mark.clock_kernel]

Played = dict[tuple[str, str], Run]
"""The runs of a sweep of two codecs over two networks, by codec and network."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    with Command.standing(tmp_path_factory.mktemp("played"), "netem") as command:
        axes = 'codec = ["fp32", "delta-int8"]\nprofile = ["datacenter", "consumer-80mbps"]'
        folder = command.write_experiment("", axes)
        sweep = ["sweep", "sweep.toml", "--timing", "played", "--clock", "virtual", "--live-checks", "0"]
        sweep += sets("pipeline.stages=2", "training.steps=6", "training.evaluate_every=3", "codec_cost=zero")
        command.finish(*sweep)
        runs = [run for cell_id in results.last_sweep(folder).cells for run in results.finished_runs(folder, cell_id)]
        assert len(runs) == 4
        assert (folder / "report.html").stat().st_size > 10_000
    return {(run.cell.codec, run.cell.network): run for run in runs}


def test_losses_are_those_of_the_codec_over_any_network(played: Played) -> None:
    curves = {codec: losses(played[codec, "datacenter"]) for codec in ("fp32", "delta-int8")}
    assert curves["fp32"] != curves["delta-int8"]
    for (codec, _), run in played.items():
        assert None not in curves[codec]
        assert len(curves[codec]) == 6 + 2
        assert losses(run) == curves[codec]


def test_links_are_certified_and_less_takes_less_where_a_link_is_slow(played: Played) -> None:
    step_s = {}
    for key, run in played.items():
        certificate = known(run.certificates.before)
        assert (certificate.clock, certificate.verdict) == ("virtual", "PASS")
        summary = known(run.summary)
        step_s[key] = known(summary.step_s)
        assert known(summary.ideal_step_s) <= step_s[key] * (1 + 1e-6)
    # Two stages: four micro-batches of 2 + 4 ms, and the bubble of one stage.
    assert step_s["fp32", "datacenter"] == pytest.approx(0.030, rel=1e-3)
    assert step_s["delta-int8", "datacenter"] == pytest.approx(0.030, rel=1e-3)
    assert 0.030 < step_s["delta-int8", "consumer-80mbps"] < step_s["fp32", "consumer-80mbps"]
