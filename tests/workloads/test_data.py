"""Windows and batches: nothing leaks, nothing is lost, every stage and every cut into micro-batches sees the same."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.workloads import models, windows
from testbed.workloads.data import Data
from tests.specs import text_spec

TOKENS = np.arange(60_000, dtype=np.uint16)  # a token's value is its place


def served(length: int, batch_size: int, seed: int = 0, *, tokens: int = len(TOKENS), **changes: Any) -> Data:
    return Data(TOKENS[:tokens], text_spec(sequence_length=length, batch_size=batch_size, **changes), seed)


def epoch(data: Data, number: int) -> list[int]:
    """The ids that it reads, in order."""
    steps = range(number * data.batches_per_epoch, (number + 1) * data.batches_per_epoch)
    return [sample for step in steps for sample in data.train(step, 0, 1).samples]


@given(tokens=st.integers(0, 300_000), length=st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_windows_fill_stretches_and_never_leave_them(tokens: int, length: int) -> None:
    train, validation = windows.cut_windows(tokens, length)
    held_out = {int(s) // windows.STRETCH_TOKENS for s in validation}
    assert all(stretch % windows.VALIDATION_EVERY == 0 for stretch in held_out)
    assert held_out.isdisjoint(int(s) // windows.STRETCH_TOKENS for s in train)
    every = np.sort(np.concatenate([train, validation]))
    assert np.all(every // windows.STRETCH_TOKENS == (every + length) // windows.STRETCH_TOKENS)  # the last target too
    assert np.all(every + length < tokens)
    within = every[1:] // windows.STRETCH_TOKENS == every[:-1] // windows.STRETCH_TOKENS
    assert np.all(np.diff(every)[within] == length)
    whole = tokens // windows.STRETCH_TOKENS
    assert len(every) >= whole * ((windows.STRETCH_TOKENS - 1) // length)


def test_the_validation_split_depends_on_neither_length_nor_text_behind_it() -> None:
    for length in (16, 100, 500):
        _, validation = windows.cut_windows(200_000, length)
        assert {int(s) // windows.STRETCH_TOKENS for s in validation} == {0, 20, 40}
        _, longer = windows.cut_windows(240_000, length)
        assert np.array_equal(longer[: len(validation)], validation)


def test_targets_are_the_inputs_one_later() -> None:
    batch = served(32, 8, 0).train(0, 0, 1)
    assert batch.inputs.shape == batch.targets.shape == (8, 32)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert batch.inputs[:, 0].tolist() == list(batch.samples)


def test_an_epoch_reads_every_sequence_at_most_once_and_the_next_in_another_order() -> None:
    data = served(64, 8, 0)
    epochs = [epoch(data, number) for number in range(3)]
    train, _ = windows.cut_windows(len(TOKENS), 64)
    for read in epochs:
        assert len(set(read)) == len(read) > len(train) - 8
        assert set(read) <= set(train.tolist())
    assert all(a != b for a, b in itertools.combinations(epochs, 2))


@given(
    batch_size=st.integers(1, 9),
    batches=st.integers(1, 12),
    seed=st.integers(0, 3),
    order=st.sampled_from(["shuffled", "fixed"]),
)
@settings(max_examples=30, deadline=None)
def test_epochs_over_some_sequences_are_permutations_of_them(
    batch_size: int, batches: int, seed: int, order: str
) -> None:
    data = served(64, batch_size, seed, training_sequences=batch_size * batches, order=order)
    assert data.batches_per_epoch == batches
    first, second, third = (epoch(data, number) for number in range(3))
    assert sorted(first) == sorted(second) == sorted(third)
    assert len(set(first)) == len(first) == batch_size * batches
    if len(first) > 6:  # fewer may come in the same order by chance
        assert (first == second == third) == (order == "fixed")
    held_out = {s for i in range(data.validation_batches) for s in data.validation(i, 0, 1).samples}
    assert held_out.isdisjoint(first)
    # an id is the same text in every epoch
    texts = {}
    for step in range(3 * batches):
        batch = data.train(step, 0, 1)
        for sample, tokens in zip(batch.samples, batch.inputs, strict=True):
            assert torch.equal(texts.setdefault(sample, tokens), tokens)


def test_the_chosen_sequences_are_everyones_and_from_all_over_the_text() -> None:
    few, more = (served(64, 4, seed, training_sequences=count) for seed, count in ((0, 40), (1, 80)))
    assert set(epoch(few, 0)) < set(epoch(more, 0))
    assert len({sample * 4 // len(TOKENS) for sample in epoch(few, 0)}) == 4
    validated = [[d.validation(i, 0, 1).samples for i in range(3)] for d in (few, more, served(64, 4))]
    assert validated[0] == validated[1] == validated[2]


def test_every_stage_derives_the_same_in_whatever_order_it_asks() -> None:
    one, two = served(64, 8, 3), served(64, 8, 3)
    steps = [0, 1, 150, 40, 300, 2]
    asked = {step: one.train(step, 1, 2) for step in steps}
    for step in reversed(steps):
        again = two.train(step, 1, 2)
        assert again.samples == asked[step].samples
        assert torch.equal(again.inputs, asked[step].inputs)


@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_microbatches_together_are_the_batch(microbatches: int) -> None:
    data = served(16, 8, 1)
    for read in (data.train, data.validation):
        whole = read(2, 0, 1)
        parts = [read(2, m, microbatches) for m in range(microbatches)]
        assert torch.equal(torch.cat([p.inputs for p in parts]), whole.inputs)
        assert torch.equal(torch.cat([p.targets for p in parts]), whole.targets)
        assert sum((p.samples for p in parts), ()) == whole.samples


def test_seeds_change_training_and_not_validation() -> None:
    one, two = served(32, 4, 0), served(32, 4, 1)
    assert one.train(0, 0, 1).samples != two.train(0, 0, 1).samples
    assert one.validation(3, 0, 1).samples == two.validation(3, 0, 1).samples


def test_validation_is_held_out_and_ends() -> None:
    data = served(32, 4, 0)
    trained = {s for step in range(data.batches_per_epoch) for s in data.train(step, 0, 1).samples}
    validated = [s for i in range(data.validation_batches) for s in data.validation(i, 0, 1).samples]
    assert len(set(validated)) == len(validated)
    assert trained.isdisjoint(validated)
    with pytest.raises(IndexError):
        data.validation(data.validation_batches, 0, 1)


def test_a_text_too_short() -> None:
    with pytest.raises(SpecError, match="0 training sequences"):
        served(32, 4, tokens=4096)
    with pytest.raises(SpecError, match="127 validation sequences of 32, but needs 160"):
        windows.check_text_for(text_spec(sequence_length=32, validation_batches=40), 4097 + 4096)
    with pytest.raises(SpecError, match=r"training sequences of 32, but needs 99999"):
        served(32, 4, training_sequences=99_999)
    with pytest.raises(SpecError, match=r"less than workload.batch_size, 4"):
        models.check_workload(served(32, 4)._spec.model_copy(update={"training_sequences": 3}), 1)
    with pytest.raises(SpecError, match="at most 4095"):
        windows.cut_windows(10_000, 4096)


@given(layers=st.integers(1, 100), data=st.data())
@settings(max_examples=50, deadline=None)
def test_split_covers_the_layers_evenly(layers: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, layers))
    parts = models.split_layers(layers, stages)
    assert [layer for part in parts for layer in part] == list(range(layers))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_table_and_windows_need_no_torch() -> None:
    code = "import sys; from testbed.workloads import models, windows; "
    code += "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
