"""What the battery recorded is still so: all traces here, and a sample of what takes longer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.battery import entries, old, sweeps, traces

RECIPES = [
    "pipeline: 3 stages",
    "pipeline: placement",
    "data parallel: star of 4, shares",
    "data parallel: all-reduce of 4",
    "data parallel: streaming, mixing",
    "DeCo: star",
]


@pytest.fixture
def _as_torch_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(before[0])
    torch.use_deterministic_algorithms(before[1])


@pytest.mark.slow
def test_every_trace_is_what_it_was() -> None:
    made = {name: make() for name, make in traces.traces().items()}
    assert len(made) > 1500
    assert made == entries.recorded("A")


@pytest.mark.slow
@pytest.mark.usefixtures("_as_torch_was")
@pytest.mark.skipif(not entries.recorded_here(), reason="the battery was recorded on another processor, or torch")
def test_recipes_train_to_the_last_bit() -> None:
    from tests.battery import recipes

    made, known = recipes.recipes(), entries.recorded("B")
    for name in RECIPES:
        assert list(entries.differences(known[name], made[name]())) == [], name


@pytest.mark.slow
@pytest.mark.clock_kernel
@pytest.mark.skipif(not entries.recorded_here(), reason="the battery was recorded on another processor, or torch")
def test_played_cells_take_as_long_as_they_did(tmp_path: Path) -> None:
    made, known = sweeps.played(tmp_path), entries.recorded("C")
    for name in (name for name in made if name.startswith("budget")):
        assert list(entries.differences(known[name], made[name]())) == []


def test_results_of_before_are_read(tmp_path: Path) -> None:
    made, known = old.old_results(tmp_path), entries.recorded("D")
    names = [name for name in made if name.startswith("old results")]
    assert len(names) == len(old.FOLDERS)
    assert {name: made[name]() for name in names} == {name: known[name] for name in names}
