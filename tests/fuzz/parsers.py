"""What is fuzzed: every parser of what comes from outside, one row each, with valid examples to begin with."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from testbed import results
from testbed.codecs.catalogue.placement import parse_placement
from testbed.codecs.catalogue.table import CODECS
from testbed.codecs.check.subject import Subject, subject_of
from testbed.codecs.check.tensors import hidden, key_at
from testbed.commands.bench_all import Benchmarks, read_benchmarks
from testbed.devices.device import SHIPPED, read_device, write_device
from testbed.errors import CodecError, SpecError
from testbed.exec.order import parse_commands
from testbed.jobs.actions import Key
from testbed.jobs.decision import Decision, note_of, read_note
from testbed.predict.cells import plan_cells
from testbed.profiles import load_profile, rate_trace, trace_sources, write_profile
from testbed.profiles.loading import read_profile
from testbed.records import Calibration
from testbed.report import collect, tables
from testbed.results import Run
from testbed.runtime.frame import HEADER_BYTES, FrameHeader, pack_frame_header, parse_frame_header
from testbed.spec import Cell, recipe_of
from testbed.sweep import plan
from testbed.sweep.calibrations import check_given
from testbed.sweep.fields import parse_assignment
from testbed.sweep.resolve import resolve_cell
from testbed.trace import format as trace_format
from testbed.trace import observations, played, totals
from testbed.trace.chakra import from_chakra, save_chakra
from testbed.trace.chakra_file import read_chakra
from testbed.trace.check import check_trace
from testbed.trace.join_ranks import join
from tests.synthetic import Pipeline, cell, pipe, profile, record_sweep, stage_costs, write_run
from tests.trace.made_traces import pipeline

ROOT = Path(__file__).parents[2]
MOST_CELLS = 4
"""Cells of a file that are resolved: they differ little."""


class Parser(NamedTuple):
    """A parser of what comes from outside."""

    what: str
    """What it reads, and what is done with the result."""
    examples: Callable[[], Sequence[bytes]]
    """Valid inputs, which are mutated."""
    parse: Callable[[bytes], object]
    """Raises a TestbedError for what is not valid; any other error is a find."""


@functools.cache
def _folder() -> Path:
    kept = tempfile.TemporaryDirectory(prefix="testbed-fuzz-")
    _KEPT.append(kept)  # removed when the program ends
    return Path(kept.name)


_KEPT: list[Any] = []


def _file(name: str, raw: bytes) -> Path:
    path = _folder() / name
    path.write_bytes(raw)
    return path


def _text(raw: bytes) -> str:
    """Decode as a command line is decoded."""
    return raw.decode("utf8", "surrogateescape")


def _files(*patterns: str) -> list[bytes]:
    return [path.read_bytes() for pattern in patterns for path in sorted(ROOT.glob(pattern))]


# ---------------------------------------------------------------------- the wire
_TOKEN = bytes(range(16))
_NAMES = ("activation", "gradient")


def _frame_examples() -> list[bytes]:
    note = note_of(Decision(4, (0, 1), (1, 2), ("fp32", "topk(0.1)")))
    headers = [
        FrameHeader(Key(what, 3, 2, 1, "train"), len(note), 4096, 123_456_789, 7) for what in ("activation", "gradient")
    ]
    return [pack_frame_header(header, _TOKEN, _NAMES) + note for header in headers]


def _parse_frame(raw: bytes) -> object:
    """A header, with a check sum that is right where the first byte is odd, and the note of a decision behind it."""
    fields = raw[: HEADER_BYTES - 4].ljust(HEADER_BYTES - 4, b"\0")
    check = zlib.crc32(fields).to_bytes(4, "big") if sum(raw[-1:]) % 2 else raw[HEADER_BYTES - 4 :][:4].ljust(4, b"\0")
    note = raw[HEADER_BYTES:]
    try:
        parse_frame_header(fields + check, token=_TOKEN, names=_NAMES, max_payload_bytes=1 << 20)
    finally:
        read_note(note)
    return None


class _Ends(NamedTuple):
    """A codec's decoder, which has decoded two messages, and its next message."""

    subject: Subject
    state: dict[str, Any]
    good: bytes


@functools.cache
def _ends() -> list[_Ends]:
    """Every codec of the catalogue, in both directions."""
    made = []
    for row, direction in itertools.product(CODECS.values(), ("forward", "backward")):
        subject = subject_of(row.example_text, direction)  # type: ignore[arg-type]
        try:
            sender, receiver = subject.fresh(), subject.fresh()
            for step in range(2):
                payload = bytes(sender.encode(hidden(2, 3, 64, seed=step), key_at(step)))
                receiver.decode(payload, key_at(step))
            good = bytes(sender.encode(hidden(2, 3, 64, seed=2), key_at(9)))
        except CodecError:  # it is for one direction
            continue
        made.append(_Ends(subject, receiver.state, good))
    return made


def _decoder_examples() -> list[bytes]:
    return [bytes([number]) + ends.good for number, ends in enumerate(_ends())]


def _decode(raw: bytes) -> object:
    """The first byte chooses the codec and the direction, the others are the payload."""
    if not raw:
        return None
    ends = _ends()[raw[0] % len(_ends())]
    receiver = ends.subject.fresh()
    receiver.load(ends.state)
    decoded = receiver.decode(raw[1:], key_at(9))
    assert decoded.numel() <= 100_000 + 8 * len(raw), f"{len(raw)} bytes became {decoded.numel()} values"
    return None


# ---------------------------------------------------------------------- texts
def _codec_examples() -> list[bytes]:
    texts = [row.example_text for row in CODECS.values()]
    texts += [
        "0: int8; 1-3: fwd=int4, bwd=int8; rest: bf16",
        "fwd=bf16, bwd=ef(topk(0.1))",
        "json:JSONDecoder(int8, x=1)",
    ]
    return [text.encode() for text in texts]


def _parse_codec(raw: bytes) -> object:
    placed = parse_placement(_text(raw)).over(3)
    assert parse_placement(placed.text).over(3) == placed
    assert placed.nominal_bits >= 0
    return list(placed.specs())


def _link_examples() -> list[bytes]:
    return [
        b"link(80Mbit, 10ms)",
        b"link(20Mbit, 50ms, up.rate=5Mbit, loss=0.1%, buffer=256kB)",
        b"link(20Mbit, 50ms, down.loss={model='gilbert-elliott', p='1%', r='25%'}, jitter=1ms, mtu=1400)",
    ]


def _parse_link(raw: bytes) -> object:
    read = load_profile(f"link({_text(raw).removeprefix('link(')}")
    assert write_profile(read)
    return read


_SETS = (
    *("training.steps=20", "codec=int8", "pipeline.layers=[1,2,1]", "profile=link(80Mbit, 10ms)", "timing=live"),
    *("workload.text=my.txt", "optimiser.clip_norm=0.5", "compute={mode='paced', forward='2ms', backward='4ms'}"),
    *("data={workers=3, exchange='star', answer='fp32', staleness=0, local_steps=1}", "training.budget_s=1e3"),
    *("pipeline.microbatches=8", "workload.batch_size=32", "played_steps=7", "codec_cost=device"),
)


def _of_few_cells(parse: Callable[[bytes], object]) -> Callable[[bytes], object]:
    """Limit the cells of a file: 64 KiB can ask for 10,000, and each takes milliseconds."""

    def limited(raw: bytes) -> object:
        with mock.patch.object(plan, "_MOST_CELLS", 300):
            return parse(raw)

    return limited


@_of_few_cells
def _parse_set(raw: bytes) -> object:
    """An override of the default experiment, whose first cell is resolved."""
    text = _text(raw)
    parse_assignment(text, "--set")
    loaded = _default_experiment()
    choice = plan.Choice(overrides=(text,))
    points = plan.untuned(plan.combinations(plan.apply_choice(loaded, choice), choice), None)
    return plan.resolve_cells(points[:1], "relay", "default")


@functools.cache
def _default_experiment() -> plan.Experiment:
    return plan.load_experiment(str(ROOT / "experiments/default/sweep.toml"))


# ---------------------------------------------------------------------- files of settings
def _parse_profile(raw: bytes) -> object:
    read = read_profile(_file("fuzzed.toml", raw))
    again = read_profile(_file("fuzzed.toml", write_profile(read).encode()))
    assert again.model_copy(update={"summary": read.summary}) == read, "it is not read back as it was written"
    return read


def _parse_device(raw: bytes) -> object:
    read = read_device(_file("fuzzed.toml", raw))
    assert read_device(_file("fuzzed.toml", write_device(read).encode())) == read
    return read


@_of_few_cells
def _parse_experiment(raw: bytes) -> object:
    loaded = plan.load_experiment(str(_file("sweep.toml", raw)))
    choice = plan.Choice(quick=bool(loaded.quick))
    asked = plan.apply_choice(loaded, choice)
    points = plan.untuned(plan.combinations(asked, choice), asked.tune)
    return plan.resolve_cells(points[:MOST_CELLS], "relay", "fuzzed", "virtual")


def _job_examples() -> list[bytes]:
    stated = "compute = { mode = 'stated', work = { forward = '2ms' } }"
    common = "topology = 'star'\nprofile = 'cable'\ncodec = 'int8'\n"
    workload = "[workload]\nmodel = 'gpt2-nano'\ntext = 'bundled'\nsequence_length = 32\nbatch_size = 8\n"
    workload += "validation_batches = 1\n"
    training = "[training]\nsteps = 4\nwarmup_steps = 1\nseed = 0\nevaluate_every = 0\n"
    cells = [
        path.read_text("utf8")
        for path in sorted(ROOT.glob("experiments/*/sweep.toml"))
        if "[cell.job]" in path.read_text("utf8")
    ]
    own = f"{common}{stated}\n{workload}{training}[job]\nkind = 'decode'\nnodes = 3\n"
    commands = "0: torchrun train.py --rank 0\n1-3: python -m worker  # a comment\n*: sleep 1\n"
    return [own.encode(), commands.encode(), *(text.encode() for text in cells[:4])]


def _parse_job(raw: bytes) -> object:
    """A cell with a table `job`, and, of the same text, a file of commands for the nodes of `exec`."""
    try:
        parse_commands(_text(raw), "fuzzed")
    except SpecError:
        tables_read = plan.read_toml(_file("job.toml", raw))
        return resolve_cell(tables_read, "relay", "fuzzed", "virtual")
    return None


# ---------------------------------------------------------------------- traces
def _rate_examples() -> list[bytes]:
    rates = trace_sources.checked_recipe("", kind="cellular", seed=1, seconds=2, mean_rate="2Mbit").make()
    csv = b'time,rate\n0,1.5\n0.5,2e3\n1,"0"\n2.25,7\n'
    return [rate_trace.format_trace(rates).encode(), b"0\n0\n5\n5\n1000\n", csv]


def _parse_rates(raw: bytes) -> object:
    """A trace of opportunities, or a CSV of rates."""
    if b"," not in raw:
        times = rate_trace.read_trace(_file("fuzzed.trace", raw)).times
        return rate_trace.bin_rates(times, 1000)
    columns = {"time_column": "time", "rate_column": "rate", "time_unit": "s", "rate_unit": "kbit/s"}
    return trace_sources.trace_from_csv(raw.decode("utf8", "replace"), "fuzzed", **columns)


def _trace_examples() -> list[bytes]:
    path, bodies = _folder() / "example.trace", []
    for stages, microbatches, steps in ((2, 2, 2), (3, 4, 1)):
        pipeline(stages, microbatches, steps).write(path)
        bodies.append(path.read_bytes()[len(trace_format.MAGIC) + 32 :])
    return bodies


def _parse_trace(raw: bytes) -> object:
    """The body of a trace; its check sum is right."""
    content = trace_format.MAGIC + hashlib.sha256(raw).digest() + raw
    trace = trace_format.parse_trace(memoryview(content), "fuzzed")
    check_trace(trace, "fuzzed")
    return totals.work_by_label(trace), totals.bytes_by_pair(trace), totals.operations_by_kind(trace)


def _played_examples() -> list[bytes]:
    trace = pipeline(2, 2, 2)
    lanes = tuple(
        played.PlayedLane(*(trace_format.unpack_column("q", bytes(8 * len(lane))) for _ in range(4)))
        for lane in trace.lanes
    )
    counters = [tuple(played.NodeCounters(1, 2, 3, 4) for _ in trace.nodes)] * 2
    sockets = [(played.SocketState(0, 1, "cubic", 1, 1, 10, 100, 0, 3, 3, 0),)] * 2
    made = played.Played("virtual", 2, (0, 1), lanes, counters, sockets, 0, {"links": []}, {"a": 1})
    made.write(_folder() / "example.played")
    return [(_folder() / "example.played").read_bytes()]


def _parse_played(raw: bytes) -> object:
    """A file of the player; the check sum of its columns is made right where the header can be found."""
    begin = len(played.MAGIC) + 4
    length = int.from_bytes(raw[len(played.MAGIC) : begin], "little")
    columns = raw[begin + length :]
    right = re.sub(
        rb'"sha256":"[0-9a-f]{64}"', f'"sha256":"{hashlib.sha256(columns).hexdigest()}"'.encode(), raw[: begin + length]
    )
    return played.read_played(_file("fuzzed.played", right + columns))


@functools.cache
def _observed_examples() -> list[bytes]:
    group = {"kind": "group", "name": "g", "ranks": [0, 1]}
    about = {"version": 1, "rank": 0, "ranks": 2}
    op = {
        "kind": "op",
        "what": "all_reduce",
        "group": "g",
        "number": 0,
        "bytes": 4096,
        "item": 4,
        "level": 0,
        "begin": 10,
        "end": 50,
        "called": 12,
        "root": None,
        "peer": None,
        "tag": 0,
    }
    wait = {"kind": "wait", "number": 0, "begin": 20, "end": 50}
    step = {"kind": "step", "at": 60, "by": "job"}
    lines = (about, group, op, wait, {**op, "what": "send", "peer": 1, "number": 1}, step)
    return ["".join(json.dumps(line) + "\n" for line in lines).encode()]


def _parse_observed(raw: bytes) -> object:
    """The recording of rank 0 of two; rank 1's is as the first line says, and right."""
    folder = _folder() / "observed"
    folder.mkdir(exist_ok=True)
    (folder / "rank-0.jsonl").write_bytes(raw)
    other = (
        _observed_examples()[0]
        .replace(b'"rank": 0', b'"rank": 1')
        .replace(b'"send", "peer": 1', b'"receive", "peer": 0')
    )
    (folder / "rank-1.jsonl").write_bytes(other)
    job = observations.read_observations(folder)
    observations.totals(job), observations.timeline(job)
    return join(job)


@functools.cache
def _chakra_examples() -> list[bytes]:
    written = save_chakra(pipeline(2, 2, 2), _folder() / "example.et")
    return [path.read_bytes() for path in written[:1]]


def _parse_chakra(raw: bytes) -> object:
    """NPU 0 of two; the other one's graph is right."""
    _chakra_examples()
    graphs = [read_chakra(_file("fuzzed.0.et", raw)), read_chakra(_folder() / "example.1.et")]
    return from_chakra(graphs, flops_per_s=1e12)


# ---------------------------------------------------------------------- results
_CELL = cell("int8", profile("home", pipe(80_000_000, 10_000_000), pipe(80_000_000, 10_000_000)), steps=4)


def _calibration_examples() -> list[bytes]:
    costs = [stage_costs(forward_ns=5, backward_ns=5, clip_ns=1, update_ns=1, codec_ns=1)] * 3
    machine = {"cpu_model": "Example", "cores": 2}
    made = Calibration.model_validate({"taken_at": "", "machine": machine, "recipes": {recipe_of(_CELL).id: costs}})
    return [made.model_dump_json(indent=1).encode()]


def _parse_calibration(raw: bytes) -> object:
    read = results.read_json(_file("calibration.json", raw), Calibration)
    check_given(read, [recipe_of(_CELL)])
    return read


def _cell_examples() -> list[bytes]:
    lte = load_profile("lte")
    return [
        each.model_dump_json().encode() for each in (_CELL, cell("bf16", lte), cell("fp32", topology="line"))
    ] + _files("experiments/four_regions/cells.toml", "experiments/m95_throughput/cells.toml")


@_of_few_cells
def _parse_cell(raw: bytes) -> object:
    """cell.json of a run, or cells.toml of a prediction."""
    if raw.lstrip().startswith(b"{"):
        read = results.read_json(_file("cell.json", raw), Cell)
        return read.id, recipe_of(read).id, read.boundaries
    return plan_cells(str(_file("cells.toml", raw)))[:MOST_CELLS]


@functools.cache
def _run() -> Run:
    folder = results.make_folder(_folder() / "results")
    run = write_run(folder, _CELL, Pipeline(_CELL.profiles[0]))
    record_sweep(folder, [_CELL])
    return run


_RESULT_FILES = (
    *(
        "summary.json",
        "cell.json",
        "certificate.json",
        "lab.json",
        "environment.json",
        "steps-0.jsonl",
        "steps-2.jsonl",
    ),
    *("counters.jsonl", "../../sweep.json"),
)


@functools.cache
def _result_examples() -> list[bytes]:
    folder = _run().folder
    return [bytes([number]) + (folder / name).read_bytes() for number, name in enumerate(_RESULT_FILES)]


def _parse_results(raw: bytes) -> object:
    """The first byte chooses a file of a run, which the others replace; the table of results is made."""
    if not raw:
        return None
    number, folder = raw[0] % len(_RESULT_FILES), _run().folder
    path, before = folder / _RESULT_FILES[number], _result_examples()[number][1:]
    path.write_bytes(raw[1:])
    try:
        experiment = folder.parent.parent
        cells = results.last_sweep(experiment).cells
        tables.terminal_table(collect.latest(experiment, cells))
        list(_run().samples())
        return [_run().steps(stage) for stage in range(3)], _run().lab, _run().certificates, _run().environment
    finally:
        path.write_bytes(before)


PARSERS: dict[str, Parser] = {
    "frame": Parser("a frame's header and the note of a decision", _frame_examples, _parse_frame),
    "decoders": Parser("a payload, by every codec of the catalogue in both directions", _decoder_examples, _decode),
    "chakra": Parser("a Chakra graph, made into a trace", _chakra_examples, _parse_chakra),
    "notation": Parser("a codec's text, placed on three boundaries and written back", _codec_examples, _parse_codec),
    "links": Parser("an inline link", _link_examples, _parse_link),
    "set": Parser("--set, for a cell of the default experiment", lambda: [text.encode() for text in _SETS], _parse_set),
    "profiles": Parser("a profile file, written back", lambda: _files("netem_profiles/*.toml"), _parse_profile),
    "devices": Parser(
        "a device file, written back", lambda: [p.read_bytes() for p in sorted(SHIPPED.glob("*.toml"))], _parse_device
    ),
    "experiments": Parser(
        "an experiment file, resolved", lambda: _files("experiments/*/sweep.toml"), _parse_experiment
    ),
    "jobs": Parser("a table `job`, or the commands of nodes", _job_examples, _parse_job),
    "cells": Parser("cell.json, or cells.toml of a prediction", _cell_examples, _parse_cell),
    "rates": Parser("a rate trace, or a CSV of rates", _rate_examples, _parse_rates),
    "traces": Parser("a trace with a right check sum, checked and summed up", _trace_examples, _parse_trace),
    "played": Parser("the times of a played trace", _played_examples, _parse_played),
    "observed": Parser("the recording of a PyTorch job, joined", _observed_examples, _parse_observed),
    "calibrations": Parser("calibration.json, for a recipe", _calibration_examples, _parse_calibration),
    "benchmarks": Parser(
        "a file of bench all",
        lambda: [Benchmarks(format=1, machine={"cores": 2}, rows={"plan, s": (1.5, 2.0)}).model_dump_json().encode()],
        lambda raw: read_benchmarks(_file("benchmarks.json", raw)),
    ),
    "results": Parser("each file of a run, tabulated", _result_examples, _parse_results),
}
