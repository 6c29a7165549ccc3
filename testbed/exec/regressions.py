"""Detects changes in communication: saves a run's numbers as a baseline, and compares another run with it.

The file is a list of `{"name", "unit", "value"}`, which continuous benchmarks read as "smaller is better". On the
virtual clock nothing varies from run to run, so any difference comes from the program or its libraries.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from testbed.errors import SpecError
from testbed.exec.order import ExecResult, step_times


class RunNumber(NamedTuple):
    """One number of a run; smaller is better."""

    name: str
    unit: str
    value: float


_LIST = TypeAdapter(list[RunNumber])


def numbers(result: ExecResult) -> list[RunNumber]:
    """Return the numbers to compare: each node's median step, link traffic, operations, payload by pair of nodes."""
    collected = [
        RunNumber(f"{name}: step, median", "ms", median(times[1:] or times) / 1e6)
        for name, times in step_times(result).items()
    ]
    if not collected:
        collected.append(RunNumber("the whole job", "ms", result.lasted_ns / 1e6))
    for link, ways in result.links.items():
        for way, counts in ways.items():
            collected.append(RunNumber(f"{link} {way}: bytes", "B", counts.bytes))
            collected.append(RunNumber(f"{link} {way}: packets", "packets", counts.packets))
    for each in result.operations:
        collected.append(RunNumber(f"{each.what}: count", "operations", each.operations))
        collected.append(RunNumber(f"{each.what}: tensors", "B", each.payload_bytes))
    names = [node.name for node in result.nodes]
    return collected + [
        RunNumber(f"{names[talk.source]} to {names[talk.target]}: TCP payload", "B", talk.payload_bytes)
        for talk in result.talks
    ]


def write_numbers(run_numbers: Sequence[RunNumber], path: Path) -> None:
    """Write a baseline."""
    content = [{"name": each.name, "unit": each.unit, "value": each.value} for each in run_numbers]
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf8")


def read_numbers(path: Path) -> list[RunNumber]:
    """Read a baseline. SpecError for an invalid file."""
    try:
        return _LIST.validate_json(path.read_bytes())
    except OSError as error:
        raise SpecError(f"cannot read the baseline {path}: {error.strerror}; make one with --save") from None
    except ValidationError as error:
        raise SpecError(
            f"{path} is not a baseline, which is a list of name, unit and value: {error.errors()[0]['msg']}; make one "
            "with --save"
        ) from None


def differences(current: Sequence[RunNumber], baseline: Sequence[RunNumber], threshold: float) -> Iterator[str]:
    """Yield a sentence for each number that deviates from its baseline by more than the share `threshold`."""
    before = {each.name: each for each in baseline}
    for each in current:
        if (old := before.pop(each.name, None)) is None:
            yield f"{each.name}: {each.value:.9g} {each.unit}, and the baseline has none"
        elif abs(each.value - old.value) > threshold * abs(old.value):
            change = "" if old.value == 0 else f" ({100 * (each.value / old.value - 1):+.2f} %)"
            yield f"{each.name}: {each.value:.9g} {each.unit}, was {old.value:.9g}{change}"
    yield from (f"{name}: gone, was {old.value:.9g} {old.unit}" for name, old in before.items())
