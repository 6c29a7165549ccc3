"""The tables of an export, column by column. Units end a name; what a number means is said once, here or at the record's field.

Times are seconds of the emulated world, as in the report; those of a run count from the begin of its first step. Certificates are
of the links as the lab had them, dilation included.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import pyarrow as pa
from pydantic import BaseModel

from testbed.records import Summary
from testbed.spec import Cell, Paced

Kind = Literal["text", "integer", "real", "boolean"]
_ARROW = {"text": pa.string(), "integer": pa.int64(), "real": pa.float64(), "boolean": pa.bool_()}
PANDAS = {"text": "str", "integer": "Int64", "real": "float64", "boolean": "boolean"}
"""The type that pandas gives a column of each kind, so that nothing missing turns a count into a fraction."""


class Column(NamedTuple):
    """One column."""

    name: str
    kind: Kind
    what: str


def _plain(annotation: Any) -> Any:
    """A type without None and without what pydantic checks."""
    while get_origin(annotation) in (Union, types.UnionType):
        annotation = next(one for one in get_args(annotation) if one is not type(None))
    return annotation


def _kind(annotation: Any) -> Kind:
    # bool before int, of which it is a subclass; lists and names are text
    if not isinstance(annotation, type):
        return "text"
    return next((kind for of, kind in _KINDS.items() if issubclass(annotation, of)), "text")


_KINDS: dict[type, Kind] = {bool: "boolean", int: "integer", float: "real"}
_PAIR = ("low", "high")


def of_record(model: type[BaseModel], skip: frozenset[str] = frozenset(), prefix: str = "") -> Iterator[Column]:
    """A column for each field of a record, those of inner records with a dot, pairs of numbers as `.low` and `.high`."""
    for name, field in model.model_fields.items():
        if name in skip:
            continue
        annotation, what = _plain(field.annotation), " ".join((field.description or "").split())
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from of_record(annotation, prefix=f"{prefix}{name}.")
        elif get_args(annotation) == (float, float):
            yield from (Column(f"{prefix}{name}.{end}", "real", what) for end in _PAIR)
        else:
            yield Column(prefix + name, _kind(annotation), what)


_RUN = (
    Column("cell_id", "text", "Of the cell; the name of its folder."),
    Column("run", "integer", "Number of the run of this cell."),
)
_LAB_TIME = "s since the first step began"
_AT_STEP = (
    Column("stage", "integer", "First stage 0."),
    Column(
        "phase",
        "text",
        "train; evaluation (the codec in place) or uncompressed (the same with fp32 at the boundaries).",
    ),
    Column("step", "integer", "Optimiser steps done before this one."),
)
_CELL_SKIPPED = frozenset({"schema_version", "profiles", "compute", "codec"})
_SUMMARY_SKIPPED = frozenset({"cell_id", "engine", "timing", "dilation"})

TABLES: dict[str, tuple[Column, ...]] = {
    "runs": (
        *_RUN,
        Column("folder", "text", "The run's files, below the folder that was exported."),
        Column("codec", "text", "Its text, as in int8, ef(topk(0.1)) or 'fwd=bf16, bwd=int8'."),
        Column("network", "text", "Profiles of the links."),
        Column("up_rate_bps", "integer", "Of the slowest uplink as asked for; missing where none is shaped."),
        Column("down_rate_bps", "integer", "Of the slowest downlink as asked for; missing where none is shaped."),
        Column(
            "round_trip_s", "real", "Delay of a link, both ways, without serialisation; the longest. 0 where unshaped."
        ),
        *of_record(Cell, _CELL_SKIPPED),
        Column("compute.mode", "text", "measured: as fast as the machine; paced: held to a device's durations."),
        *of_record(Paced, frozenset({"mode"}), "compute."),
        *of_record(Summary, _SUMMARY_SKIPPED),
        Column("taken_at", "text", "UTC, ISO 8601: when the run began."),
        Column("cpu_model", "text", "Of the machine."),
        Column("cores", "integer", "That the run could use."),
        Column("kernel", "text", "Release of Linux."),
    ),
    "steps": (
        *_RUN,
        *_AT_STEP,
        Column("measured", "boolean", "Whether the step counts in timing statistics: warm-up and evaluations do not."),
        Column("begin_s", "real", f"When the whole pipeline's step began, {_LAB_TIME}."),
        Column("step_s", "real", "Duration of the whole pipeline's step, the same at all its stages."),
        Column("stage_begin_s", "real", f"When this stage began it, {_LAB_TIME}."),
        Column("stage_end_s", "real", f"When this stage ended it, {_LAB_TIME}."),
        Column("forward_s", "real", "Forward passes, or evaluation."),
        Column("backward_s", "real", "Backward passes."),
        Column("update_s", "real", "Clipping and the optimiser."),
        Column("encode_s", "real", "Making payloads."),
        Column("decode_s", "real", "Reading payloads."),
        Column("wire_s", "real", "Waiting for inputs that were on their way."),
        Column("wait_s", "real", "Waiting for inputs that had not been sent yet."),
        Column("synchronise_s", "real", "Waiting for the gradient norm of all stages."),
        Column(
            "overruns", "integer", "Actions whose maths took longer than on the device; missing where nothing is paced."
        ),
        Column("loss", "real", "Nats per token; at the last stage only."),
        Column("gradient_norm", "real", "Over all stages, before it is clipped."),
        Column("learning_rate", "real", "That the step was made with."),
        Column("tokens", "integer", "Of the step."),
        Column("sent_frames", "integer", "By this stage."),
        Column("sent_raw_bytes", "integer", "Its tensors as fp32."),
        Column("sent_payload_bytes", "integer", "What the codec made of them."),
        Column("sent_frame_bytes", "integer", "Payloads and our headers."),
        Column(
            "sent_wire_bytes", "integer", "IP packets that left the stage's interface since the record before this one."
        ),
        Column("retransmits", "integer", "Segments that its sockets sent again, since they were opened."),
    ),
    "frames": (
        *_RUN,
        Column("phase", "text", "As in steps."),
        Column("step", "integer", "Optimiser steps done before this one."),
        Column("sender", "integer", "Stage."),
        Column("receiver", "integer", "Stage."),
        Column("direction", "text", "forward: activations; backward: their gradients."),
        Column("microbatch", "integer", "First 0, running on through the passes of a step."),
        Column("raw_bytes", "integer", "The tensor as fp32."),
        Column("payload_bytes", "integer", "What the codec made of it."),
        Column("frame_bytes", "integer", "Payload and our header."),
        Column("queued_s", "real", f"Handed to the send thread, {_LAB_TIME}."),
        Column("first_byte_s", "real", f"Just before its first byte was handed to the kernel, {_LAB_TIME}."),
        Column("sent_s", "real", f"When the sender's kernel had taken its last byte, {_LAB_TIME}."),
        Column("received_s", "real", f"When the receiver had its last byte, {_LAB_TIME}."),
    ),
    "losses": (
        *_RUN,
        Column("phase", "text", "As in steps."),
        Column("step", "integer", "Optimiser steps done before the loss was taken."),
        Column("training_s", "real", "Time spent in training steps until then; evaluations are left out."),
        Column("loss", "real", "Nats per token."),
    ),
    "links": (
        *_RUN,
        Column("at_s", "real", f"{_LAB_TIME}; below 0 while the stages connect."),
        Column("link", "text", "node-0 in a star, boundary-0 in a line."),
        Column("direction", "text", "up or down: away from the stage, or, in a line, towards the last stage."),
        Column("packets", "integer", "Carried since the lab was built."),
        Column("bytes", "integer", "Of IP packets carried since the lab was built."),
        Column("rate_bps", "real", "Of IP packets, since the sample before this one."),
        Column(
            "dropped_buffer",
            "integer",
            "Packets, since the lab was built; all drops where the kernel tells no reasons.",
        ),
        Column("dropped_loss", "integer", "Packets, by the loss model, since the lab was built."),
        Column("backlog_bytes", "integer", "Held at this moment."),
    ),
    "certificates": (
        *_RUN,
        Column("when", "text", "before or after the run."),
        Column("taken_at", "text", "UTC, ISO 8601."),
        Column("counts", "boolean", "No: of a first attempt that failed and was repeated."),
        Column("link", "text", "node-0 in a star, boundary-0 in a line."),
        Column("direction", "text", "up, down or both."),
        Column("quantity", "text", "What was measured."),
        Column("detail", "text", "For example the message size."),
        Column("unit", "text", "Of the next three columns."),
        Column("expected", "real", "Missing where nothing was asked."),
        Column("measured", "real", "What was found; missing where nothing could be."),
        Column("tolerance", "real", "Largest accepted |measured - expected|."),
        Column("samples", "integer", "Single observations behind it."),
        Column("verdict", "text", "PASS or FAIL."),
        Column("note", "text", "Why it failed, or what must be known about it."),
    ),
}
"""Name of each table -> its columns."""


def schema(table: str) -> Any:
    """The pyarrow schema of a table; what a column means is in its metadata."""
    return pa.schema([pa.field(one.name, _ARROW[one.kind], metadata={"what": one.what}) for one in TABLES[table]])
