"""A paced job sleeps as long as was recorded, or as a device takes, and sends gradients when they would be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from testbed.devices.device import load_device
from testbed.errors import SpecError, UnknownNameError
from testbed.torch import pace
from testbed.trace.observations import read_observations
from tests.torch.jobs import run_ranks

_LAYERS = ("2 Linear", "4 Linear", "5 Linear")
"""Modules are numbered as they are first entered: DistributedDataParallel, Sequential, Linear, ReLU, ..."""


def _done(folder: Path, wanted: dict[str, Any], ranks: int = 2) -> list[list[tuple[str, float]]]:
    """Return what each rank did in its last step."""
    said = run_ranks("paced_job.py", ranks, folder, {"TESTBED_TORCH": json.dumps(wanted)})
    return [[(what, value) for what, value in json.loads(each)] for each in said]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the notes of a job whose durations were replaced by ones that tell intervals apart."""
    folder = tmp_path_factory.mktemp("paced")
    _done(folder / "job", {"folder": str(folder / "notes"), "record": True})
    for path in (folder / "notes").iterdir():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "module":
                line["ns"] = _duration(line["phase"], line["name"])
            if line["kind"] == "op":
                line["end"] = line["begin"]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "notes"


def _duration(phase: str, name: str) -> int:
    """Return a duration that no other interval has."""
    number = int(name.split()[0]) if name[:1].isdigit() else 9
    phases = (
        pace.ENTER,
        pace.LEAVE,
        pace.BEFORE_BACKWARD,
        pace.BACKWARD,
        pace.BACKWARD_END,
        pace.BEFORE_UPDATE,
        pace.UPDATE,
    )
    return 1000 * (1 + phases.index(phase)) + number


def test_every_interval_of_a_step_is_slept_once(notes: Path, tmp_path: Path) -> None:
    for rank, done in zip(read_observations(notes), _done(tmp_path, _recorded(notes)), strict=True):
        ends = rank.steps
        last = [line["ns"] for line in rank.of("module") if ends[-2] <= line["at"] < ends[-1]]
        slept = [duration for what, duration in done if what == "sleep"]
        assert len(last) > 15
        # An interval is noted with its beginning: the first of a step begins at the end of the update before.
        first = _duration(pace.ENTER, "0 DistributedDataParallel")
        assert sorted(slept) == sorted([*last, first][: len(slept)]) or sorted(slept) == sorted(last)


@pytest.mark.parametrize(("came", "computed"), [(90, 800), (900, 60), (1000, 0)])
def test_a_wait_of_the_reducer_is_no_computing(tmp_path: Path, came: int, computed: int) -> None:
    """The reducer waits in C++, after the backward pass; that its bucket came may be noted later than that it ended."""
    lines: list[dict[str, Any]] = [
        {"kind": "about", "version": 1, "rank": 0, "ranks": 1, "device": "cpu", "clock": "monotonic"},
        {"kind": "group", "name": "0", "ranks": [0], "level": 0},
        {"kind": "op", "number": 1, "what": "all_reduce", "call": "allreduce", "group": "0", "level": 0}
        | {"bytes": 4, "item": 4, "begin": 60, "called": 61, "end": came},
        {"kind": "module", "phase": pace.BACKWARD, "name": "0 Linear", "at": 50, "ns": 100},
        {"kind": "backward_end", "at": 155},
        {"kind": "module", "phase": pace.BEFORE_UPDATE, "name": "SGD", "at": 160, "ns": 800},
    ]
    (tmp_path / "rank-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (rank,) = read_observations(tmp_path)
    durations = pace._durations(rank)
    assert durations[pace.BACKWARD, "0 Linear"] == [100]
    assert durations[pace.BEFORE_UPDATE, "SGD"] == [computed]


def test_gradients_are_sent_after_their_layer_and_before_the_next(notes: Path, tmp_path: Path) -> None:
    for done in _done(tmp_path, _recorded(notes)):
        backward = [("sleep", _duration(pace.BACKWARD, name)) for name in reversed(_LAYERS)]
        at = [done.index(each) for each in backward]
        sent = [number for number, (what, _) in enumerate(done) if what == "all_reduce"]
        assert len(sent) == len(_LAYERS)
        order = [number for pair in zip(at, sent, strict=True) for number in pair]
        assert order == sorted(order), done


def test_without_a_pace_nothing_is_slept(tmp_path: Path) -> None:
    for done in _done(tmp_path, {"pace": {"mode": "zero"}}):
        assert {what for what, _ in done} == {"all_reduce"}


def test_from_flops_products_take_time_and_nothing_else(tmp_path: Path) -> None:
    device = load_device("t4")
    assert device.fp32 is not None
    product = 2 * 8 * 40 * 40 * 1e9 / device.fp32.effective_flops
    update = 3 * 40 * 40 * 28 * 1e9 / device.bandwidth_bytes_per_s
    for done in _done(tmp_path, {"pace": {"mode": "flops", "device": "t4"}}):
        slept = [duration for what, duration in done if what == "sleep" and duration]
        assert slept == pytest.approx([*[product] * 3, *[2 * product] * 3, update])
        order = [what for what, duration in done if what == "all_reduce" or duration == pytest.approx(2 * product)]
        assert order == ["sleep", "all_reduce"] * 3


@pytest.mark.parametrize(
    ("wanted", "error", "said"),
    [
        ({"mode": "guessed"}, UnknownNameError, "there is no mode of pace 'guessed'"),
        ({"mode": "recorded"}, SpecError, "needs 'file' and nothing else"),
        ({"mode": "recorded", "file": "/nowhere"}, SpecError, "/nowhere holds no rank-"),
        ({"mode": "flops", "device": "abacus"}, UnknownNameError, "there is no device 'abacus'"),
        ({"mode": "flops", "device": "t4", "speed": 2}, SpecError, "nothing else"),
    ],
)
def test_a_pace_that_makes_no_sense_is_refused(wanted: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        pace.layers({"pace": wanted})


def test_notes_without_modules_are_refused(notes: Path, tmp_path: Path) -> None:
    for path in notes.iterdir():
        kept = [line for line in path.read_text().splitlines(True) if '"module"' not in line]
        (tmp_path / path.name).write_text("".join(kept))
    with pytest.raises(SpecError, match="has no durations of modules; observe the job with record"):
        pace.layers({"pace": {"mode": "recorded", "file": str(tmp_path)}})


def _recorded(notes: Path) -> dict[str, Any]:
    return {"pace": {"mode": "recorded", "file": str(notes)}}
