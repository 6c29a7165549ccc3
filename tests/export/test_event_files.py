from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from testbed.errors import CapabilityError
from testbed.export import export, runs_to_export
from testbed.metrics import loss_curve, validation_curve


@pytest.mark.slow
def test_tensorboard_reads_what_the_records_hold(experiment: Path, tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for _ in range(2):  # a second export replaces the first
        folders = export(experiment, "tensorboard", tmp_path)
    runs = runs_to_export(experiment)
    assert len(folders) == len(runs)
    for run, folder in zip(runs, folders, strict=True):
        assert len(list(folder.iterdir())) == 1
        events = loader.EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
        events.Reload()
        stages = [run.steps(stage) for stage in range(run.cell.pipeline.stages)]
        for tag, curve in (("loss/train", loss_curve), ("loss/validation", validation_curve)):
            read = [(event.step, event.value) for event in events.Scalars(tag)]
            assert read == [(point.step, np.float32(point.loss)) for point in curve(run.cell, stages)]
        times = events.Scalars("step/seconds")
        assert len(times) == run.cell.training.steps
        assert [event.wall_time for event in times] == sorted(event.wall_time for event in times)
        payload = sum(sent.payload_bytes for records in stages for sent in records[0].sent)
        assert events.Scalars("step/payload bytes")[0].value == np.float32(payload)


@pytest.mark.slow
def test_without_tensorboard_one_message_says_what_to_install(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)  # as where it is not installed
    with pytest.raises(CapabilityError, match=r"in the checkout: pip install '\.\[tensorboard\]'"):
        export(experiment, "tensorboard", tmp_path)
