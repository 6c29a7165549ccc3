"""A link that collapses or is dead for a while, played and live, in guests: no step of it goes unmentioned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed import results
from testbed.metrics.worst_step import MUCH_WORSE
from testbed.records import Summary
from tests.commands import Command, sets
from tests.known import known

pytestmark = [pytest.mark.slow, pytest.mark.clock_kernel]

FROM_S, UNTIL_S = 2, 6
PROFILE = """
extends = "consumer-80mbps"
summary = "For a while it is as good as dead"
[up]
schedule = [{{ at = "{since}s", {values} }}, {{ at = "{until}s", rate = "80Mbit", loss = "none" }}]
"""


def link(folder: Path, name: str, values: str) -> str:
    path = folder / f"{name}.toml"
    path.write_text(PROFILE.format(since=FROM_S, until=UNTIL_S, values=values), encoding="utf8")
    return path.name


@pytest.mark.parametrize("timing", ["played", "live"])
def test_a_collapse_and_an_outage_are_told_in_the_line_of_the_run_and_on_its_page(tmp_path: Path, timing: str) -> None:
    files = link(tmp_path, "collapse", 'rate = "100kbit"'), link(tmp_path, "outage", 'loss = "100%"')
    with Command.standing(tmp_path, "netem") as command:
        shown = ["consumer-80mbps", *files] if timing == "played" else [files[1]]  # each live run takes a minute
        axes = f'codec = ["int8"]\nprofile = {json.dumps(shown)}'
        folder = command.write_experiment("live_checks = 0", axes)
        more = sets("pipeline.stages=2", "training.steps=60", "training.evaluate_every=60", "codec_cost=zero")
        said = command.finish("sweep", "sweep.toml", "--timing", timing, "--clock", "virtual", *more)
    told: dict[str, list[Summary]] = {}
    for cell_id in results.last_sweep(folder).cells:
        for run in results.finished_runs(folder, cell_id):
            told.setdefault(run.cell.network, []).append(known(run.summary))
    assert [summary.worst for summary in told.pop("consumer-80mbps", [])] == [None] * (timing == "played")
    assert told.keys() == {Path(name).stem for name in shown} - {"consumer-80mbps"}
    for network, summaries in told.items():
        field, worse = ("loss", 1.0) if network == "outage" else ("rate_bps", 100_000)
        for summary in summaries:
            worst = known(summary.worst)
            assert worst.medians > MUCH_WORSE
            assert worst.at_s < FROM_S + known(summary.step_s)
            assert worst.at_s + known(worst.recovered_s) > UNTIL_S
            links = {(each.link, each.direction): getattr(each, field) for each in worst.links}
            assert links == {("node-0", "up"): worse, ("node-1", "up"): worse}
            assert worst.seconds <= known(worst.recovered_s) < known(summary.wall_s)
        page = (folder / "cells" / f"{told[network][0].cell_id}.html").read_text()
        assert "worst step" in page
        assert "times the median" in page
        assert "times the median" in (folder / "report.html").read_text()
    assert known(told["outage"][0].worst).retransmitted_bytes
    assert said.count("times the median, from") >= sum(map(len, told.values()))


@pytest.mark.parametrize(("timing", "words"), [("played", "lost node"), ("live", "nothing arrived within")])
def test_an_outage_without_end_ends_the_run_with_its_reason(tmp_path: Path, timing: str, words: str) -> None:
    """Messages wait, but not for ever: TCP gives up, or the one who waits does."""
    (tmp_path / "dead.toml").write_text(
        'extends = "consumer-80mbps"\nsummary = "Dead from the first second on"\n'
        '[down]\nschedule = [{ at = "1s", loss = "100%" }]\n'
    )
    with Command.standing(tmp_path, "netem") as command:
        folder = command.write_experiment("live_checks = 0", 'codec = ["int8"]\nprofile = ["dead.toml"]')
        more = sets("pipeline.stages=2", "training.steps=60", "codec_cost=zero")
        flags = ("--no-report", "--timing", timing, "--clock", "virtual", *more)
        said = command.finish("sweep", "sweep.toml", *flags, status=1)
    assert words in said
    assert "Traceback" not in said
    (cell_id,) = results.last_sweep(folder).cells
    assert {known(run.summary).status for run in results.runs(folder, cell_id)} == {"failed"}


def test_over_a_direction_that_is_always_dead_nothing_connects(tmp_path: Path) -> None:
    (tmp_path / "dead.toml").write_text(
        'extends = "consumer-80mbps"\nsummary = "Dead from the first second on"\n[down]\nloss = "100%"\n'
    )
    with Command.standing(tmp_path, "netem") as command:
        command.write_experiment("live_checks = 0", 'codec = ["int8"]\nprofile = ["dead.toml"]')
        more = sets("pipeline.stages=2", "training.steps=3", "codec_cost=zero")
        flags = ("--no-report", "--timing", "played", "--clock", "virtual", *more)
        said = command.finish("sweep", "sweep.toml", *flags, status=1)
    assert "did not reach" in said
    assert "Traceback" not in said
