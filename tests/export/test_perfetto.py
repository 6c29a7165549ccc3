from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from testbed.export import export, runs_to_export
from testbed.results import Run

Traces = list[tuple[Run, dict[str, Any]]]
REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "ts", "pid", "args"},
}
REQUIRED |= {phase: {"name", "cat", "id", "ts", "pid", "tid"} for phase in "besf"}


@pytest.fixture(scope="module")
def traces(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """Each run with its timeline."""
    runs, written = runs_to_export(experiment), export(experiment, "perfetto", tmp_path_factory.mktemp("perfetto"))
    assert [path.stem for path in written] == [f"{run.folder.parent.name}-{run.folder.name}" for run in runs]
    return [(run, json.loads(path.read_text())) for run, path in zip(runs, written, strict=True)]


def test_events_follow_the_format(traces: Traces) -> None:
    """Check the Trace Event Format: what each phase must have, ordered times, a name for every process and thread."""
    for _, trace in traces:
        events = trace["traceEvents"]
        for event in events:
            assert REQUIRED[event["ph"]] <= event.keys(), event
            assert event.get("dur", 0) >= 0
        timed = [event["ts"] for event in events if event["ph"] != "M"]
        assert timed == sorted(timed)
        named = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
        for event in events:
            assert ("process_name", event["pid"], 0) in named
            assert event["ph"] in "MC" or ("thread_name", event["pid"], event["tid"]) in named


def test_slices_of_a_thread_nest(traces: Traces) -> None:
    for _, trace in traces:
        threads: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for event in trace["traceEvents"]:
            if event["ph"] == "X":
                threads[event["tid"]].append((event["ts"], round(event["ts"] + event["dur"], 3)))
        for slices in threads.values():
            around: list[float] = []
            for begin, end in slices:
                while around and around[-1] <= begin:
                    around.pop()
                assert not around or end <= around[-1]
                around.append(end)


def test_frames_begin_and_end_once_and_arrows_lead_forward(traces: Traces) -> None:
    for run, trace in traces:
        count = sum(len(record.sent) for stage in range(run.cell.pipeline.stages) for record in run.steps(stage))
        for first, last in ("be", "sf"):
            times: dict[str, dict[int, float]] = {first: {}, last: {}}
            for event in trace["traceEvents"]:
                if event["ph"] in times:
                    assert event["id"] not in times[event["ph"]]
                    times[event["ph"]][event["id"]] = event["ts"]
            assert times[first].keys() == times[last].keys()
            assert len(times[first]) == count
            assert all(times[first][number] <= times[last][number] for number in times[first])


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
