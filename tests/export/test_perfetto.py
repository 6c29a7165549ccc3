from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.export import export, runs_to_export
from testbed.results import Run
from tests.timelines import check_events, check_nesting, pairs

Traces = list[tuple[Run, dict[str, Any]]]


@pytest.fixture(scope="module")
def traces(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """Each run with its timeline."""
    runs, written = runs_to_export(experiment), export(experiment, "perfetto", tmp_path_factory.mktemp("perfetto"))
    assert [path.stem for path in written] == [f"{run.folder.parent.name}-{run.folder.name}" for run in runs]
    return [(run, json.loads(path.read_text())) for run, path in zip(runs, written, strict=True)]


def test_events_follow_the_format(traces: Traces) -> None:
    for _, trace in traces:
        check_events(trace["traceEvents"])


def test_slices_of_a_thread_nest(traces: Traces) -> None:
    for _, trace in traces:
        check_nesting(trace["traceEvents"])


def test_frames_begin_and_end_once_and_arrows_lead_forward(traces: Traces) -> None:
    for run, trace in traces:
        count = sum(len(record.sent) for stage in range(run.cell.pipeline.stages) for record in run.steps(stage))
        assert pairs(trace["traceEvents"], "b", "e") == pairs(trace["traceEvents"], "s", "f") == count


def test_a_timeline_is_as_long_as_its_run(traces: Traces) -> None:
    for run, trace in traces:
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        steps = [event for event in slices if event["cat"] in ("train", "evaluation")]
        records = [record for stage in range(run.cell.pipeline.stages) for record in run.steps(stage)]
        length = max(record.end_ns for record in records) - min(record.start_ns for record in records)
        first, last = min(event["ts"] for event in steps), max(event["ts"] + event["dur"] for event in steps)
        assert last - first == pytest.approx(length / 1e3)
        assert trace["otherData"]["timing"] == run.cell.timing
        assert trace["otherData"]["cell"] == run.cell.id
        size = len(json.dumps(trace, separators=(",", ":")))
        actions = sum(len(record.actions) for record in records)
        assert size < 2500 * actions + 200_000
