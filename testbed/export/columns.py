"""The columns of the exported tables, and the README generated from them.

Names end with units. Each column is described once: here, or at the record's field. Times are seconds of the emulated
world, as in the report; moments of a run are relative to the beginning of its first step. Certificates describe the
links of the lab, including dilation.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import pyarrow as pa
from pydantic import BaseModel

from testbed.frozen import Frozen, records_in
from testbed.records import Measurement, Summary
from testbed.spec import Cell, Paced

Kind = Literal["text", "integer", "real", "boolean"]
_ARROW = {"text": pa.string(), "integer": pa.int64(), "real": pa.float64(), "boolean": pa.bool_()}
PANDAS = {"text": "str", "integer": "Int64", "real": "float64", "boolean": "boolean"}
"""Pandas type of each kind of column, chosen so that missing values do not turn a count into a float."""


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
    # bool before int, because it is a subclass of int; lists and names are text
    if not isinstance(annotation, type):
        return "text"
    return next((kind for of, kind in _KINDS.items() if issubclass(annotation, of)), "text")


_KINDS: dict[type, Kind] = {bool: "boolean", int: "integer", float: "real"}


def _descriptions(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings of a record's fields, by field. Pydantic reads them too, whenever a program starts."""
    described = {}
    for record in reversed([each for each in model.__mro__ if each.__module__.startswith("testbed.")]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
        assert isinstance(definition, ast.ClassDef)
        for field, text in itertools.pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                described[ast.unparse(field.target)] = " ".join(str(text.value.value).split())
    return described


def of_record(model: type[BaseModel], skip: frozenset[str] = frozenset(), prefix: str = "") -> Iterator[ExportColumn]:
    """Yield a column for each field of a record: dotted for inner records (of every possible class), and `.low` and
    `.high` for pairs of numbers.
    """
    descriptions = _descriptions(model)
    for name, field in model.model_fields.items():
        if name in skip or field.exclude:
            continue
        annotation, what = _plain(field.annotation), descriptions.get(name, "")
        if records := records_in(field.annotation):
            inner: dict[str, ExportColumn] = {}
            for record in records:
                for column in of_record(record, prefix=f"{prefix}{name}."):
                    inner.setdefault(column.name, column)
            yield from inner.values()
        elif get_args(annotation) == (float, float):
            yield from (ExportColumn(f"{prefix}{name}.{end}", "real", what) for end in ("low", "high"))
        else:
            yield ExportColumn(prefix + name, _kind(annotation), what)


class _RunRow(Frozen):
    """The columns that identify a run in every table."""

    cell_id: str
    """The cell's id, also the name of its folder."""
    run: int
    """Number of the run among those of its cell."""


class _Network(_RunRow):
    """The first columns of the table of runs, before those of the cell."""

    folder: str
    """Folder of the run's files, relative to the exported folder."""
    codec: str
    """The codec's text, as in int8, ef(topk(0.1)) or 'fwd=bf16, bwd=int8'."""
    network: str
    """Profiles of the links."""
    up_rate_bps: int
    """Requested rate of the slowest uplink; missing if none is shaped."""
    down_rate_bps: int
    """Requested rate of the slowest downlink; missing if none is shaped."""
    round_trip_s: float
    """Longest round-trip delay of the links, without serialisation; 0 if unshaped."""
    fault: str
    """Faults of the links, in words; missing without any."""


class _Machine(Frozen):
    """The last columns of the table of runs."""

    taken_at: str
    """Time at which the run began, UTC, ISO 8601."""
    cpu_model: str
    """The machine's processor."""
    cores: int
    """Cores that the run could use."""
    kernel: str
    """Release of Linux."""


class _StepRow(_RunRow):
    """A row of the table of steps."""

    stage: int
    """Number of the stage, from 0."""
    phase: str
    """train, evaluation (with the codec in place) or uncompressed (an evaluation with fp32 at the boundaries)."""
    step: int
    """Optimiser steps done before this one."""
    measured: bool
    """Whether the step counts in timing statistics; warm-up steps and evaluations do not."""
    begin_s: float
    """When the whole pipeline's step began, s since the first step began."""
    step_s: float
    """Duration of the whole pipeline's step, the same in all its stages' rows."""
    stage_begin_s: float
    """When this stage began it, s since the first step began."""
    stage_end_s: float
    """When this stage ended it, s since the first step began."""
    forward_s: float
    """Time in forward passes, or evaluation."""
    backward_s: float
    """Time in backward passes."""
    local_s: float
    """In data parallel training: time in local steps, forward and backward."""
    update_s: float
    """Time in clipping and the optimiser, or with an aggregate."""
    encode_s: float
    """Time spent encoding payloads."""
    decode_s: float
    """Time spent decoding payloads."""
    wire_s: float
    """Waiting for inputs that were on their way."""
    wait_s: float
    """Waiting for inputs that had not been sent yet."""
    synchronise_s: float
    """Waiting for the gradient norm of all stages."""
    overruns: int
    """Actions whose maths took longer than on the device; missing if nothing is paced."""
    loss: float
    """Nats per token or image; known at the last stage only."""
    accuracy: float
    """In an evaluation on images: share of images classified correctly."""
    gradient_norm: float
    """Gradient norm over all stages, before clipping."""
    learning_rate: float
    """The learning rate of this step."""
    tokens: int
    """Tokens or images in the step's batch."""
    sent_frames: int
    """Frames that this stage sent."""
    sent_raw_bytes: int
    """Size of its tensors as fp32."""
    sent_payload_bytes: int
    """Size of their payloads."""
    sent_frame_bytes: int
    """Size of the frames: payloads and testbed's headers."""
    sent_wire_bytes: int
    """Bytes of IP packets that left the stage's interface since the previous record."""
    retransmits: int
    """Segments that its sockets retransmitted since they were opened."""


class _Frame(_RunRow):
    """A row of the table of frames."""

    phase: str
    """As in steps."""
    step: int
    """Optimiser steps done before this one."""
    sender: int
    """Stage."""
    receiver: int
    """Stage."""
    direction: str
    """forward: activations; backward: their gradients."""
    microbatch: int
    """Number of the micro-batch, from 0 through all passes of a step."""
    raw_bytes: int
    """Size of the tensor as fp32."""
    payload_bytes: int
    """Size of the payload."""
    frame_bytes: int
    """Size of the frame: payload and testbed's header."""
    queued_s: float
    """When the frame was handed to the send thread, s since the first step began."""
    first_byte_s: float
    """Just before its first byte was handed to the kernel, s since the first step began."""
    sent_s: float
    """When the sender's kernel had accepted its last byte, s since the first step began."""
    received_s: float
    """When the receiver had read its last byte, s since the first step began."""


class _Loss(_RunRow):
    """A row of the table of losses."""

    phase: str
    """As in steps."""
    step: int
    """Optimiser steps done before the loss was taken."""
    training_s: float
    """Time spent in training steps until then, excluding evaluations."""
    loss: float
    """Nats per token, or image."""
    accuracy: float
    """In an evaluation on images: share of images classified correctly."""


class _Link(_RunRow):
    """A row of the table of links."""

    at_s: float
    """Time of the sample, s since the first step began; negative while the stages connect."""
    link: str
    """node-0 in a star, boundary-0 in a line."""
    direction: str
    """up or down: away from the stage, or, in a line, towards the last stage."""
    packets: int
    """IP packets carried since the lab was built."""
    bytes: int
    """Size of the IP packets carried since the lab was built."""
    rate_bps: float
    """Rate of IP packets since the previous sample, in bits per second."""
    dropped_buffer: int
    """Packets dropped by the buffer since the lab was built; all drops if the kernel gives no reasons."""
    dropped_loss: int
    """Packets dropped by the loss model since the lab was built."""
    backlog_bytes: int
    """Bytes queued at this moment."""


class _Certificate(_RunRow):
    """The first columns of the table of certificates, before those of the measurement."""

    when: str
    """Whether it was made before or after the run."""
    taken_at: str
    """UTC, ISO 8601."""
    counts: bool
    """False for a failed first attempt that was repeated."""


_CELL_SKIPPED = frozenset({"schema_version", "profiles", "sites", "job", "compute", "codec", "fault"})
_SUMMARY_SKIPPED = frozenset({"cell_id", "engine", "timing", "dilation"})

TABLES: dict[str, tuple[ExportColumn, ...]] = {
    "runs": (
        *of_record(_Network),
        *of_record(Cell, _CELL_SKIPPED),
        ExportColumn("job", "text", "The table `job` of the cell, as JSON."),
        ExportColumn("compute.work_ns", "text", "Stated durations by kind of work, as JSON."),
        ExportColumn("compute.mode", "text", "calibrated, measured: this machine's pace; paced: a device's durations."),
        *of_record(Paced, frozenset({"mode"}), "compute."),
        *of_record(Summary, _SUMMARY_SKIPPED),
        *of_record(_Machine),
    ),
    "steps": tuple(of_record(_StepRow)),
    "frames": tuple(of_record(_Frame)),
    "losses": tuple(of_record(_Loss)),
    "links": tuple(of_record(_Link)),
    "certificates": (*of_record(_Certificate), *of_record(Measurement)),
}
"""Name of each table -> its columns."""


@functools.cache
def schema(table: str) -> Any:
    """Return the pyarrow schema of a table, with the description of each column in its metadata."""
    return pa.schema(
        [pa.field(column.name, _ARROW[column.kind], metadata={"what": column.what}) for column in TABLES[table]]
    )


_HEAD = """# Results for other programs

<!-- Generated from columns.py by `python -m testbed docs` -->

```
python -m testbed export results/default --to csv          # or parquet: six tables; columns.csv describes them
python -m testbed export results/default --to tensorboard  # needs pip install '.[tensorboard]'
python -m testbed export results/default --to perfetto     # one timeline per run, for https://ui.perfetto.dev
```

Files go to `results/default/export/FORMAT`, or to the folder given with `-o`. They cover all runs of the last sweep's
cells, including failed ones: see `status`.

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

Times are seconds of the emulated world, as in the report: measured times of a dilated lab are divided by
`compute.dilation`. Certificates describe the links of the lab. An unknown value is missing, never 0.

In a timeline, each stage has a track with its actions and waits; each directed boundary has a track with the frames in
flight, with arrows to the actions that sent and used them; each link and direction has a counter of its rate.
"""


def draw_export_page() -> str:
    """Generate the README of the tables, in Markdown."""
    parts = [_HEAD]
    for name, columns in TABLES.items():
        rows = "".join(
            f"| `{column.name}` | {PANDAS[column.kind]} | {column.what.replace('|', chr(92) + '|')} |\n"
            for column in columns
        )
        parts.append(f"## {name}\n\n| column | type | description |\n| --- | --- | --- |\n{rows}")
    return "\n".join(parts)
