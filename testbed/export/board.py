"""Runs as event files that TensorBoard shows: a folder a run, losses and step times by step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from testbed import paths, results
from testbed.errors import CapabilityError
from testbed.export.rows import Recorded
from testbed.results import Run


class Point(NamedTuple):
    """One number at one step."""

    tag: str
    step: int
    value: float
    seconds: float
    """Since the first step began, in the emulated world."""


_LOSSES = {"train": "loss/train", "evaluation": "loss/validation", "uncompressed": "loss/validation, uncompressed"}


def points(one: Recorded) -> Iterator[Point]:
    """Everything of a run that is a number a step."""
    for step in one.steps:
        at = one.moment(step.end_ns)
        numbers: dict[str, float | None] = {_LOSSES[step.phase]: step.loss}
        if step.phase == "train":
            frames = [frame for record in step.records for frame in record.sent]
            last = step.records[-1]
            numbers |= {
                "step/seconds": one.seconds(step.end_ns - step.begin_ns),
                "step/payload bytes": sum(frame.payload_bytes for frame in frames),
                "step/raw bytes": sum(frame.raw_bytes for frame in frames),
                "optimiser/learning rate": last.learning_rate,
                "optimiser/gradient norm": last.gradient_norm,
            }
        yield from (Point(tag, step.number, value, at) for tag, value in numbers.items() if value is not None)


def write(runs: Iterable[Run], folder: Path) -> list[Path]:
    """A folder of event files a run, below an existing folder; those of an earlier export are replaced. Returns the folders.

    CapabilityError where the package tensorboard is not installed.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise CapabilityError(
            f"event files are written with the package tensorboard, which cannot be imported ({error}); install it: "
            "pip install 'testbed[tensorboard]'"
        ) from None
    made = []
    for one in map(Recorded, runs):
        place = results.make_folder(
            folder / one.run.folder.parent.name / one.run.folder.name, "choose another folder with -o"
        )
        for old in place.glob("events.out.tfevents.*"):
            old.unlink()
        began = one.run.environment.get("taken_at")
        zero = datetime.fromisoformat(began).timestamp() if began else 0.0
        writer = EventFileWriter(str(place))
        for point in points(one):
            value = Summary(value=[Summary.Value(tag=point.tag, simple_value=point.value)])
            writer.add_event(Event(wall_time=zero + point.seconds, step=point.step, summary=value))
        writer.close()
        for file in place.iterdir():
            paths.give_to_user(file)
        made.append(place)
    return made
