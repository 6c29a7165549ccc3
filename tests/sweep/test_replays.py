"""Which runs are replayed, and one real replay against the full run that it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed import results
from testbed.errors import StageError
from testbed.metrics.fidelity import Fidelity, compare_replay
from testbed.profiles import load_profile
from testbed.records import Summary
from testbed.results import Run
from testbed.spec import Cell
from testbed.sweep import replays
from tests import synthetic
from tests.commands import Command
from tests.quiet import Quiet

MS = 1_000_000
_CLOSE = 0.1
"""A single short replay on a shared machine; the statement of 3 % is that of `experiments/replay_check`."""
_NAMES = ("datacenter", "cable", "lte")
_CELLS = [
    synthetic.cell(codec, load_profile(name)).model_copy(update={"timing": timing})
    for codec in ("fp32", "int8")
    for name in _NAMES
    for timing in ("full", "replay")
]


def _replay_of(cell: Cell) -> Cell:
    return cell.model_copy(update={"timing": "replay"})


@given(
    cells=st.lists(st.sampled_from(_CELLS), max_size=20), have=st.sets(st.sampled_from([cell.id for cell in _CELLS]))
)
def test_a_recording_comes_before_its_replays_and_is_made_once(cells: list[Cell], have: set[str]) -> None:
    found = replays.with_recordings(cells, have)
    needed = {replays.recording_of(cell).id for cell in cells if cell.timing == "replay"} - have
    for position, cell in enumerate(found):
        if cell.timing == "replay":
            recorded = replays.recording_of(cell).id
            assert recorded in have or recorded in {one.id for one in found[:position]}
    for cell in {*cells, *found}:  # nothing is lost, nothing added but a recording that was not asked for
        asked, made = (sum(one == cell for one in group) for group in (cells, found))
        assert made == (max(1, asked) if cell.id in needed else asked)
    replayed = [cell for cell in cells if cell.timing == "replay"]
    assert [cell for cell in found if cell.timing == "replay"] == replayed


def test_a_recording_is_a_full_run_over_links_without_shaping_and_without_a_budget() -> None:
    cell = _replay_of(synthetic.cell("int8", load_profile("cable"), training={"budget_s": 3.0, "target_loss": 2.0}))
    found = replays.recording_of(cell)
    assert not found.shaped
    assert found.timing == "full"
    assert found.training == cell.training.model_copy(update={"budget_s": None})
    assert (found.codec, found.workload, found.pipeline, found.optimiser) == (
        cell.codec,
        cell.workload,
        cell.pipeline,
        cell.optimiser,
    )


def test_a_profile_of_ones_own_with_that_name_is_not_recorded_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = _replay_of(synthetic.cell("int8", load_profile("cable")))
    asked = replays.recording_of(cell)
    (tmp_path / "netem_profiles").mkdir()
    (tmp_path / "netem_profiles" / "datacenter.toml").write_text('extends = "cable"\n', encoding="utf8")
    (tmp_path / "netem_profiles" / "cable.toml").write_bytes(load_path("cable").read_bytes())
    monkeypatch.chdir(tmp_path)
    assert load_profile("datacenter").shaped
    assert replays.recording_of(cell) == asked


def load_path(name: str) -> Path:
    return Path(__file__).resolve().parents[2] / "netem_profiles" / f"{name}.toml"


def _recorded(folder: Path, *, failure: str | None = None, **shape: object) -> tuple[Cell, Run]:
    """A replay cell and a recording of it that never happened."""
    pipeline = synthetic.Pipeline(synthetic.profile(), **{"microbatches": 2, **shape})  # type: ignore[arg-type]
    cell = _replay_of(pipeline.cell)
    return cell, synthetic.write_run(folder, replays.recording_of(cell), pipeline, failure=failure)


def test_the_newest_good_run_is_replayed(tmp_path: Path) -> None:
    cell, first = _recorded(tmp_path)
    assert replays.recording_folder(cell, tmp_path) == first.folder
    _, second = _recorded(tmp_path)
    _recorded(tmp_path, failure="the power went out")
    assert replays.recording_folder(cell, tmp_path) == second.folder


def test_without_a_good_recording_it_says_what_to_do(tmp_path: Path) -> None:
    cell = _replay_of(synthetic.Pipeline(synthetic.profile(), microbatches=2).cell)
    with pytest.raises(
        StageError, match=r"has no good run in .* \(it has not been run\); the same sweep runs it first"
    ):
        replays.recording_folder(cell, tmp_path)
    _recorded(tmp_path, failure="the power went out")
    with pytest.raises(StageError, match=r"\(its last run failed: the power went out\)"):
        replays.recording_folder(cell, tmp_path)


def test_what_is_doubtful_about_a_recording(tmp_path: Path) -> None:
    """The synthetic machine has two processors; one paced action of fifty overruns."""
    _, crowded = _recorded(tmp_path / "crowded", stages=3)
    assert "made on 2 processors by 3 stages" in str(replays.doubt_about(crowded.folder))
    _, roomy = _recorded(tmp_path / "roomy", stages=2)
    assert replays.doubt_about(roomy.folder) is None
    _, paced = _recorded(tmp_path / "paced", stages=3, paced=True)
    summary = paced.summary
    assert summary is not None
    for share, doubtful in ((0.009, False), (0.011, True)):
        results.write_json(paced.folder / "summary.json", summary.model_copy(update={"overrun_share": share}))
        assert ("overruns" in (replays.doubt_about(paced.folder) or "")) == doubtful


def test_pairs_are_runs_of_one_cell_with_both_timings(tmp_path: Path) -> None:
    pipeline = synthetic.Pipeline(synthetic.profile(), microbatches=2)
    synthetic.write_run(tmp_path, pipeline.cell, pipeline)
    assert list(replays.timed_both_ways(tmp_path)) == []
    again = synthetic.Pipeline(synthetic.profile(), microbatches=2)
    synthetic.write_run(tmp_path, _replay_of(pipeline.cell), again)
    [(full, replay)] = replays.timed_both_ways(tmp_path)
    assert (full.cell.timing, replay.cell.timing) == ("full", "replay")


def test_bench_replay_tells_and_ends_accordingly(command: Command) -> None:
    folder = command.folder / "results"
    pipeline = synthetic.Pipeline(synthetic.profile(), microbatches=2)
    synthetic.write_run(folder, pipeline.cell, pipeline)
    assert "no cell with a good full run and a good replay" in command.finish("bench", "replay", str(folder), status=2)
    synthetic.write_run(folder, _replay_of(pipeline.cell), synthetic.Pipeline(synthetic.profile(), microbatches=2))
    assert "1 of 1 cells hold" in command.finish("bench", "replay", str(folder))
    other = synthetic.Pipeline(synthetic.profile(), microbatches=2)
    synthetic.write_run(folder, _replay_of(pipeline.cell), other, error=0.1)
    output = command.finish("bench", "replay", str(folder), status=1)
    assert "DIFFER" in output
    assert "0 of 1 cells hold" in output


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.quiet
@pytest.mark.timeout(600)
def test_a_replay_stands_for_the_full_run(command: Command, quiet: Quiet) -> None:
    def once() -> Fidelity:
        full, replay = _both(command)
        both = compare_replay(full[0], full[1], replay[0], replay[1])
        assert both.same_losses
        assert replay[0].timing == "replay"
        assert both.wire is not None
        assert abs(both.wire) <= 0.01
        assert both.step_time is not None
        return both

    def told(both: Fidelity) -> str:
        return f"a step of {both.full_s} s took {both.replay_s} s"

    quiet.measure(once, lambda both: [told(both)] if abs(both.step_time or 0.0) > _CLOSE else [], told=told)


def _both(command: Command) -> tuple[tuple[Summary, list[list[synthetic.StepRecord]]], ...]:
    fields = ("compute.mode=paced", "compute.forward=20ms", "compute.backward=40ms", "training.evaluate_every=4")
    found = []
    for timing in ("full", "replay"):
        command.finish(*command.cell(*fields, f"timing={timing}", steps=8, codec="int8", profile="cable"))
        run, summary = command.last()
        assert (run.cell.timing, run.cell.network, summary.status) == (timing, "cable", "ok")
        found.append((summary, [run.steps(stage) for stage in range(run.cell.pipeline.stages)]))
    return tuple(found)
