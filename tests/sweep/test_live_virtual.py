"""Live runs on the virtual clock: what is refused before anything starts, and that a run repeats to the last byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testbed.commands import sweep
from testbed.errors import CapabilityError, SpecError, UserError
from testbed.profiles import load_profile
from testbed.results import Run
from testbed.spec import Cell, recipe_of
from testbed.sweep import conduct, live_virtual, plan
from testbed.training.memory_need import predict_memory
from tests.commands import Command
from tests.known import known

PACED = ["compute.mode=paced", "compute.forward=10ms", "compute.backward=20ms", "compute.update=1ms"]
LIVE = ["timing=live", "codec_cost=zero"]


def agenda(folder: Path, *fields: str, clock: Any = "virtual", codec: str = "adaptive(5)") -> conduct.Agenda:
    axes = {"codec": [codec], "profile": ["cable"]}
    experiment = plan.load_experiment("default").model_copy(update={"axes": axes})
    return conduct.make_agenda(experiment, "netem", plan.Choice(False, list(fields)), folder, clock=clock)


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    (cell,) = agenda(tmp_path, *LIVE, *PACED).cells
    return cell


def test_a_live_cell_whose_codecs_cost_nothing_is_on_the_virtual_clock(cell: Cell) -> None:
    assert (cell.timing, cell.clock, cell.engine, cell.codec_cost) == ("live", "virtual", "netem", "zero")


@pytest.mark.parametrize(
    ("fields", "clock", "says"),
    [
        (LIVE, "virtual", r"compute takes no time.*compute.mode = 'paced'"),
        ([*LIVE, *PACED], "real", r"codec_cost is 'zero'.*--clock virtual"),
    ],
)
def test_what_a_clock_cannot_do_is_refused(tmp_path: Path, fields: list[str], clock: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        agenda(tmp_path, *fields, clock=clock)


def test_a_live_cell_is_not_silently_put_on_the_real_clock(tmp_path: Path) -> None:
    asked = agenda(tmp_path, "timing=live", *PACED)
    assert [cell.clock for cell in asked.cells] == ["real"]
    sweep._check_clock(asked, "auto")
    with pytest.raises(UserError, match=r"--clock virtual was requested.*codec_cost = 'zero'"):
        sweep._check_clock(asked, "virtual")


def test_what_repeats_exactly_is_run_once_and_what_is_drawn_several_times(cell: Cell) -> None:
    lossy = load_profile("lossy-80mbps")
    assert conduct.wanted_runs(cell, 5) == 1
    assert conduct.wanted_runs(cell.model_copy(update={"profiles": (lossy,)}), 1) == conduct.LINK_SEEDS


def test_memory_is_checked_first(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = live_virtual.guest_memory(cell)
    assert asked > predict_memory(recipe_of(cell))
    monkeypatch.setattr(live_virtual, "available_memory", lambda: asked)
    live_virtual.check_memory(cell)
    monkeypatch.setattr(live_virtual, "available_memory", lambda: asked - 1)
    with pytest.raises(CapabilityError, match=r"its guest needs .* of memory, and"):
        live_virtual.check_memory(cell)


@pytest.mark.slow
@pytest.mark.clock_kernel
@pytest.mark.timeout(1200)
def test_an_adaptive_run_repeats_to_the_last_byte_and_nanosecond(tmp_path: Path) -> None:
    """Two boots, into folders of other names: the same choices, losses, times, counters."""
    runs: list[Run] = []
    for name in ("first", "another"):
        (tmp_path / name).mkdir()
        with Command.standing(tmp_path / name, "netem") as command:
            fields = [*LIVE[1:], *PACED, "pipeline.stages=2", "training.evaluate_every=0"]
            asked = command.cell(*fields, steps=3, codec="adaptive(5)", profile="cable")
            asked[asked.index("--engine") : asked.index("--engine") + 2] = ["--clock", "virtual"]
            assert "cable" in command.finish(*asked)
            runs.append(command.last()[0])
            certificates = runs[-1].certificates
            assert (certificates.verdict, known(certificates.before).clock) == ("PASS", "virtual")
    for records in ("steps-0.jsonl", "steps-1.jsonl", "counters.jsonl"):
        first, another = ((run.folder / records).read_bytes() for run in runs)
        assert first == another
    choices = {sent.choice for step in runs[0].steps(0) for sent in step.sent}
    assert len(choices - {None}) > 1


@pytest.mark.slow
@pytest.mark.clock_kernel
@pytest.mark.timeout(1200)
def test_drawn_durations_are_the_same_in_two_boots_and_played_and_live(tmp_path: Path) -> None:
    """Played twice, to the nanosecond; live and played within 0.5 %, in every step."""
    varied = ["compute.spread.cv=0.3", "compute.stragglers.share=0.05", "compute.stragglers.factor=5"]
    runs: dict[str, list[Run]] = {}
    for name, timing in (("first", "played"), ("another", "played"), ("third", "live")):
        (tmp_path / name).mkdir()
        with Command.standing(tmp_path / name, "netem") as command:
            fields = [LIVE[1], *PACED, *varied, "pipeline.stages=2", "training.evaluate_every=0"]
            asked = command.cell(*fields, steps=4, codec="int8", profile="cable")
            asked[asked.index("--engine") : asked.index("--engine") + 2] = ["--clock", "virtual"]
            asked[asked.index("--timing") + 1] = timing
            command.finish(*asked)
            runs[name] = sorted(command.runs(), key=lambda run: known(run.lab.link_seed))
    assert known(runs["first"][0].lab.durations).startswith("drawn for each action (lognormal, cv 0.3); 5 % of")
    took = {
        name: [[step.end_ns - step.start_ns for step in run.steps(0) if step.phase == "train"] for run in of]
        for name, of in runs.items()
    }
    assert took["first"] == took["another"]
    assert len(runs["first"]) == len({tuple(steps) for steps in took["first"]}) == conduct.LINK_SEEDS
    for played, live in zip(took["first"], took["third"], strict=True):
        assert live == pytest.approx(played, rel=0.005)
    assert all(known(run.summary).efficiency == pytest.approx(1, abs=0.02) for of in runs.values() for run in of)
