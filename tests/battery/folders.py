"""What a folder with the records of a training says: a recipe's, a played run's or a live one's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.battery.entries import Record, digest

_SIZES = ("payload_bytes", "raw_bytes", "frame_bytes", "peer", "choice")
_NAMES = ("kind", "direction", "microbatch")
_NUMBERS = ("step", "phase", "warmup", "loss", "accuracy", "gradient_norm", "learning_rate", "tokens")
_SUMMARY = ("status", "ended", "certificate", "measured_steps", "step_s", "steady_from", "steady_period")
_IDEAL = ("ideal_step_s", "efficiency", "bound")


def steps_of(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the records of each node, as JSON has them."""
    paths = sorted(folder.glob("steps-*.jsonl"), key=lambda path: int(path.stem.split("-")[1]))
    return [[json.loads(line) for line in path.read_text(encoding="utf8").splitlines()] for path in paths]


def numbers_of(nodes: Sequence[Sequence[dict[str, Any]]]) -> Record:
    """Return what the records of a training say, times left out.

    `numbers` are what was computed, and `midway` what evaluations before the last one found; `sizes` what crossed, and
    between whom; `names` what actions and directions are called.
    """
    numbers, midway, sizes, names, losses = (list[Any]() for _ in range(5))
    for steps in nodes:
        for step in steps:
            evaluated = step["phase"] != "train" and step["step"] < steps[-1]["step"]
            (midway if evaluated else numbers).append([step.get(name) for name in _NUMBERS])
            sizes += [[frame.get(name) for name in _SIZES] for frame in (*step["sent"], *step["received"])]
            told = (step["actions"], step["sent"], step["received"])
            names += [[each.get(name) for name in _NAMES] for each in itertools.chain(*told)]
        losses = [step["loss"] for step in steps]
    return {
        "numbers": digest(numbers),
        "midway": digest(midway),
        "sizes": digest(sizes),
        "names": digest(names),
        "info": losses[-1:],
    }


def ends_of(nodes: Sequence[Sequence[dict[str, Any]]]) -> list[int]:
    """Return when each training step was over everywhere, in ns since the first began anywhere."""
    trained = [[step for step in steps if step["phase"] == "train"] for steps in nodes]
    begin = min(steps[0]["start_ns"] for steps in trained)
    return [max(step["end_ns"] for step in each) - begin for each in zip(*trained, strict=True)]


def times_of(nodes: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return a hash of all times that the records have, in their order."""
    return digest([_times(step) for steps in nodes for step in steps])


def counted_of(nodes: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Return a hash of what interfaces and sockets counted."""
    return digest(
        [
            [list((step["counters"] or {}).values()), [list(socket.values()) for socket in step["sockets"]]]
            for steps in nodes
            for step in steps
        ]
    )


def summary_of(folder: Path) -> Record:
    """Return what the summary of a run says: `summary`, and what is said of the `ideal`."""
    said = json.loads((folder / "summary.json").read_text(encoding="utf8"))
    return {"summary": [said.get(name) for name in _SUMMARY], "ideal": [said.get(name) for name in _IDEAL]}


def _times(record: dict[str, Any]) -> list[Any]:
    own = [value for name, value in record.items() if name.endswith("_ns")]
    return [own, *(_times(part) for name in ("actions", "sent", "received") for part in record.get(name, ()))]
