"""What a part of the battery is: named entries, each made by itself, with hashes or numbers by what they say."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from testbed.trace.format import RECEIVE, SIGNAL, WAIT, WORK, Lane, Trace

Record = dict[str, Any]
"""Of one entry, JSON's values by name. The name `info` is for readers, and is not compared; times in ns that may differ
by TOLERANCE_NS are in `near_ns`."""
Entries = Mapping[str, Callable[[], Record]]
HASHES = Path(__file__).parent / "hashes"
TOLERANCE_NS = 1000
_DIGITS = 6
"""Bytes of a hash that are kept."""


def digest(content: object) -> str:
    """Return a short hash of bytes, or of what JSON can say."""
    data = content if isinstance(content, bytes) else json.dumps(content, separators=(",", ":")).encode()
    return hashlib.sha256(data).hexdigest()[: 2 * _DIGITS]


def drawn(below: int, *what: object) -> int:
    """Return a number from 1 to below - 1 that `what` alone decides: made in any order, sizes and times stay."""
    return 1 + int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest(), "little") % (below - 1)


def recorded(part: str) -> dict[str, Record]:
    """Return the committed entries of a part."""
    found: dict[str, Record] = json.loads((HASHES / f"{part}.json").read_text(encoding="utf8"))
    return found


def write(part: str, entries: Mapping[str, Record]) -> None:
    """Write a part's entries, one a line."""
    lines = (f"{json.dumps(name)}:{json.dumps(entries[name], separators=(',', ':'))}" for name in sorted(entries))
    (HASHES / f"{part}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf8")
    if part == "B":
        (HASHES / "machine.json").write_text(json.dumps(machine()) + "\n", encoding="utf8")


def machine() -> dict[str, str]:
    """Return what decides how floats are rounded here."""
    known = Path("/proc/cpuinfo").read_text(encoding="utf8").splitlines()
    facts = dict(line.split(":", 1) for line in known if ":" in line)
    says = {name.strip(): value.strip() for name, value in facts.items()}
    instructions = digest(says.get("flags", says.get("Features", "")).split())
    return {"cpu": says.get("model name", "unknown"), "instructions": instructions, "torch": version("torch")}


def recorded_here() -> bool:
    """Say whether trainings round here as they did where the battery was recorded."""
    return bool(json.loads((HASHES / "machine.json").read_text(encoding="utf8")) == machine())


def differences(before: Record, after: Record) -> Iterator[str]:
    """Yield what of an entry differs, in words."""
    for name in sorted((before.keys() | after.keys()) - {"info"}):
        if name not in before or name not in after:
            yield f"{name} is {'new' if name in after else 'gone'}"
        elif name == "near_ns":
            late = [new - old for old, new in zip(before[name], after[name], strict=False)]
            if len(before[name]) != len(after[name]) or max(map(abs, late), default=0) > TOLERANCE_NS:
                yield f"{name}: {len(before[name])} then, {len(after[name])} now, apart by {late}"
        elif before[name] != after[name]:
            was, now = (text if len(text := json.dumps(each[name])) < 300 else "..." for each in (before, after))
            yield f"{name}: {was} -> {now}"


# ------------------------------------------------------------------ traces
def normal_form(trace: Trace) -> tuple[list[Any], list[Any]]:
    """Return what a trace says whoever made it, and the names in it.

    Lanes come by node and name; messages and events are numbered in the order of their first use; work that takes no
    time is left out, for makers differ in whether they write it down.
    """
    tags: dict[tuple[int, ...], int] = {}
    said, names = list[Any](), list[Any]([trace.nodes])
    for lane in sorted(trace.lanes, key=lambda lane: (lane.node, lane.name)):
        columns, labels, starts = array("q"), list[str](), [0]
        for step in range(trace.steps):
            for kind, label, peer, tag, value in lane.operations(step):
                if kind == WORK:
                    if not value:
                        continue
                    number = 0
                else:
                    number = tags.setdefault(_identity(lane, kind, peer, tag), len(tags))
                columns.extend((kind, peer, number, value))
                labels.append(trace.labels[label])
            starts.append(len(labels))
        said.append((lane.node, lane.name, hashlib.sha256(columns.tobytes()).hexdigest(), starts))
        names.append(labels)
    return said, names


def _identity(lane: Lane, kind: int, peer: int, tag: int) -> tuple[int, ...]:
    if kind in (SIGNAL, WAIT):
        return (tag,)
    return (peer, lane.node, tag) if kind == RECEIVE else (lane.node, peer, tag)


def trace_record(trace: Trace) -> Record:
    """Return an entry of a trace: `trace` is its normal form, `labels` what its nodes and operations are called."""
    said, names = normal_form(trace)
    return {"trace": digest(said), "labels": digest(names)}
