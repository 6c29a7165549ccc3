from __future__ import annotations

from pathlib import Path

import pytest

from testbed.profiles import Change, Schedule
from testbed.records import LinkCounters, Sample
from testbed.report import collect, utilisation
from testbed.results import Run
from tests.known import known
from tests.synthetic import Pipeline, cell, pipe, profile, write_run

ZERO = LinkCounters(packets=0, bytes=0, dropped_buffer=0, dropped_loss=0, backlog_bytes=0)
DAY = Schedule(
    changes=tuple(
        Change(at_ns=at * 10**9, rate_bps=rate * 10**6, delay_ns=0, jitter_ns=0, loss=None)
        for at, rate in ((0, 10), (1, 40))
    ),
    repeat_ns=2 * 10**9,
)
LINK = profile("day", pipe(25_000_000, 0, DAY), pipe(50_000_000, 0), layer="ethernet")


def a_run(folder: Path, samples: list[Sample]) -> collect.Result:
    what = cell("fp32", (LINK, profile("unshaped")), stages=2)
    run = write_run(folder, what, Pipeline(what.profiles, stages=2, played_at_ns=10**9))
    summary = known(run.summary)
    (run.folder / "counters.jsonl").write_text("".join(one.model_dump_json() + "\n" for one in samples))
    run.finish(summary)
    return result_of(run)


def result_of(run: Run) -> collect.Result:
    return next(iter(collect.read_runs([run])))


def test_what_was_carried_and_asked_is_kept_whatever_the_intervals(tmp_path: Path) -> None:
    """Each sample has 1 kB more, in uneven intervals; no sample is lost where there are more than a panel can show."""
    count = 3001
    samples = [
        Sample(
            at_ns=10**9 + i * 10**7 + (i % 7) * 10**6,
            links={
                name: {"up": ZERO.model_copy(update={"bytes": 1000 * i, "dropped_loss": i // 100}), "down": ZERO}
                for name in ("node-0", "node-1")
            },
            sockets=(),
        )
        for i in range(count)
    ]
    result = a_run(tmp_path, samples)
    series = {(one.link, one.way): one for one in utilisation.series(result)}
    assert list(series) == [("node-0", "up"), ("node-0", "down"), ("node-1", "up"), ("node-1", "down")]
    seconds = (samples[-1].at_ns - samples[0].at_ns) / 1e9
    up = series["node-0", "up"]
    assert len(up.carried_bps) < 1000
    assert up.mean_bps == pytest.approx(1000 * (count - 1) * 8 / seconds)
    assert up.dropped.sum() == (count - 1) // 100
    assert up.asked_bps is not None
    assert up.share == pytest.approx(up.mean_bps / (25e6 * 1500 / 1514), rel=0.01)  # 30 s are 15 of its days
    assert {round(rate / 1e6 * 1514 / 1500) for rate in up.asked_bps} >= {10, 40}
    assert series["node-0", "down"].mean_bps == 0
    assert series["node-1", "up"].asked_bps is None
    assert series["node-1", "up"].share is None


@pytest.mark.parametrize(("mbits", "drawn"), [(20.0, True), (0.25, False)])
def test_traffic_fills_its_panel_and_a_rate_far_above_it_is_a_number(tmp_path: Path, mbits: float, drawn: bool) -> None:
    """A link that carries a hundredth of its rate looked like one that carries nothing."""
    samples = [
        Sample(
            at_ns=10**9 + i * 10**8,
            links={name: dict.fromkeys(("up", "down"), ZERO.model_copy(update={"bytes": round(i * mbits * 12_500)}))
            for name in ("node-0", "node-1")},
            sockets=(),
        )
        for i in range(40)
    ]  # fmt: skip
    result = a_run(tmp_path, samples)
    (group,) = collect.groups([result])
    (drawing,) = utilisation.utilisation(group, "")
    down = drawing.figure.axes[1]
    assert mbits < down.get_ylim()[1] < (70 if drawn else 1.5 * mbits)
    assert len(down.patches) == 1 + drawn  # what was carried, and the rate requested
    said = " ".join(text.get_text() for text in down.texts)
    assert f"{'40' if drawn else '0.5'} % of 49.5 requested" in said


@pytest.mark.parametrize("kept", [0, 1])
def test_a_run_that_was_hardly_sampled_has_no_figure(tmp_path: Path, kept: int) -> None:
    sample = Sample(at_ns=10**9, links={}, sockets=())
    result = a_run(tmp_path, [sample] * kept)
    assert utilisation.series(result) == []
    (group,) = collect.groups([result])
    assert list(utilisation.utilisation(group, "")) == []


@pytest.mark.slow
def test_a_lab_of_many_links_shows_those_that_carried_most(tmp_path: Path) -> None:
    what = cell("fp32", LINK, stages=12, microbatches=1)
    write_run(tmp_path, what, Pipeline(LINK, stages=12, microbatches=1))
    (group,) = collect.groups(collect.read_runs(collect.latest(tmp_path)))
    (drawing,) = utilisation.utilisation(group, "")
    assert len(drawing.figure.axes) == 16
    assert "Shows the 8 of 12 links with the most traffic" in drawing.caption
    assert not any("node-0 " in axes.get_title() for axes in drawing.figure.axes)  # the ends send to one side only


def test_a_run_without_certificates_is_drawn_hollow(tmp_path: Path) -> None:
    for verdict in ("PASS", "FAIL"):
        folder = tmp_path / verdict
        folder.mkdir()
        write_run(folder, cell("fp32", LINK), Pipeline(LINK), verdict=verdict)
        (group,) = collect.groups(collect.read_runs(collect.latest(folder)))
        (drawing,) = utilisation.utilisation(group, "")
        filled = {
            patch.get_fill()
            for patch in drawing.figure.axes[0].patches
            if patch.get_linestyle() == "-" or patch.get_fill()
        }
        assert (True in filled) is (verdict == "PASS")
        assert ("not certified" in drawing.caption) is (verdict == "FAIL")
