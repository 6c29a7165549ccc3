"""Turns a run's files into rows of the tables; columns.py describes their columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from testbed.frozen import flatten
from testbed.metrics import PipelineStep, align, loss_curve, measured, uncompressed_curve, validation_curve
from testbed.metrics.spans import flights, overran, spans
from testbed.records import Certificate, StepRecord
from testbed.results import Run
from testbed.spec import Cell, Stated

Row = dict[str, Any]
ACTIVITIES = ("forward", "backward", "local", "update", "encode", "decode", "wire", "wait", "synchronise")
_OF_STEP = ("loss", "accuracy", "gradient_norm", "learning_rate", "tokens")
_SIZES = ("raw_bytes", "payload_bytes", "frame_bytes")


class RecordedRun:
    """One run, whose files are each read once, on first use."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @cached_property
    def cell(self) -> Cell:
        return self.run.cell

    @cached_property
    def stages(self) -> list[list[StepRecord]]:
        """The records of each stage, first stage first."""
        return self.run.all_steps()

    @cached_property
    def steps(self) -> list[PipelineStep]:
        return align(self.stages)

    @cached_property
    def origin_ns(self) -> int | None:
        """When the first step began; None if there is none."""
        return self.steps[0].begin_ns if self.steps else None

    def seconds(self, duration_ns: float) -> float:
        """Convert a duration in the lab to seconds of the emulated world."""
        return duration_ns / (self.cell.compute.dilation * 1e9)

    def moment(self, at_ns: int) -> float:
        """Convert a moment in the lab to seconds of the emulated world since the first step began."""
        return self.seconds(at_ns - (self.origin_ns or 0))

    @cached_property
    def key(self) -> Row:
        return {"cell_id": self.run.folder.parent.name, "run": self.run.number}


def _flat(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in flatten(tables):
        if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(end, float) for end in value):
            yield from zip((f"{name}.low", f"{name}.high"), value, strict=True)
        else:
            yield name, json.dumps(value) if isinstance(value, tuple | list) else value


def run_rows(recorded: RecordedRun) -> Iterator[Row]:
    """Yield one row with the cell, its results and the machine."""
    cell, summary, environment = recorded.cell, recorded.run.summary, recorded.run.environment
    pipes = [[pipe for pipe in (link.up, link.down) if pipe is not None] for link in cell.all_profiles]
    absent = {"schema_version", "profiles", "sites", "job", "fault", *["codec_rates"] * (cell.codec_rates is None)}
    row: Row = {
        **dict(_flat(cell.model_dump(mode="json", exclude=absent))),
        "job": cell.job and cell.job.model_dump_json(),
        "compute.work_ns": json.dumps(cell.compute.work_ns) if isinstance(cell.compute, Stated) else None,
        "compute.dilation": cell.compute.dilation,
        "folder": f"{recorded.run.folder.parent.name}/{recorded.run.folder.name}",
        "network": cell.network,
        "up_rate_bps": min((link.up.rate_bps for link in cell.all_profiles if link.up), default=None),
        "down_rate_bps": min((link.down.rate_bps for link in cell.all_profiles if link.down), default=None),
        "round_trip_s": max(sum(pipe.delay_ns for pipe in pair) for pair in pipes) / 1e9,
        "fault": cell.fault_words,
        "status": "unfinished",
        **{name: environment.get(name) for name in ("taken_at", "cpu_model", "cores", "kernel")},
    }
    if summary is not None:
        row |= dict(_flat(summary.model_dump(exclude={"cell_id", "engine", "timing", "dilation"})))
    yield row | recorded.key


def step_rows(recorded: RecordedRun) -> Iterator[Row]:
    """Yield one row per step and stage; evaluations are steps too."""
    summary, paced = recorded.run.summary, recorded.cell.compute.mode == "paced"
    first = summary.first_measured_step if summary is not None else None
    counted = {step.number for step in measured(recorded.steps) if first is None or step.number >= first}
    for step in recorded.steps:
        for stage, record in enumerate(step.records):
            now, before = record.counters, None if step.before is None else step.before[stage].counters
            spent = dict.fromkeys(ACTIVITIES, 0)
            for span in spans(record):
                spent[span.activity] += span.end_ns - span.begin_ns
            overruns = sum(bool(overran(action)) for action in record.actions)
            yield recorded.key | {
                "stage": stage,
                "phase": step.phase,
                "step": step.number,
                "measured": step.phase == "train" and step.number in counted,
                "begin_s": recorded.moment(step.begin_ns),
                "step_s": recorded.seconds(step.end_ns - step.begin_ns),
                "stage_begin_s": recorded.moment(record.start_ns),
                "stage_end_s": recorded.moment(record.end_ns),
                **{f"{activity}_s": recorded.seconds(duration) for activity, duration in spent.items()},
                "overruns": overruns if paced else None,
                **{name: getattr(record, name) for name in _OF_STEP},
                "sent_frames": len(record.sent),
                **{f"sent_{size}": sum(getattr(frame, size) for frame in record.sent) for size in _SIZES},
                "sent_wire_bytes": now.sent_bytes - before.sent_bytes if now and before else None,
                "retransmits": sum(socket.retransmits for socket in record.sockets),
            }


def frame_rows(recorded: RecordedRun) -> Iterator[Row]:
    """Yield one row per frame, stage by stage, in the order of their sends."""
    for step in recorded.steps:
        for flight in flights(step.records):
            sent, received = flight.sent, flight.received
            yield recorded.key | {
                "phase": step.phase,
                "step": step.number,
                "sender": flight.sender,
                "receiver": flight.receiver,
                "direction": flight.direction,
                **{name: getattr(sent, name) for name in ("microbatch", *_SIZES)},
                "queued_s": recorded.moment(sent.queued_ns),
                "first_byte_s": recorded.moment(sent.first_byte_ns),
                "sent_s": recorded.moment(sent.last_byte_ns),
                "received_s": None if received is None else recorded.moment(received.last_byte_ns),
            }


def loss_rows(recorded: RecordedRun) -> Iterator[Row]:
    """Yield one row per point of a loss curve."""
    curves = {"train": loss_curve, "evaluation": validation_curve, "uncompressed": uncompressed_curve}
    for phase, curve in curves.items():
        for point in curve(recorded.cell, recorded.stages):
            row = {"step": point.step, "training_s": point.seconds, "loss": point.loss, "accuracy": point.accuracy}
            yield recorded.key | {"phase": phase} | row


def link_rows(recorded: RecordedRun) -> Iterator[Row]:
    """Yield one row per sample, link and direction, from the lab's counters."""
    before = None
    for sample in recorded.run.samples():
        interval_s = 0.0 if before is None else recorded.seconds(sample.at_ns - before.at_ns)
        for link, directions in sample.links.items():
            for direction, count in directions.items():
                carried = 0 if before is None else count.bytes - before.links[link][direction].bytes
                yield recorded.key | {
                    "at_s": None if recorded.origin_ns is None else recorded.moment(sample.at_ns),
                    "link": link,
                    "direction": direction,
                    **count.model_dump(),
                    "rate_bps": 8 * carried / interval_s if interval_s > 0 else None,
                }
        before = sample


def certificate_rows(recorded: RecordedRun) -> Iterator[Row]:
    """Yield one row per measured quantity."""
    if not (recorded.run.folder / "certificate.json").exists():
        return
    both = recorded.run.certificates
    for when, certificate in (("before", both.before), ("after", both.after)):
        if certificate is not None:
            yield from (recorded.key | {"when": when} | row for row in _measurements(certificate))


def _measurements(certificate: Certificate) -> Iterator[Row]:
    for counts, several in ((False, certificate.rejected), (True, certificate.measurements)):
        for recorded in several:
            row = {"taken_at": certificate.taken_at, "counts": counts, **recorded.model_dump()}
            yield row | {"detail": recorded.detail or None, "note": recorded.note or None}


MAKERS = {
    "runs": run_rows,
    "steps": step_rows,
    "frames": frame_rows,
    "losses": loss_rows,
    "links": link_rows,
    "certificates": certificate_rows,
}
"""Name of each table -> the function that makes its rows for one run."""
