from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from testbed import results
from testbed.errors import ResultsError, SpecError
from testbed.profiles import load_profile, rate_trace
from testbed.records import Sample
from testbed.spec import Cell
from testbed.sweep import plan
from tests.known import known
from tests.synthetic import ended


@pytest.fixture
def cell() -> Cell:
    return plan.cells(plan.load_experiment("default"), "relay")[0]


def test_only_a_run_that_ended_well_finishes_a_cell(tmp_path: Path, cell: Cell) -> None:
    assert results.finished(tmp_path, cell.id) is None
    for status, finished in (("failed", False), ("interrupted", False), ("ok", True)):
        run = results.new_run(tmp_path, cell)
        run.finish(ended(cell, status))
        assert (results.finished(tmp_path, cell.id) == run) is finished
    unfinished = results.new_run(tmp_path, cell)
    assert unfinished.summary is None
    assert [run.number for run in results.runs(tmp_path)] == [1, 2, 3, 4]
    assert known(results.finished(tmp_path, cell.id)).number == 3
    again = results.new_run(tmp_path, cell)
    again.finish(ended(cell, "ok"))
    assert [run.number for run in results.finished_runs(tmp_path, cell.id)] == [3, 5]


def test_a_network_of_many_links_has_a_folder(tmp_path: Path, cell: Cell) -> None:
    shape = {"profiles": cell.profiles * 64, "pipeline": cell.pipeline.model_copy(update={"stages": 64})}
    many = cell.model_copy(update=shape)
    assert results.new_run(tmp_path, many).cell == many
    assert not list(tmp_path.glob("**/.*"))


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path, cell: Cell) -> None:
    run = results.new_run(tmp_path, cell)
    (run.folder / "steps-0.jsonl").write_text('{"step": 0, "pha', encoding="utf8")
    assert run.steps(0) == []
    assert run.steps(1) == []
    sample = Sample(at_ns=1, links={}, sockets=())
    assert list(run.samples()) == []
    (run.folder / "counters.jsonl").write_text(f'{sample.model_dump_json()}\n{{"at_ns": 2', encoding="utf8")
    assert list(run.samples()) == [sample]
    (run.folder / "counters.jsonl").write_text('{"at_ns": 2}\n', encoding="utf8")
    with pytest.raises(ResultsError, match=r"counters\.jsonl, line 1, is not a Sample record"):
        list(run.samples())


def test_a_damaged_record_names_its_file(tmp_path: Path, cell: Cell) -> None:
    run = results.new_run(tmp_path, cell)
    (run.folder / "summary.json").write_text("{}", encoding="utf8")
    with pytest.raises(ResultsError, match=r"summary\.json is not a Summary record"):
        _ = run.summary
    with pytest.raises(ResultsError, match=r"cannot read .*lab\.json"):
        _ = run.lab


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf8")
    with pytest.raises(SpecError, match="choose another with --results"):
        results.make_folder(tmp_path / "file" / "results")


def test_the_last_sweep_says_which_cells_it_asked_for(tmp_path: Path, cell: Cell) -> None:
    results.new_run(tmp_path, cell)
    assert results.last_sweep(tmp_path).cells == (cell.id,)
    record = results.SweepRecord(question="why", command="testbed sweep", cells=("a", "b"))
    results.write_json(tmp_path / "sweep.json", record)
    assert results.last_sweep(tmp_path) == record


def test_a_run_over_a_trace_can_be_read_where_the_trace_is_not(
    tmp_path: Path, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "results"
    mine.mkdir()
    (mine / "short.trace").write_text("".join(f"{ms}\n" for ms in range(1, 101)))
    (mine / "mine.toml").write_text(
        'extends = "consumer-80mbps"\n[up]\nrate = "12Mbit"\n'
        'trace = { file = "short.trace", loop = true, offset = "0s" }\n'
    )
    varying = cell.model_copy(update={"profiles": (load_profile(str(mine / "mine.toml")),)})
    run = results.new_run(folder, varying)
    shutil.rmtree(mine)
    monkeypatch.setattr(rate_trace, "_known", {})  # as in another process
    rate_trace._load.cache_clear()
    assert rate_trace.load_trace(known(known(run.cell.profiles[0].up).trace)) == tuple(range(1, 101))
