"""The unigram floor, against the very batches that a run learns from and is evaluated on."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.spec import ImagesSpec, TextSpec
from testbed.workloads import floor, prepare
from testbed.workloads.data import Data
from testbed.workloads.floor import bigram_floor, unigram_floor
from tests.specs import text_spec

FLOORS = Path(__file__).resolve().parents[2] / "experiments" / "floors.csv"
_FLOORS = f"""
import csv, sys
sys.path.insert(0, {str(FLOORS.parent)!r})
import floors
csv.writer(sys.stdout, lineterminator="\\n").writerows(floors.rows())
"""


def text(vocabulary: int, seed: int, count: int = 90_000) -> npt.NDArray[np.uint16]:
    """Draw tokens of which some are frequent and some rare."""
    rng = np.random.default_rng(seed)
    return rng.choice(vocabulary, size=count, p=rng.dirichlet(np.full(vocabulary, 0.3))).astype(np.uint16)


def targets(data: Data, spec: TextSpec) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The targets of an epoch of training, and those of all evaluated batches."""
    train = [data.train(step, 0, 1).targets.numpy() for step in range(data.batches_per_epoch)]
    tested = [data.validation(index, 0, 1).targets.numpy() for index in range(spec.validation_batches)]
    return np.concatenate(train).ravel(), np.concatenate(tested).ravel()


@settings(max_examples=12, deadline=None)
@given(st.integers(2, 300), st.integers(0, 99), st.sampled_from([16, 64, 100]), st.integers(1, 4))
def test_it_is_the_loss_of_word_frequencies_on_the_batches_of_a_run(
    vocabulary: int, seed: int, length: int, batches: int
) -> None:
    spec, tokens = text_spec(sequence_length=length, validation_batches=batches, batch_size=1), text(vocabulary, seed)
    train, tested = targets(Data(tokens, spec, seed), spec)
    counts = np.bincount(train, minlength=vocabulary) + 1
    by_token = -np.log(counts / counts.sum())
    found = unigram_floor(tokens, spec, vocabulary)
    assert found == pytest.approx(by_token[tested].mean(), rel=1e-12)
    shares = np.bincount(tested, minlength=vocabulary) / len(tested)
    entropy = -sum(share * math.log(share) for share in shares if share)
    assert found >= entropy - 1e-12  # of all frequencies, a text's own give it the smallest loss (Gibbs)


def test_a_text_without_frequencies_has_the_loss_of_a_guess_and_one_of_a_single_token_none() -> None:
    even = np.resize(np.arange(50, dtype=np.uint16), 90_000)
    assert unigram_floor(even, text_spec(validation_batches=3), 50) == pytest.approx(math.log(50), rel=1e-3)
    assert unigram_floor(np.zeros(90_000, dtype=np.uint16), text_spec(validation_batches=3), 50) < 1e-3


def test_it_is_the_texts_own_whatever_part_a_run_sees() -> None:
    tokens = text(200, 1)
    assert unigram_floor(tokens, text_spec(validation_batches=3, training_sequences=8), 200) == unigram_floor(
        tokens, text_spec(validation_batches=3), 200
    )


def test_a_text_that_is_too_short_is_refused() -> None:
    for of in (unigram_floor, bigram_floor):
        with pytest.raises(SpecError, match="but needs"):
            of(text(50, 0, 500), text_spec(validation_batches=3), 50)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.integers(2, 40), st.integers(0, 99), st.sampled_from([16, 64]))
def test_the_bigram_floor_is_the_loss_of_a_table_of_pairs(vocabulary: int, seed: int, length: int) -> None:
    spec, tokens = text_spec(sequence_length=length, validation_batches=1, batch_size=1), text(vocabulary, seed)
    data = Data(tokens, spec, seed)
    batches = [data.train(step, 0, 1) for step in range(data.batches_per_epoch)]
    pairs = Counter((int(a), int(b)) for each in batches for a, b in zip(each.inputs[0], each.targets[0], strict=True))
    unigram = np.bincount([b for (_, b), count in pairs.items() for _ in range(count)], minlength=vocabulary) + 1.0
    unigram /= unigram.sum()
    before, followers = Counter[int](), Counter[int]()
    for (a, _), count in pairs.items():
        before[a] += count
        followers[a] += 1
    tested, total = data.validation(0, 0, 1), []
    for a, b in zip(tested.inputs[0].tolist(), tested.targets[0].tolist(), strict=True):
        kinds = max(1, followers[a])
        total.append(-math.log((pairs[a, b] + kinds * unigram[b]) / (before[a] + kinds)))
    assert bigram_floor(tokens, spec, vocabulary) == pytest.approx(np.mean(total), rel=1e-12)


def chain(seed: int, count: int) -> npt.NDArray[np.uint16]:
    """Draw tokens each of which depends on the one before."""
    rng = np.random.default_rng(seed)
    following = np.cumsum(rng.dirichlet(np.full(20, 0.3), size=20), axis=1)
    tokens = [0]
    for draw in rng.random(count - 1):
        tokens.append(min(19, int(np.searchsorted(following[tokens[-1]], draw))))
    return np.array(tokens, np.uint16)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_with_enough_of_a_stationary_text_pairs_tell_no_less_than_frequencies(seed: int) -> None:
    floors = [of(chain(seed, 90_000), text_spec(validation_batches=3), 20) for of in (bigram_floor, unigram_floor)]
    assert floors[0] < floors[1]
    independent = text(20, seed)
    pairs, single = (of(independent, text_spec(validation_batches=3), 20) for of in (bigram_floor, unigram_floor))
    assert pairs == pytest.approx(single, abs=0.02)  # nothing to know of the token before


@pytest.mark.parametrize("at_once", [1, 7, 100_000])
def test_how_many_windows_are_counted_together_changes_no_floor(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, spec = text(300, 4, 20_000), text_spec(sequence_length=16, batch_size=2, validation_batches=3)
    before = [of(tokens, spec, 300) for of in (unigram_floor, bigram_floor)]
    monkeypatch.setattr(floor, "_AT_ONCE", at_once)
    assert [of(tokens, spec, 300) for of in (unigram_floor, bigram_floor)] == before


def test_the_floors_of_a_file_are_computed_once_and_images_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(path := tmp_path / "tokens.npy", tokens := text(50, 5))
    spec = text_spec(validation_batches=3)
    known = floor.floors_of(path, spec, 50)
    assert known == (unigram_floor(tokens, spec, 50), bigram_floor(tokens, spec, 50))
    monkeypatch.setattr(floor, "bigram_floor", None)
    assert floor.floors_of(path, spec, 50) == known
    assert floor.floors_of(tmp_path, ImagesSpec(images="digits", model="mlp", batch_size=8), 10) == (None, None)


def test_a_long_text_needs_little_more_memory_than_its_different_pairs() -> None:
    tokens, spec = text(64, 6, 3_000_000), text_spec(validation_batches=3)
    tracemalloc.start()
    try:
        bigram_floor(tokens, spec, 64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 * 8 * floor._AT_ONCE * spec.sequence_length  # numbers of one part, a few times


def test_a_text_whose_tokens_follow_from_each_other_has_a_bigram_floor_of_almost_nothing() -> None:
    even = np.resize(np.arange(50, dtype=np.uint16), 90_000)
    assert bigram_floor(even, text_spec(validation_batches=3), 50) < 2e-3
    assert unigram_floor(even, text_spec(validation_batches=3), 50) > 3.9


@pytest.mark.slow
def test_the_committed_floors_are_those_of_the_texts_and_of_the_runs() -> None:
    made = subprocess.run([sys.executable, "-c", _FLOORS], capture_output=True, text=True, check=True).stdout
    assert made.splitlines() == FLOORS.read_text(encoding="utf8").splitlines()[1:]
    known = {row["experiment"]: float(row["unigram_floor"]) for row in csv.DictReader(FLOORS.open(encoding="utf8"))}
    for name in ("aqsgd_finetuning", "protocol_nanogpt", "subspace_ratio", "topk_knee"):
        for row in csv.DictReader((FLOORS.parent / name / "seeds.csv").open(encoding="utf8")):
            assert float(row["unigram_floor"]) == pytest.approx(known[name], abs=1e-4)


def test_the_bundled_text_has_the_floor_that_the_documents_state(tmp_path: object) -> None:
    from testbed import paths

    prepared = prepare.prepare_tokens("bundled", "gpt2-micro", paths.cache_folder())
    found = unigram_floor(np.load(prepared.path, mmap_mode="r"), text_spec(validation_batches=64), prepared.vocabulary)
    assert found == pytest.approx(6.62, abs=0.05)
