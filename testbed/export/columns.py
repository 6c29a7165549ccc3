"""The tables of an export, column by column, and the README drawn from them.

Units end a name, and what a number means is said once: here, or at the record's field. Times are seconds of the
emulated world, as in the report; a run's count from the beginning of its first step. Certificates describe the links as
the lab had them, dilation included.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import pyarrow as pa
from pydantic import BaseModel

from testbed.frozen import records_in
from testbed.records import Summary
from testbed.spec import Cell, Paced

Kind = Literal["text", "integer", "real", "boolean"]
_ARROW = {"text": pa.string(), "integer": pa.int64(), "real": pa.float64(), "boolean": pa.bool_()}
PANDAS = {"text": "str", "integer": "Int64", "real": "float64", "boolean": "boolean"}
"""The type of each kind of column in pandas, chosen so that missing values do not turn a count into a float."""


class ExportColumn(NamedTuple):
    """One column of an exported table."""

    name: str
    kind: Kind
    what: str


def _plain(annotation: Any) -> Any:
    """Return a type without None and without pydantic's constraints."""
    while get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    return annotation


def _kind(annotation: Any) -> Kind:
    # bool before int, of which it is a subclass; lists and names are text
    if not isinstance(annotation, type):
        return "text"
    return next((kind for of, kind in _KINDS.items() if issubclass(annotation, of)), "text")


_KINDS: dict[type, Kind] = {bool: "boolean", int: "integer", float: "real"}
_PAIR = ("low", "high")


def of_record(model: type[BaseModel], skip: frozenset[str] = frozenset(), prefix: str = "") -> Iterator[ExportColumn]:
    """Yield a column for each field of a record: inner records' with a dot, those of all kinds where there are several,
    pairs of numbers as `.low` and `.high`.
    """
    for name, field in model.model_fields.items():
        if name in skip:
            continue
        annotation, what = _plain(field.annotation), " ".join((field.description or "").split())
        if records := records_in(field.annotation):
            inner: dict[str, ExportColumn] = {}
            for record in records:
                for column in of_record(record, prefix=f"{prefix}{name}."):
                    inner.setdefault(column.name, column)
            yield from inner.values()
        elif get_args(annotation) == (float, float):
            yield from (ExportColumn(f"{prefix}{name}.{end}", "real", what) for end in _PAIR)
        else:
            yield ExportColumn(prefix + name, _kind(annotation), what)


_RUN = (
    ExportColumn("cell_id", "text", "The cell's id, which is the name of its folder."),
    ExportColumn("run", "integer", "Number of the run among those of its cell."),
)
_LAB_TIME = "s since the first step began"
_AT_STEP = (
    ExportColumn("stage", "integer", "First stage 0."),
    ExportColumn(
        "phase",
        "text",
        "train, evaluation (with the codec in place) or uncompressed (an evaluation with fp32 at the boundaries).",
    ),
    ExportColumn("step", "integer", "Optimiser steps done before this one."),
)
_CELL_SKIPPED = frozenset({"schema_version", "profiles", "compute", "codec"})
_SUMMARY_SKIPPED = frozenset({"cell_id", "engine", "timing", "dilation"})

TABLES: dict[str, tuple[ExportColumn, ...]] = {
    "runs": (
        *_RUN,
        ExportColumn("folder", "text", "Folder of the run's files, below the folder that was exported."),
        ExportColumn("codec", "text", "The codec's text, as in int8, ef(topk(0.1)) or 'fwd=bf16, bwd=int8'."),
        ExportColumn("network", "text", "Profiles of the links."),
        ExportColumn("up_rate_bps", "integer", "Rate asked for on the slowest uplink; missing where none is shaped."),
        ExportColumn(
            "down_rate_bps", "integer", "Rate asked for on the slowest downlink; missing where none is shaped."
        ),
        ExportColumn(
            "round_trip_s",
            "real",
            "The longest of the links' delays, both ways, without serialisation; 0 where unshaped.",
        ),
        *of_record(Cell, _CELL_SKIPPED),
        ExportColumn("compute.mode", "text", "calibrated, measured: this machine's pace; paced: a device's durations."),
        *of_record(Paced, frozenset({"mode"}), "compute."),
        *of_record(Summary, _SUMMARY_SKIPPED),
        ExportColumn("taken_at", "text", "UTC, ISO 8601: when the run began."),
        ExportColumn("cpu_model", "text", "The machine's processor."),
        ExportColumn("cores", "integer", "Cores that the run could use."),
        ExportColumn("kernel", "text", "Release of Linux."),
    ),
    "steps": (
        *_RUN,
        *_AT_STEP,
        ExportColumn(
            "measured", "boolean", "Whether the step counts in timing statistics: warm-up and evaluations do not."
        ),
        ExportColumn("begin_s", "real", f"When the whole pipeline's step began, {_LAB_TIME}."),
        ExportColumn("step_s", "real", "Duration of the whole pipeline's step, the same in all its stages' rows."),
        ExportColumn("stage_begin_s", "real", f"When this stage began it, {_LAB_TIME}."),
        ExportColumn("stage_end_s", "real", f"When this stage ended it, {_LAB_TIME}."),
        ExportColumn("forward_s", "real", "Time in forward passes, or evaluation."),
        ExportColumn("backward_s", "real", "Time in backward passes."),
        ExportColumn("local_s", "real", "In data parallel training: time in local steps, forward and backward."),
        ExportColumn("update_s", "real", "Time in clipping and the optimiser, or with an aggregate."),
        ExportColumn("encode_s", "real", "Time spent encoding payloads."),
        ExportColumn("decode_s", "real", "Time spent decoding payloads."),
        ExportColumn("wire_s", "real", "Waiting for inputs that were on their way."),
        ExportColumn("wait_s", "real", "Waiting for inputs that had not been sent yet."),
        ExportColumn("synchronise_s", "real", "Waiting for the gradient norm of all stages."),
        ExportColumn(
            "overruns", "integer", "Actions whose maths took longer than on the device; missing where nothing is paced."
        ),
        ExportColumn("loss", "real", "Nats per token, or image; known at the last stage only."),
        ExportColumn("accuracy", "real", "Of an evaluation on images: the share that is named right."),
        ExportColumn("gradient_norm", "real", "Over all stages, before it is clipped."),
        ExportColumn("learning_rate", "real", "The learning rate of this step."),
        ExportColumn("tokens", "integer", "Tokens, or images, in the step's batch."),
        ExportColumn("sent_frames", "integer", "Frames that this stage sent."),
        ExportColumn("sent_raw_bytes", "integer", "Size of its tensors as fp32."),
        ExportColumn("sent_payload_bytes", "integer", "Size of their payloads."),
        ExportColumn("sent_frame_bytes", "integer", "Size of the frames: payloads and our headers."),
        ExportColumn(
            "sent_wire_bytes", "integer", "IP packets that left the stage's interface since the record before this one."
        ),
        ExportColumn("retransmits", "integer", "Segments that its sockets retransmitted since they were opened."),
    ),
    "frames": (
        *_RUN,
        ExportColumn("phase", "text", "As in steps."),
        ExportColumn("step", "integer", "Optimiser steps done before this one."),
        ExportColumn("sender", "integer", "Stage."),
        ExportColumn("receiver", "integer", "Stage."),
        ExportColumn("direction", "text", "forward: activations; backward: their gradients."),
        ExportColumn("microbatch", "integer", "From 0, counted through all passes of a step."),
        ExportColumn("raw_bytes", "integer", "Size of the tensor as fp32."),
        ExportColumn("payload_bytes", "integer", "Size of the payload."),
        ExportColumn("frame_bytes", "integer", "Size of the frame: payload and our header."),
        ExportColumn("queued_s", "real", f"When it was handed to the send thread, {_LAB_TIME}."),
        ExportColumn("first_byte_s", "real", f"Just before its first byte was handed to the kernel, {_LAB_TIME}."),
        ExportColumn("sent_s", "real", f"When the sender's kernel had taken its last byte, {_LAB_TIME}."),
        ExportColumn("received_s", "real", f"When the receiver had its last byte, {_LAB_TIME}."),
    ),
    "losses": (
        *_RUN,
        ExportColumn("phase", "text", "As in steps."),
        ExportColumn("step", "integer", "Optimiser steps done before the loss was taken."),
        ExportColumn("training_s", "real", "Time spent in training steps until then; evaluations are left out."),
        ExportColumn("loss", "real", "Nats per token, or image."),
        ExportColumn("accuracy", "real", "Of an evaluation on images: the share that is named right."),
    ),
    "links": (
        *_RUN,
        ExportColumn("at_s", "real", f"{_LAB_TIME}; negative while the stages connect."),
        ExportColumn("link", "text", "node-0 in a star, boundary-0 in a line."),
        ExportColumn("direction", "text", "up or down: away from the stage, or, in a line, towards the last stage."),
        ExportColumn("packets", "integer", "IP packets carried since the lab was built."),
        ExportColumn("bytes", "integer", "Size of the IP packets carried since the lab was built."),
        ExportColumn("rate_bps", "real", "Rate in IP packets since the sample before this one."),
        ExportColumn(
            "dropped_buffer",
            "integer",
            "Packets that the buffer dropped since the lab was built; all drops where the kernel gives no reasons.",
        ),
        ExportColumn("dropped_loss", "integer", "Packets that the loss model dropped since the lab was built."),
        ExportColumn("backlog_bytes", "integer", "Bytes held at this moment."),
    ),
    "certificates": (
        *_RUN,
        ExportColumn("when", "text", "before or after (the run)."),
        ExportColumn("taken_at", "text", "UTC, ISO 8601."),
        ExportColumn("counts", "boolean", "False: it belongs to a first attempt that failed and was repeated."),
        ExportColumn("link", "text", "node-0 in a star, boundary-0 in a line."),
        ExportColumn("direction", "text", "up, down or both."),
        ExportColumn("quantity", "text", "What was measured."),
        ExportColumn("detail", "text", "For example the size of the message."),
        ExportColumn("unit", "text", "Unit of the next four columns."),
        ExportColumn("expected", "real", "Missing where nothing was asked."),
        ExportColumn("measured", "real", "What was measured; missing where that was impossible."),
        ExportColumn("tolerance", "real", "Largest |measured - expected| that the probe cannot tell from 0."),
        ExportColumn("chance", "real", "The part of it that chance explains."),
        ExportColumn("samples", "integer", "Number of observations."),
        ExportColumn("fault", "boolean", "There is no number, or the link does what no such link does."),
        ExportColumn("bound", "real", "How much this deviation alone moves the step, at most, as a share of it."),
        ExportColumn("verdict", "text", "PASS or FAIL."),
        ExportColumn("note", "text", "Why it failed, or what must be known about it."),
    ),
}
"""Name of each table -> its columns."""


def schema(table: str) -> Any:
    """Return the pyarrow schema of a table; what a column means is in its metadata."""
    return pa.schema(
        [pa.field(column.name, _ARROW[column.kind], metadata={"what": column.what}) for column in TABLES[table]]
    )


_HEAD = """# Results for other programs

<!-- Drawn from columns.py by `python -m testbed docs` -->

```
python -m testbed export results/default --to csv          # or parquet: six tables; columns.csv describes them
python -m testbed export results/default --to tensorboard  # needs pip install 'testbed[tensorboard]'
python -m testbed export results/default --to perfetto     # one timeline per run, for https://ui.perfetto.dev
```

Files go to `results/default/export/FORMAT`, or where `-o` says. All runs of the last sweep's cells are there, also
those that failed: see `status`.

In Python:

```python
import testbed

steps = testbed.run_cell(codec="int8", profile="cable", fields={"training.steps": 20})
steps[steps.phase == "train"].plot(x="end_s", y="loss")
steps.attrs["summary"]["efficiency"]

runs = testbed.load("results/default")
runs.pivot_table(index="network", columns="codec", values="step_s", aggfunc="median")
testbed.steps("results/default").groupby(["cell_id", "phase"]).step_s.median()
```

A CSV file reads back with its types:

```python
import pandas

columns = pandas.read_csv("export/csv/columns.csv").set_index(["table", "column"]).type
pandas.read_csv("export/csv/steps.csv", dtype=columns["steps"].to_dict())
```

Times are seconds of the emulated world, as in the report: where the lab was dilated, measured times are divided by
`compute.dilation`. Certificates describe the links as the lab had them. What is unknown is missing, never 0.

In a timeline each stage has a track with its actions and waits; each directed boundary has a track with the frames in
flight, tied by arrows to the actions that sent and used them; each link and direction has a counter with the rate that
it carried.
"""


def draw_export_page() -> str:
    """Draw the README of the tables, in Markdown."""
    parts = [_HEAD]
    for name, columns in TABLES.items():
        rows = "".join(
            f"| `{column.name}` | {PANDAS[column.kind]} | {column.what.replace('|', chr(92) + '|')} |\n"
            for column in columns
        )
        parts.append(f"## {name}\n\n| column | type | what it is |\n| --- | --- | --- |\n{rows}")
    return "\n".join(parts)
