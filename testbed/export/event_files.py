"""Writes runs as event files for TensorBoard: one folder per run, with losses and step times by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from testbed import paths, results
from testbed.errors import CapabilityError
from testbed.export.rows import RecordedRun
from testbed.results import Run

_LOSSES = {"train": "loss/train", "evaluation": "loss/validation", "uncompressed": "loss/validation, uncompressed"}


def scalars(recorded: RecordedRun) -> Iterator[tuple[str, int, float, float]]:
    """Yield every per-step number of a run: its tag, the step, the value, and its time in seconds of the emulated world
    since the first step began.
    """
    for step in recorded.steps:
        at = recorded.moment(step.end_ns)
        numbers: dict[str, float | None] = {_LOSSES[step.phase]: step.loss}
        if step.phase == "train":
            frames = [frame for record in step.records for frame in record.sent]
            last = step.records[-1]
            numbers |= {
                "step/seconds": recorded.seconds(step.end_ns - step.begin_ns),
                "step/payload bytes": sum(frame.payload_bytes for frame in frames),
                "step/raw bytes": sum(frame.raw_bytes for frame in frames),
                "optimiser/learning rate": last.learning_rate,
                "optimiser/gradient norm": last.gradient_norm,
            }
        yield from ((tag, step.number, value, at) for tag, value in numbers.items() if value is not None)


def write_event_files(runs: Iterable[Run], folder: Path) -> list[Path]:
    """Write one folder of event files per run below an existing folder; return these folders.

    Earlier exports are replaced.

    CapabilityError if the package tensorboard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise CapabilityError(
            f"event files need the package tensorboard, which cannot be imported ({error}); in the checkout: "
            "pip install '.[tensorboard]'"
        ) from None
    made = []
    for recorded in map(RecordedRun, runs):
        place = results.make_folder(
            folder / recorded.run.folder.parent.name / recorded.run.folder.name, "choose another folder with -o"
        )
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        began = recorded.run.environment.get("taken_at")
        zero = datetime.fromisoformat(began).timestamp() if began else 0.0
        writer = EventFileWriter(str(place))
        for tag, step, value, seconds in scalars(recorded):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(wall_time=zero + seconds, step=step, summary=summary))
        writer.close()
        for file in place.iterdir():
            paths.give_to_user(file)
        made.append(place)
    return made
