"""In which order runs are made: laws for any cells, networks, repeats and seeds."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from testbed.profiles import load_profile
from testbed.results import Order, Run, set_aside, write_json
from testbed.spec import Cell
from testbed.sweep import conduct, playing
from tests.known import known
from tests.synthetic import Pipeline, cell, pipe, profile, write_run

_NETWORKS = tuple(profile(f"n{index}", up=pipe(10_000_000 + 8_000 * index, 0)) for index in range(4))
_CODECS = ("fp32", "bf16", "int8", "delta-int8")
_CELLS = {(network, codec): cell(codec, _NETWORKS[network]) for network in range(4) for codec in _CODECS}

CELLS = st.lists(st.sampled_from(list(_CELLS.values())), min_size=1, unique_by=lambda one: one.id)
REPEATS = st.integers(1, 4)
SEEDS = st.integers(0, 5)


def network(one: Cell) -> str:
    return one.network


def arranged(cells: list[Cell], repeats: int, seed: int, kind: Order = "interleaved") -> list[Cell]:
    return conduct.arrange_runs(cells, repeats=lambda cell: repeats, order=kind, seed=seed)


@given(CELLS, REPEATS, SEEDS, st.sampled_from(["grouped", "interleaved"]))
def test_every_cell_has_its_repeats_and_the_order_is_always_the_same(
    cells: list[Cell], repeats: int, seed: int, kind: Order
) -> None:
    runs = arranged(cells, repeats, seed, kind)
    assert Counter(one.id for one in runs) == {one.id: repeats for one in cells}
    assert runs == arranged(cells, repeats, seed, kind)


@given(CELLS, REPEATS, SEEDS)
def test_interleaved_every_prefix_is_balanced_within_one_round(cells: list[Cell], repeats: int, seed: int) -> None:
    counts = Counter({one.id: 0 for one in cells})
    for one in arranged(cells, repeats, seed):
        counts[one.id] += 1
        assert max(counts.values()) - min(counts.values()) <= 1


@given(CELLS, REPEATS, SEEDS)
def test_a_round_builds_each_lab_once(cells: list[Cell], repeats: int, seed: int) -> None:
    runs = arranged(cells, repeats, seed)
    for number in range(repeats):
        visits = [name for name, _ in groupby(map(network, runs[number * len(cells) : (number + 1) * len(cells)]))]
        assert len(visits) == len(set(visits))


@given(CELLS, REPEATS)
def test_grouped_builds_each_lab_once_and_keeps_the_files_order_within(cells: list[Cell], repeats: int) -> None:
    runs = arranged(cells, repeats, 0, "grouped")
    visits = [name for name, _ in groupby(map(network, runs))]
    assert visits == list(dict.fromkeys(map(network, cells)))
    for name in visits:
        assert [one for one in runs if network(one) == name] == [
            one for one in cells if network(one) == name for _ in range(repeats)
        ]


def test_seeds_and_rounds_differ() -> None:
    cells = list(_CELLS.values())
    assert arranged(cells, 1, 0) != arranged(cells, 1, 1)
    two = arranged(cells, 2, 0)
    assert two[: len(cells)] != two[len(cells) :]
    assert two == arranged(cells, 3, 0)[: len(two)]


@given(CELLS, REPEATS, SEEDS, st.data())
def test_what_was_made_is_left_out_first_to_last_and_the_rest_keeps_its_order(
    cells: list[Cell], repeats: int, seed: int, data: st.DataObject
) -> None:
    runs = arranged(cells, repeats, seed)
    done = {one.id: data.draw(st.integers(0, repeats + 1)) for one in cells}
    assert conduct.runs_left(runs, done) == [
        one for place, one in enumerate(runs) if runs[:place].count(one) >= done[one.id]
    ]


def with_seed(run: Run, seed: int) -> Run:
    summary = known(run.summary)
    write_json(run.folder / "lab.json", run.lab.model_copy(update={"link_seed": seed}))
    run.finish(summary)
    return run


def test_the_seed_of_a_run_that_was_set_aside_is_used_again_and_no_other_twice(tmp_path: Path) -> None:
    lossy = load_profile("link(20Mbit, 10ms, loss=1%)")
    drawn = cell("int8", lossy)
    first, *_ = (with_seed(write_run(tmp_path, drawn, Pipeline(lossy)), seed) for seed in range(3))
    with (first.folder / "steps-0.jsonl").open("a") as file:
        file.write("{}\n")
    notes: list[str] = []
    set_aside(tmp_path, [drawn.id], notes.append)
    assert "steps-0.jsonl has" in notes[0]
    seeds = playing.LinkSeeds(tmp_path, [drawn])
    assert [seeds.take(drawn), seeds.take(drawn)] == [0, 3]


def test_a_killed_sweep_goes_on_with_the_seeds_that_no_finished_run_had(tmp_path: Path) -> None:
    """Runs end in any order: that of seed 1 may be there while that of seed 0 was lost."""
    lossy = load_profile("link(20Mbit, 10ms, loss=1%)")
    drawn, still = cell("int8", lossy), cell("int8", _NETWORKS[0])
    with_seed(write_run(tmp_path, drawn, Pipeline(lossy)), 1)
    seeds = playing.LinkSeeds(tmp_path, [drawn, still])
    assert [seeds.take(one) for one in (drawn, drawn, still, drawn)] == [0, 2, 0, 3]
    write_run(tmp_path, drawn, Pipeline(lossy))  # by an older version, which noted none: the second run's was 1
    assert playing.LinkSeeds(tmp_path, [drawn]).take(drawn) == 0
