"""`testbed play`, as a user sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.errors import SpecError, UserError
from testbed.player.split import step_split
from testbed.trace.check import load_trace
from testbed.trace.format import Lane, Trace
from testbed.trace.played import read_played
from testbed.trace.simulate import simulate, step_ends
from tests.trace.made_traces import pipeline
from tests.trace.test_trace_commands import run_command


@pytest.mark.clock_kernel
def test_on_the_virtual_clock_work_takes_what_it_takes(tmp_path: Path) -> None:
    pipeline(2, 2, 4, work_ns=2_000_000, size=100_000).write(tmp_path / "a.trace")
    links = ("--profile", "datacenter", "--profile", "lossy-80mbps", "--link-seeds", 2)
    said = run_command("play", tmp_path / "a.trace", "--clock", "virtual", *links, "-o", tmp_path / "kept")
    assert "clock virtual" in said
    assert "has no stated buffer" not in said
    assert "3 steps, mean and range of 2 seeds" in said
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["0-seed-0.played", "1-seed-0.played", "1-seed-1.played"]
    trace, played = load_trace(tmp_path / "a.trace"), read_played(tmp_path / "kept" / kept[0])
    split = step_split(trace, played)
    assert [node.works_ns for node in split.nodes] == [9_000_000, 9_000_000]
    ideal = step_ends(trace, simulate(trace), 4)
    assert split.step_ns > ideal[-1] - ideal[-2]


@pytest.mark.clock_kernel
def test_a_buffer_that_nobody_stated_is_spoken_of(tmp_path: Path) -> None:
    """Two of these links are in a star's path."""
    pipeline(2, 2, 2).write(tmp_path / "a.trace")
    for topology, delay, spoken in (("star", "30ms", True), ("line", "30ms", False)):
        arguments = ("--clock", "virtual", "--profile", f"link(7Mbit, {delay})", "--topology", topology)
        said = run_command("play", tmp_path / "a.trace", *arguments)
        assert ("link-7Mbit-30ms has no stated buffer; the default 100ms is less than the round" in said) == spoken


@pytest.mark.clock_kernel
def test_a_folder_takes_the_times_of_a_single_play_too(tmp_path: Path) -> None:
    pipeline(2, 2, 2).write(tmp_path / "a.trace")
    (tmp_path / "kept").mkdir()
    run_command("play", tmp_path / "a.trace", "--profile", "cable", "--clock", "virtual", "-o", tmp_path / "kept")
    assert read_played(tmp_path / "kept" / "0-seed-0.played").steps == 2


@pytest.mark.root
def test_a_chakra_trace_is_played_over_links(tmp_path: Path) -> None:
    pipeline(2, 2, 1, work_ns=2_000_000, size=100_000).write(tmp_path / "a.trace")
    run_command("trace", "export", tmp_path / "a.trace", "-o", tmp_path / "a.et")
    links = ("--engine", "relay", "--clock", "real", "--profile", "datacenter")
    said = run_command("play", tmp_path / "a.et", *links, "--repeat", 3, "-o", tmp_path / "kept" / "a.played")
    assert "the trace is played 3 times in a row" in said
    assert "the median of 2 steps" in said
    for words in ("works", "waits for messages", "stage 0 9 ms", "stage 1 9 ms"):
        assert words in said
    assert read_played(tmp_path / "kept" / "a.played").steps == 3


def test_mistakes_are_named_before_anything_is_built(tmp_path: Path) -> None:
    pipeline(3, 2, 2).write(tmp_path / "a.trace")
    for arguments, said in (
        (("--clock", "reel"), "no clock 'reel'; did you mean 'real'"),
        (("--topology", "ring"), "no topology 'ring'"),
        (("--profile", "cabel"), "did you mean 'cable'"),
        (("-o", tmp_path / "a.trace"), "would overwrite the trace"),
    ):
        with pytest.raises(UserError, match=said):
            run_command("play", tmp_path / "a.trace", "--profile", "cable", "--clock", "real", *arguments)
    Trace(("a",), ("",), (Lane(0, ""),)).write(tmp_path / "empty.trace")
    with pytest.raises(SpecError, match="has no operations"):
        run_command("play", tmp_path / "empty.trace", "--profile", "cable")
