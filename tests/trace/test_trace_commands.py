"""`testbed trace`, as a user sees it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from testbed.cli import make_app
from testbed.errors import SpecError, UserError
from testbed.report.trace_chart import trace_chart
from testbed.trace.simulate import simulate
from tests.trace.made_traces import pipeline, played_over


def run_command(*arguments: object) -> str:
    done = CliRunner().invoke(make_app(), [str(argument) for argument in arguments])
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_a_trace_is_shown(tmp_path: Path) -> None:
    pipeline(4, 8, 5, work_ns=1_000_000, size=5000).write(tmp_path / "a.trace")
    said = run_command("trace", "show", tmp_path / "a.trace")
    assert "4 nodes, 4 lanes, 5 steps, 860 operations (340 work, 240 send, 240 receive, 20 signal, 20 wait)" in said
    assert "stage 1 stage 2 8 40 kB" in said
    assert "backward 32 ms stage 0 8 ms" in said
    assert "a step takes 22.5 ms if messages take no time" in said
    said = run_command("trace", "show", tmp_path / "a.trace", "--step", 1)
    assert "stage 0 compute 1 send activation message 8 to stage 1, 5 kB" in said
    assert "event 1 until it is 4" in said


def test_only_what_is_a_picture_or_a_step_is_drawn(tmp_path: Path) -> None:
    pipeline(2, 2, 2).write(tmp_path / "a.trace")
    for name in ("a.png", "a.svg"):
        assert "Step 1 takes 6.5 ms" in run_command(
            "trace", "draw", tmp_path / "a.trace", "--step", 1, "-o", tmp_path / name
        )
        assert (tmp_path / name).stat().st_size > 5000
    with pytest.raises(SpecError, match="has no step 2; it has 2, counted from 0"):
        run_command("trace", "draw", tmp_path / "a.trace", "--step", 2, "-o", tmp_path / "a.png")
    with pytest.raises(UserError, match=r"must end in \.png, \.svg, \.pdf"):
        run_command("trace", "draw", tmp_path / "a.trace", "-o", tmp_path / "a.gif")
    with pytest.raises(UserError, match=r"cannot write the picture to .*: No such file"):
        run_command("trace", "draw", tmp_path / "a.trace", "-o", tmp_path / "no" / "a.png")


@pytest.mark.parametrize("steps", [1, 2])
def test_a_bar_is_as_long_as_the_work(steps: int) -> None:
    trace = pipeline(2, 3, 3, work_ns=2_000_000)
    figure: Figure = trace_chart(trace, simulate(trace), 1, 1 + steps, "", "").figure
    drawn = sum(
        path.get_extents().width
        for collection in figure.axes[0].collections
        if len(collection.get_facecolor())  # bars, not lines
        for path in collection.get_paths()
    )
    assert drawn == pytest.approx(steps * 2 * (6 * 2 + 1))  # milliseconds of two stages


def test_a_trace_goes_to_chakra_and_comes_back(tmp_path: Path) -> None:
    pipeline(2, 3, 2).write(tmp_path / "a.trace")
    said = run_command("trace", "export", tmp_path / "a.trace", "-o", tmp_path / "b.et")
    assert f"2 files: {tmp_path / 'b.0.et'} to b.1.et" in said
    said = run_command("trace", "import", tmp_path / "b.et", "-o", tmp_path / "b.trace")
    assert "2 nodes, 2 lanes, 2 steps" in said
    assert "a step takes 8.5 ms if messages take no time" in said


def test_what_was_played_is_drawn(tmp_path: Path) -> None:
    trace = pipeline(2, 2, 3)
    trace.write(tmp_path / "a.trace")
    lab = {"links": [{"profile": "cable"}, {"profile": "dsl"}]}
    replace(played_over(trace), clock="real", lab=lab).write(tmp_path / "a.played")
    arguments = ("trace", "draw", tmp_path / "a.trace", "--played", tmp_path / "a.played", "-o", tmp_path / "a.png")
    assert "Step 2 takes 6.5 ms over cable+dsl, on the real clock" in run_command(*arguments, "--step", 2)
    pipeline(2, 3, 3).write(tmp_path / "a.trace")
    with pytest.raises(SpecError, match=r"a\.played was played from another trace"):
        run_command(*arguments)
