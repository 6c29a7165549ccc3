"""What a person sees while cells run: plain lines, the picture on a terminal, and the numbers in both."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from testbed.records import LinkCounters, Sample, Summary
from testbed.runtime.control_plane import EvaluationDone, StepDone
from testbed.spec import Cell, Paced
from testbed.sweep.progress import SweepProgress, draw_progress
from tests.synthetic import cell, ended


def summary(one: Cell, status: str = "ok") -> Summary:
    return ended(one, status, error=None if status == "ok" else "it broke", step_s=0.25)


def sample(at_s: float, up_bytes: int, down_bytes: int = 0) -> Sample:
    def counters(carried: int) -> LinkCounters:
        return LinkCounters(packets=1, bytes=carried, dropped_buffer=0, dropped_loss=None, backlog_bytes=0)

    links = {"node-0": {"up": counters(up_bytes), "down": counters(down_bytes)}}
    return Sample(at_ns=round(at_s * 1e9), links=links, sockets=())  # type: ignore[arg-type]


def shown(watch: SweepProgress, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(draw_progress(watch, height))
    return console.export_text().splitlines()


@pytest.mark.parametrize("dilation", [1, 4])
def test_numbers_are_those_of_the_emulated_world(dilation: int) -> None:
    compute = Paced(forward_ns=(1,), backward_ns=(1,), update_ns=0, source="stated", dilation=dilation)
    one = cell(compute=compute)
    watch = SweepProgress(Console(file=io.StringIO()), [one])
    watch.begin(one)
    watch.step(StepDone(step=0, loss=2.5, seconds=4.0, tokens=1000))
    assert watch.turns[0].rates_bps == {}
    watch.carried(sample(1, 0))
    watch.carried(sample(1, 0))  # the same again
    watch.carried(sample(1.5, 900_000, 1))
    watch.carried(sample(2, 1_000_000, 2_000_000))
    turn = watch.turns[0]
    assert (turn.done, turn.step_s, turn.tokens_per_s) == (1, 4 / dilation, 250 * dilation)
    assert turn.rates_bps == {"node-0": (8e6 * dilation, 16e6 * dilation)}
    assert len(turn.samples) == 3


def test_every_run_leaves_one_plain_line() -> None:
    text = io.StringIO()
    console = Console(file=text, width=130)
    cells = [cell("fp32"), cell("int8"), cell("bf16")]
    with SweepProgress(console, cells) as watch:
        for one, status in zip(cells, ("ok", "failed"), strict=False):
            watch.begin(one)
            watch.end(one, summary(one, status))
        watch.begin(cells[2])
        watch.leave_out("it has failed before")
    first, second, third = text.getvalue().splitlines()
    assert re.match(r"\[1/3\] fp32 on test, live: \d+ s, step \d+ ms, certificate missing(; about .* left)?$", first)
    assert second == "[2/3] int8 on test, live: failed: it broke"
    assert third == "[3/3] bf16 on test, live: skipped: it has failed before"


def test_time_left_is_that_of_the_runs_to_come() -> None:
    cells = [cell("fp32"), cell("int8")]
    watch = SweepProgress(Console(file=io.StringIO()), cells, {cells[0].id: 100.0, cells[1].id: 50.0})
    assert watch.left_s() == 150
    watch.begin(cells[0])
    assert watch.left_s() == pytest.approx(150, abs=5)
    watch.end(cells[0], summary(cells[0]))
    assert watch.left_s() == pytest.approx(0, abs=5)  # as long as the one that was just seen over this network
    assert SweepProgress(Console(file=io.StringIO()), cells).left_s() == 0


def test_runs_are_not_compared_with_each_other_for_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of 1,888 runs spent most of its main process on that."""
    cells = [cell("fp32")] * 100
    asked: list[str] = []

    def network(one: Cell) -> str:
        asked.append(one.codec)
        return "cable"

    monkeypatch.setattr(Cell, "network", property(network))
    with SweepProgress(Console(file=io.StringIO()), cells) as watch:
        for one in cells:
            watch.begin(one)
            watch.end(one, summary(one))
    assert len(asked) <= 10 * len(cells)


def test_the_picture_shows_the_running_cell_and_fits_the_terminal() -> None:
    cells = [cell(codec, steps=8 + index) for index in range(30) for codec in ("fp32", "int8")]
    watch = SweepProgress(Console(file=io.StringIO()), cells)
    for one in cells[:40]:
        watch.begin(one)
        watch.end(one, summary(one))
    watch.begin(cells[40])
    watch.step(StepDone(step=4, loss=1.25, seconds=0.5, tokens=100))
    watch.evaluated(EvaluationDone(step=5, loss=1.0, seconds=0.1))
    for at in (0, 1):
        watch.carried(sample(at, at * 250_000))
    lines = shown(watch, 20)
    assert len(lines) <= 20
    (running,) = (line for line in lines if line.startswith("41  "))
    assert "training" in running
    assert "5/28" in running
    assert any("40 of 60 runs done" in line and "200 tokens/s" in line for line in lines)
    assert any("node-0 2.0/0.0" in line for line in lines)
    watch.end(cells[40], summary(cells[40]))
    (ended,) = (line for line in shown(watch, 20) if line.startswith("41  "))
    assert "ok" in ended


def test_a_terminal_gets_the_picture_and_keeps_the_lines() -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, height=20, force_terminal=True)
    one = cell()
    with SweepProgress(console, [one]) as watch:
        watch.begin(one)
        watch.end(one, summary(one))
    assert "[1/1] fp32 on test, live" in text.getvalue()


def test_a_text_that_is_tokenised_has_a_bar_until_it_is_done() -> None:
    one = cell()
    watch = SweepProgress(Console(file=io.StringIO()), [one])
    watch.tokenised("my_texts", 0.25)
    assert shown(watch)[-1] == f"tokenising my_texts: {'█' * 8}{'░' * 22} 25%"
    watch.begin(one)
    watch.tokenised("my_texts", 1.0)
    assert not [line for line in shown(watch) if "tokenising" in line]
