"""Writes a run's timeline in the Trace Event Format, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Each stage has a track with its actions and waits; each directed boundary a track with the frames in flight, with arrows
to the actions that sent and used them; each link and direction a counter of its rate. Times are microseconds of the
emulated world since the first step began.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed import paths
from testbed.export import rows
from testbed.export.rows import RecordedRun
from testbed.metrics import PipelineStep
from testbed.metrics.spans import flights, overran, spans
from testbed.records import ActionRecord
from testbed.results import Run
from testbed.trace.observations import Span

Event = dict[str, Any]
STAGES, BOUNDARIES, LINKS = 1, 2, 3
"""Process ids, which group the tracks."""
_GROUPS = {STAGES: "stages", BOUNDARIES: "boundaries", LINKS: "links"}


def _us(recorded: RecordedRun, at_ns: int) -> float:
    return round(recorded.moment(at_ns) * 1e6, 3)


def _slice(
    recorded: RecordedRun, name: str, category: str, thread: int, begin_ns: int, end_ns: int, **args: Any
) -> Event:
    begin, end = _us(recorded, begin_ns), _us(recorded, end_ns)
    event = {"ph": "X", "name": name, "cat": category, "pid": STAGES, "tid": thread, "ts": begin}
    return event | {"dur": round(end - begin, 3)} | ({"args": args} if args else {})


def _names(nodes: Sequence[str], boundaries: Mapping[tuple[int, int], int]) -> Iterator[Event]:
    def named(kind: str, pid: int, tid: int, name: str) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}

    yield from (named("process_name", pid, 0, name) for pid, name in _GROUPS.items())
    yield from (named("thread_name", STAGES, node, name) for node, name in enumerate(nodes))
    yield from (
        named("thread_name", BOUNDARIES, thread, f"{nodes[sender]} to {receiver}")
        for (sender, receiver), thread in boundaries.items()
    )


def _stages(recorded: RecordedRun, step: PipelineStep) -> Iterator[Event]:
    title = f"step {step.number}" if step.phase == "train" else f"{step.phase} after step {step.number}"
    for stage, record in enumerate(step.records):
        about = {"step": step.number, "warmup": step.warmup}
        yield _slice(recorded, title, step.phase, stage, record.start_ns, record.end_ns, **about)
        for action in record.actions:
            name = f"{action.kind}{action.microbatch}"
            late = {"overrun": True} if overran(action) else {}
            yield _slice(recorded, name, "action", stage, action.input_ns, action.encoded_ns, **late)
        for span in spans(record):
            name = span.activity if span.microbatch is None else f"{span.activity} {span.microbatch}"
            yield _slice(recorded, name, span.activity, stage, span.begin_ns, span.end_ns)


def _boundaries(
    recorded: RecordedRun, step: PipelineStep, threads: Mapping[tuple[int, int], int], first: int
) -> Iterator[Event]:
    """Yield the frames of a step as asynchronous events, because they overlap; `first` is the id of the first one."""
    used: list[dict[tuple[str, int], ActionRecord]]
    used = [{(action.kind, action.microbatch): action for action in record.actions} for record in step.records]
    for number, flight in enumerate(flights(step.records), start=first):
        sent, name = flight.sent, f"{flight.direction} {flight.sent.microbatch}"
        about: Event = {"name": name, "cat": "frame", "pid": BOUNDARIES, "tid": threads[flight.sender, flight.receiver]}
        sizes = {"raw_bytes": sent.raw_bytes, "payload_bytes": sent.payload_bytes, "frame_bytes": sent.frame_bytes}
        yield about | {"ph": "b", "id": number, "ts": _us(recorded, sent.first_byte_ns), "args": sizes}
        yield about | {"ph": "e", "id": number, "ts": _us(recorded, flight.end_ns)}
        key = ("F" if flight.direction == "forward" else "B", sent.microbatch)
        source, target = used[flight.sender].get(key), used[flight.receiver].get(key)
        if source is not None and target is not None and source.input_ns < source.encoded_ns:
            arrow = {"name": name, "cat": "flow", "pid": STAGES, "id": number}
            # An arrow must start inside its source slice, which excludes the slice's end.
            yield arrow | {
                "ph": "s",
                "tid": flight.sender,
                "ts": _us(recorded, min(source.computed_ns, source.encoded_ns - 1)),
            }
            yield arrow | {"ph": "f", "bp": "e", "tid": flight.receiver, "ts": _us(recorded, target.input_ns)}


def _counters(recorded: RecordedRun) -> Iterator[Event]:
    for row in rows.link_rows(recorded):
        if row["rate_bps"] is not None and row["at_s"] is not None:
            name = f"{row['link']} {row['direction']}"
            at, rate = round(row["at_s"] * 1e6, 3), round(row["rate_bps"] / 1e6, 3)
            yield {"ph": "C", "name": name, "pid": LINKS, "tid": 0, "ts": at, "args": {"Mbit/s": rate}}


def events(recorded: RecordedRun) -> list[Event]:
    """Return all events of a run: names first, then by time."""
    pairs = sorted({(each.sender, each.receiver) for step in recorded.steps for each in flights(step.records)})
    threads = {pair: number for number, pair in enumerate(pairs)}
    timed: list[Event] = []
    frames = 0
    for step in recorded.steps:
        timed += _stages(recorded, step)
        timed += _boundaries(recorded, step, threads, frames)
        frames += sum(len(record.sent) for record in step.records)
    timed += _counters(recorded)
    # Longer slices come first, so that an inner slice follows the one around it.
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return [*_names(recorded.cell.node_names, threads), *timed]


def write_timelines(runs: Iterable[Run], folder: Path) -> list[Path]:
    """Write one file per run, CELL-run-K.json, into an existing folder; return the files."""
    made = []
    for recorded in map(RecordedRun, runs):
        cell_id, cell = recorded.run.folder.parent.name, recorded.cell
        about = {"cell": cell_id, "timing": cell.timing, "dilation": cell.compute.dilation}
        content = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events(recorded)}
        path = folder / f"{cell_id}-{recorded.run.folder.name}.json"
        path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf8")
        paths.give_to_user(path)
        made.append(path)
    return made


def write_observed(spans: Sequence[Span], path: Path) -> None:
    """Write the timeline of an observed job: a group of tracks per rank. Operations, and waits of several threads, may
    overlap, so each is a pair of events.
    """
    tracks = {"steps": 0, "waits": 1, "operations": 2}
    names: list[Event] = []
    for rank in sorted({span.rank for span in spans}):
        about: Event = {"ph": "M", "pid": rank, "ts": 0}
        names.append(about | {"name": "process_name", "tid": 0, "args": {"name": f"rank {rank}"}})
        names += [about | {"name": "thread_name", "tid": tid, "args": {"name": name}} for name, tid in tracks.items()]
    timed: list[Event] = []
    for number, span in enumerate(spans):
        about = {"name": span.name, "cat": span.track, "pid": span.rank, "tid": tracks[span.track]}
        begin, end = round(span.begin_ns / 1e3, 3), round(span.end_ns / 1e3, 3)
        if span.track == "steps":
            timed.append(about | {"ph": "X", "ts": begin, "dur": round(end - begin, 3)})
        else:
            timed.append(about | {"ph": "b", "id": number, "ts": begin, "args": span.about})
            timed.append(about | {"ph": "e", "id": number, "ts": end})
    timed.sort(key=lambda event: event["ts"])  # stable: an empty operation begins before it ends
    content = {"displayTimeUnit": "ms", "traceEvents": [*names, *timed]}
    path.write_text(json.dumps(content, separators=(",", ":")), encoding="utf8")
    paths.give_to_user(path)
