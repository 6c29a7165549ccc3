"""Reads a timeline as Perfetto does, and checks what that relies on: the Trace Event Format."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Event = dict[str, Any]
REQUIRED = {
    "X": {"name", "ts", "dur", "pid", "tid"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "ts", "pid", "args"},
}
REQUIRED |= {phase: {"name", "cat", "id", "ts", "pid", "tid"} for phase in "besf"}


def check_events(events: Sequence[Event]) -> None:
    """Check what each phase must have, ordered times, and a name for every process and thread."""
    for event in events:
        assert REQUIRED[event["ph"]] <= event.keys(), event
        assert event.get("dur", 0) >= 0
    timed = [event["ts"] for event in events if event["ph"] != "M"]
    assert timed == sorted(timed)
    named = {(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"}
    for event in events:
        assert ("process_name", event["pid"], 0) in named
        assert event["ph"] in "MC" or ("thread_name", event["pid"], event["tid"]) in named


def check_nesting(events: Sequence[Event]) -> None:
    """Check that slices of a thread lie beside or within each other. Perfetto drops others."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], round(event["ts"] + event["dur"], 3)))
    for slices in threads.values():
        around: list[float] = []
        for begin, end in slices:
            while around and around[-1] <= begin:
                around.pop()
            assert not around or end <= around[-1]
            around.append(end)


def pairs(events: Sequence[Event], first: str, last: str) -> int:
    """Count the pairs of two phases, each of which begins and ends once, in this order."""
    times: dict[str, dict[int, float]] = {first: {}, last: {}}
    for event in events:
        if event["ph"] in times:
            assert event["id"] not in times[event["ph"]]
            times[event["ph"]][event["id"]] = event["ts"]
    assert times[first].keys() == times[last].keys()
    assert all(times[first][number] <= times[last][number] for number in times[first])
    return len(times[first])
