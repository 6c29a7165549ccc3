from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from testbed import results
from testbed.codecs.catalogue import table
from testbed.errors import ResultsError
from testbed.metrics import summarise
from testbed.profiles import LinkProfile
from testbed.records import Calibration, Duration, MessageCosts, ReplicaCosts, WorkerMaths
from testbed.report import collect
from testbed.report.canvas import shortened
from testbed.report.collect import latest
from testbed.report.conclusions import conclusions, same_maths
from testbed.report.page import write_report
from testbed.report.settings import settings_words
from testbed.results import last_sweep
from testbed.spec import Exchange, recipe_of
from tests.small_replicas import a_recipe, cell_of, trained
from tests.synthetic import ENVIRONMENT, Pipeline, cell, pipe, profile, write_run

pytestmark = pytest.mark.slow  # every figure of a report, several times

FIGURES = (
    "step-time", "loss-time", "loss-steps", "bytes", "efficiency", "gantt-1", "gantt-2",
    "utilisation-1", "utilisation-2", "utilisation-3", "links",
)  # fmt: skip


@pytest.fixture(scope="module")
def page(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(experiment, tmp_path_factory.mktemp("report") / "out" / "report.html")


class Reader(HTMLParser):
    """Collect every attribute, and check that every element that was opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_figure_stands_in_the_page_and_beside_it(page: Path) -> None:
    text = page.read_text()
    for name in FIGURES:
        assert f'<figure id="{name}">' in text
        assert (page.parent / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (page.parent / "figures" / f"{name}.svg").read_text().count("<text") > 10
    assert text.count("<svg") == len(FIGURES)


def test_the_page_is_whole_and_needs_nothing_else(page: Path) -> None:
    reader = Reader(page.read_text())
    assert reader.open == []
    ids = [value for _, key, value in reader.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    for tag, key, value in reader.attributes:
        if key in ("src", "href", "xlink:href"):
            inside = value.startswith("#") and value[1:] in ids
            beside = tag in ("a", "img") and (page.parent / value.split("#")[0]).is_file()
            assert inside or value == "data:," or beside, (tag, key, value)
    used = set(re.findall(r"url\(#([^)]+)\)", page.read_text()))
    assert used
    assert used <= set(ids)


def test_the_page_says_what_was_found(page: Path) -> None:
    text = page.read_text()
    assert "What is it worth?" in text
    assert "Over unshaped a step takes" in text
    assert "no codec makes it clearly faster" in text
    assert "delta-int8 sends as many bytes as int8" in text
    assert "bit-identical over all 3 networks" in text
    assert "unreliable and drawn hollow: int8 over cable" in text
    assert "stage 1: &lt;the loss&gt; is not finite" in text
    assert "engine relay; star of 3 stages, gpipe, 4 micro-batches per step, 4 in flight; TCP cubic" in text
    assert "slower than asked" in text
    assert "Example CPU" in text


def test_a_slow_link_rewards_fewer_bytes(experiment: Path) -> None:
    (group,) = collect.groups(collect.read_runs(latest(experiment, last_sweep(experiment).cells)))
    (cable,) = [sentence for sentence in conclusions(group) if sentence.startswith("Over cable")]
    assert re.search(r"int8 \(not certified\) is \d\.\d\d \[\d\.\d\d, \d\.\d\d\] times as fast", cable)
    assert "bf16 is" in cable


def test_losses_that_differ_between_networks_are_reported(experiment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = collect.groups(collect.read_runs(latest(experiment, last_sweep(experiment).cells)))
    assert same_maths(group)
    entry = next(entry for (_, codec), entry in group.cells.items() if codec == "fp32")
    (run,) = entry.steps
    other = run._replace(train=(*run.train[:-1], run.train[-1]._replace(loss=run.train[-1].loss + 1e-9)))
    entry.__dict__["steps"] = (other,)  # it is read once
    assert not same_maths(group)
    assert any(
        "The losses of fp32 differ between networks, which is an error" in sentence for sentence in conclusions(group)
    )
    curious = dataclasses.replace(table.CODECS["fp32"], measures=True)
    monkeypatch.setitem(table.CODECS, "fp32", curious)
    assert any("fp32 differ between networks, as expected" in sentence for sentence in conclusions(group))


def test_unequal_compute_is_reported(tmp_path: Path) -> None:
    what = cell("fp32")
    write_run(tmp_path, what, Pipeline(what.profiles[0]))
    write_run(tmp_path, cell("int8"), Pipeline(what.profiles[0], forward_ns=3_000_000, backward_ns=6_000_000))
    (group,) = collect.groups(collect.read_runs(latest(tmp_path)))
    (sentence,) = [s for s in conclusions(group) if s.startswith("The machine was not equally fast")]
    assert "with int8 and" in sentence


def test_the_same_results_give_the_same_bytes(experiment: Path, page: Path, tmp_path: Path) -> None:
    again = write_report(experiment, tmp_path / "report.html")
    assert again.read_bytes() == page.read_bytes()
    for name in FIGURES:
        for kind in ("svg", "png"):
            assert (tmp_path / "figures" / f"{name}.{kind}").read_bytes() == (
                page.parent / "figures" / f"{name}.{kind}"
            ).read_bytes()
    assert not list(tmp_path.glob("**/.*"))


def test_a_sweep_of_failures_is_a_page_without_figures(tmp_path: Path) -> None:
    what = cell()
    write_run(tmp_path, what, Pipeline(what.profiles[0]), failure="stage 0 died")
    text = write_report(tmp_path, tmp_path / "report.html").read_text()
    assert "stage 0 died" in text
    assert "<svg" not in text


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match="no run"):
        write_report(tmp_path, tmp_path / "report.html")


@pytest.mark.usefixtures("undrawn")
def test_one_cell_is_a_report(tmp_path: Path) -> None:
    what = cell("acme.codecs:VeryLongNameOfACodec", stages=1)
    write_run(tmp_path, what, Pipeline(what.profiles[0], stages=1))
    assert "acme.codecs:VeryLongNameOfACodec" in write_report(tmp_path, tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("exchange", ["all-to-all", "all-reduce"])
def test_what_was_timed_of_messages_is_named_by_what_they_are(exchange: Exchange, tmp_path: Path) -> None:
    recipe = a_recipe(exchange, "bf16", workers=2, steps=2)
    what = cell_of(recipe).model_copy(update={"codec_cost": "host"})
    stages = trained(recipe).records
    run = results.new_run(tmp_path, what)
    for node, records in enumerate(stages):
        lines = "".join(record.model_dump_json() + "\n" for record in records)
        (run.folder / f"steps-{node}.jsonl").write_text(lines, encoding="utf8")
    results.write_json(run.folder / "environment.json", ENVIRONMENT)
    run.finish(summarise(what, None, None, stages, status="ok", error=None))
    once = Duration(ns=1000, spread=0.0, samples=12)
    costs = ReplicaCosts(
        workers=(WorkerMaths(local_step=once, close=once, update=once),) * 2,
        messages=(MessageCosts(encode=(once,), decode=(once,)),) * 2,
    )
    known = Calibration(taken_at="", machine={}, recipes={}, replicas={recipe_of(what).id: costs})
    results.write_json(tmp_path / "calibration.json", known)
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "cells" / f"{what.id}.html").read_text(encoding="utf8")
    rows = re.findall(r'<tr><th scope="row">([^<]*)</th><td>((?:en|de)code [^<]*)</td>', page)
    if exchange == "all-reduce":  # a part is encoded and decoded by all workers, each at its turn
        assert rows == [("every worker", f"{does} part {part}") for part in (0, 1) for does in ("encode", "decode")]
    else:
        assert rows == [(f"worker {node}", f"{does} its message") for node in (0, 1) for does in ("encode", "decode")]


def test_settings_name_the_transport_of_each_network(tmp_path: Path) -> None:
    for name, control in (("a", "cubic"), ("b", "cubic"), ("c", "bbr")):
        link = profile(name, pipe(80_000_000, 0), pipe(80_000_000, 0), congestion_control=control)
        write_run(tmp_path, cell("fp32", link), Pipeline(link))
    (group,) = collect.groups(collect.read_runs(latest(tmp_path)))
    foot = settings_words(group)
    assert "TCP cubic, slow start after idle off, MTU 1500; over c bbr, slow start after idle off, MTU 1500\n" in foot
    assert "Example CPU" in foot


@pytest.mark.usefixtures("undrawn")
def test_networks_of_several_profiles_read_well(tmp_path: Path) -> None:
    slow = profile("cable", pipe(20_000_000, 7_000_000), pipe(200_000_000, 7_000_000))
    fast = profile("ftth", pipe(300_000_000, 2_000_000), None, congestion_control="bbr")
    networks: tuple[tuple[LinkProfile, ...], ...] = ((slow, fast, slow), (profile("unshaped"),) * 3, (fast,))
    for links in networks:
        for codec in ("fp32", "int8"):
            write_run(tmp_path, cell(codec, links), Pipeline(links))
    text = write_report(tmp_path, tmp_path / "report.html").read_text()
    assert "Over cable+ftth+cable a step takes" in text
    assert "↑20 to 300 Mbit/s ↓200 Mbit/s or unshaped, RTT 2 to 14 ms" in text
    (group,) = collect.groups(collect.read_runs(latest(tmp_path)))
    assert "over cable+ftth+cable cubic+bbr, slow start after idle off, MTU 1500" in settings_words(group)
    assert [text.count(f"<tr><td>{name}</td>") for name in ("cable", "unshaped", "ftth")] == [1, 1, 1]
    assert "<h3>" not in text  # all of it can be compared


def test_a_long_name_is_cut_in_its_middle() -> None:
    assert shortened("cable+lte+cable", 20) == "cable+lte+cable"
    name = "+".join(f"profile-{i}" for i in range(32))
    assert shortened(name, 40).startswith("profile-0+")
    assert shortened(name, 40).endswith("+profile-31")
    assert "…" in shortened(name, 40)
    assert len(shortened(name, 40)) <= 40


def test_links_of_a_line_are_named_by_their_boundary(tmp_path: Path) -> None:
    link = profile("home", pipe(80_000_000, 1_000_000), pipe(80_000_000, 1_000_000))
    write_run(tmp_path, cell("fp32", link, topology="line"), Pipeline(link, topology="line"))
    assert "boundary-1 up" in write_report(tmp_path, tmp_path / "report.html").read_text()


def test_the_report_needs_no_torch() -> None:
    program = (
        "import sys, testbed.report, testbed.metrics; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
