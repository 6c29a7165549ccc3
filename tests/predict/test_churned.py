"""Trainings whose sites come and go: who takes part follows from how long the steps before took, and each is played."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_predict import planned_of

from testbed.errors import SpecError
from testbed.predict import cells
from testbed.predict.cells import Planned, PredictionCell, PredictionResult
from testbed.predict.churned import play_rounds
from testbed.predict.hybrid_shapes import HybridShape
from testbed.predict.scenarios import load_scenario
from testbed.vm import find_clock_kernel
from tests.known import known

FILE = """
question = "?"
[cell]
parallelism = "hybrid"
scenario = "community"
model = "gpt2"
precision = "bf16"
compute = 2000.0
sequence_length = 1024
sequences = 1
microbatches = 2
codec = "int8"
packets = 1
steps = 3
[grid.one]
variants = [
  { replicas = [1, 1, 2], local_steps = 2, bits = 8, churn = { seeds = 3, steps = 40, in_turn = 1 } },
  { replicas = [3], churn = { seeds = 1, steps = 50 } },
  { replicas = [1, 1], bits = 8 },
]
"""
STEPS = 40


def without_churn(text: str) -> str:
    return re.sub(r", churn = \{.*?\}", "", text)


class Played:
    """What would be played takes a tenth longer than no transport can be faster than."""

    def __init__(self) -> None:
        self.results: dict[str, PredictionResult] = {}
        self.times = 0

    def play(self, planned: Sequence[Planned]) -> None:
        for cell in (each.cell for each in planned):
            shape = cell.shape
            assert cell.id not in self.results, "nothing is played twice"
            assert isinstance(shape, HybridShape)
            alone = [shape.model_copy(update={"rounds": (each,)}) for each in shape.rounds] or [shape]
            times = [round(each.formula_s(cell.topology, cell.profiles) * 1.1e9) for each in alone]
            assert cell.steps > len(times), "the first step does not count"
            counted = [times[step % len(times)] for step in range(1, cell.steps)]
            self.results[cell.id] = PredictionResult(
                ideal_ns=None, unlinked_ns=1, step_ns=shape.steady_ns(counted), steps_ns=tuple(counted)
            )
        self.times += 1

    def find(self, cell: PredictionCell) -> PredictionResult | None:
        return self.results.get(cell.id)


def test_steps_follow_each_other_and_what_takes_place_was_played(tmp_path: Path) -> None:
    planned, played = planned_of(tmp_path, FILE), Played()
    played.play(planned)
    rows = play_rounds(planned, played.play, played.find)
    hybrid, pipeline = ([row for row in rows if row.cell == each.cell.id] for each in planned[:2])
    assert [len(hybrid), len(pipeline), len(rows)] == [3 * STEPS, 50, 3 * STEPS + 50]
    for before, after in itertools.pairwise(rows):
        if after.step:
            assert after.begin_s == pytest.approx(before.begin_s + before.lasts_s + after.waited_s)
        else:
            assert after.begin_s == after.waited_s
    assert len({(row.away, row.returning) for row in hybrid}) > 4
    lasts = {(row.away, row.returning, row.lasts_s) for row in hybrid}
    assert len(lasts) == len({each[:2] for each in lasts})
    for row in hybrid:
        assert row.in_turn_s is None if row.seed or not row.step else row.in_turn_s == pytest.approx(row.lasts_s)
    assert {(row.away, row.returning) for row in pipeline} == {("", "")}
    assert sum(row.waited_s for row in pipeline) > 0
    assert rows == play_rounds(planned, played.play, played.find), "the same seeds, the same absences"


def test_a_scenario_that_is_stated_is_as_good_as_its_name(tmp_path: Path) -> None:
    named = planned_of(tmp_path, FILE)
    scenario = load_scenario("community").model_dump(mode="json", exclude_none=True)
    stated = [each._replace(fields={**each.fields, "scenario": scenario}) for each in named]
    played = Played()
    played.play(named)
    assert play_rounds(stated, played.play, played.find) == play_rounds(named, played.play, played.find)


def test_a_file_without_churn_has_no_rounds_and_cells_are_those_without(tmp_path: Path) -> None:
    planned, without = (planned_of(tmp_path, text) for text in (FILE, without_churn(FILE)))
    assert [each.cell for each in without] == [each.cell for each in planned]
    assert play_rounds(without, Played().play, Played().find) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('scenario = "community"', 'scenario = "organisational"', "churn requires .* always stay"),
        ("steps = 3\n", "steps = 3\nplay = false\n", "churn requires .* play is false"),
        ("bits = 8, churn", "bits = 8, staleness = 1, steps = 8, churn", "churn requires staleness 0.* it is 1"),
        ("bits = 8, churn", "bits = 8, rounds = [{ away = [0] }], churn", "rounds and churn exclude each other"),
        *(
            ("seeds = 1, steps = 50", stated, r"churn\.(seeds|steps)")
            for stated in ("seeds = 0, steps = 9", "seeds = 1, steps = 2", "seeds = 1", "steps = 4")
        ),
    ],
)
def test_churn_of_what_does_not_come_and_go_or_in_part_is_refused_before_anything_is_played(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    text = FILE.replace(old, new)
    with pytest.raises(SpecError, match=said):
        planned_of(tmp_path, text)
    assert len(planned_of(tmp_path, without_churn(text))) == 3, "without churn it is a cell"


def test_an_inbound_wire_has_neither_churn_nor_a_scenario_of_unequal_uplinks(tmp_path: Path) -> None:
    text = FILE.replace("steps = 3\n", 'steps = 3\nduplex = "inbound"\n')
    with pytest.raises(SpecError, match=r"churn requires .* duplex is inbound"):
        planned_of(tmp_path, text)
    with pytest.raises(SpecError, match="inbound, which needs uplinks of one rate"):
        planned_of(tmp_path, without_churn(text))


def test_only_a_job_at_the_sites_of_a_scenario_has_churn(tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        planned_of(
            tmp_path,
            FILE.replace('"hybrid"', '"data"').replace('scenario = "community"', 'device = "t4"\nlinks = "cable"'),
        )


@pytest.mark.slow
@pytest.mark.clock_kernel
def test_steps_take_alone_what_they_take_one_after_the_other(tmp_path: Path) -> None:
    """So that a training takes what its steps take. Large weights on a connection that was idle take longer."""
    kernel = known(find_clock_kernel())

    def play(missing: Sequence[Planned]) -> None:
        cells.play_missing(missing, tmp_path / "results", kernel, say=lambda text: None)

    planned = planned_of(tmp_path, FILE)[:1]
    play(planned)
    rows = play_rounds(planned, play, lambda cell: cells.result_of(cell, tmp_path / "results"))
    pairs = [(row.lasts_s, row.in_turn_s) for row in rows if row.in_turn_s is not None]
    assert len(pairs) == STEPS - 1
    assert len({row.away for row in rows if row.seed == 0}) > 1
    alone_s, in_turn_s = (sum(each) for each in zip(*pairs, strict=True))
    assert in_turn_s == pytest.approx(alone_s, rel=0.05)
