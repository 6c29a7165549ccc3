"""Random cells are the same for every run of a seed, what is wrong with one is told, and it is shrunk to that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed import results
from testbed.errors import SpecError
from testbed.spec import Cell
from testbed.sweep import chaos
from tests.commands import Command

PLAIN = dict.fromkeys(chaos.AXES, 0)


@pytest.mark.slow
def test_a_seed_draws_the_same_cells_and_the_first_that_can_are_also_live() -> None:
    once, again = (list(chaos.draw(3, 40, 4)) for _ in range(2))
    assert once == again != list(chaos.draw(4, 40, 4))
    assert [each.cell.timing for each in once].count("live") == 4
    assert once[0].cell == chaos.cell_of(once[0].drawn)
    assert {chaos.AXES["kind"][each.drawn["kind"]] for each in chaos.draw(0, 200, 0)} == set(chaos.KINDS)


@pytest.mark.parametrize("kind", chaos.KINDS)
def test_every_kind_has_a_plain_cell(kind: str) -> None:
    assert chaos.cell_of(PLAIN | {"kind": [*chaos.KINDS].index(kind)}).timing == "played"


@pytest.mark.parametrize("kind", ["decode", "context", "server"])
def test_who_sends_to_others_than_neighbours_has_no_line(kind: str) -> None:
    """Plans of decode and context over a line failed when they were played, after their training."""
    drawn = PLAIN | {"kind": [*chaos.KINDS].index(kind), "topology": 1}
    with pytest.raises(SpecError, match="neighbours only"):
        chaos.cell_of(drawn)


def test_a_failure_is_shrunk_to_what_makes_it_fail() -> None:
    drawn = {axis: len(values) - 1 for axis, values in chaos.AXES.items()} | {"kind": 2, "topology": 0}
    cell, boots = chaos.cell_of(drawn), []

    def cause_of(tried: chaos.ChaosCell) -> str | None:
        boots.append(tried)
        guilty = tried.cell.codec == cell.codec and tried.drawn["microbatches"] == drawn["microbatches"]
        return f"it failed: number {len(boots)}" if guilty else "it failed otherwise" if len(boots) % 2 else None

    plainest = chaos.shrink(chaos.ChaosCell(0, drawn, cell), cause_of)
    assert plainest.drawn == PLAIN | {axis: drawn[axis] for axis in ("codec", "microbatches")}
    assert plainest.cell.codec == cell.codec
    assert len(boots) <= 1 + len(chaos.AXES)


def _judged(monkeypatch: pytest.MonkeyPatch, timing: str, played_loss: float = 4.0, **summary: Any) -> str | None:
    sound = {"status": "ok", "error": None, "certificate": "PASS", "efficiency": 0.9, "step_s": 1.0, "steps": 1}
    sound |= {"ideal_step_s": 0.9, "wire_bytes_per_step": 11.0, "payload_bytes_per_step": 10.0}
    cell = chaos.cell_of(PLAIN, timing)

    def run(of: Cell, loss: float) -> Any:
        step = SimpleNamespace(step=0, number=0, phase="train", start_ns=0, end_ns=1, loss=loss, records=())
        return SimpleNamespace(cell=of, summary=SimpleNamespace(**sound | summary), all_steps=lambda: [[step]])

    monkeypatch.setattr(results, "runs", lambda folder, cell_id: [run(cell, 4.0)])
    monkeypatch.setattr(results, "finished", lambda folder, cell_id: run(chaos.cell_of(PLAIN), played_loss))
    monkeypatch.setattr(chaos, "same_losses", lambda some, others, steps: some[0][0].loss == others[0][0].loss)
    return chaos.judge(Path(), chaos.ChaosCell(0, PLAIN, cell)).cause


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({}, None),
        ({"status": "failed", "error": "stage 1 ended"}, "it failed: stage 1 ended"),
        ({"certificate": "FAIL"}, "not certified"),
        ({"efficiency": 1.01}, "shorter than its ideal"),
        ({"wire_bytes_per_step": 9.0}, "on the wire"),
        ({"timing": "live"}, None),
        ({"timing": "live", "played_loss": 4.0000001}, "changed the maths"),
    ],
)
def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], cause: str | None) -> None:
    found = _judged(monkeypatch, **{"timing": "played", **changed})
    assert found is None if cause is None else cause in str(found)


@pytest.mark.slow
@pytest.mark.clock_kernel
def test_random_cells_are_right_and_the_same_to_the_nanosecond(command: Command, tmp_path: Path) -> None:
    command.finish("chaos", "--seed", "1", "--cells", "18", "--live", "2")
    record = (tmp_path / "results" / "chaos-1" / "record.json").read_bytes()
    command.finish("chaos", "--seed", "1", "--cells", "4", "--live", "1", "--results", "again")
    again = results.read_json(tmp_path / "again" / "chaos-1" / "record.json", chaos.ChaosRecord)
    rows = {(row.number, row.timing): row for row in chaos.ChaosRecord.model_validate_json(record).rows}
    assert all(rows[row.number, row.timing] == row for row in again.rows)
