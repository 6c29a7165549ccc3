"""The unigram floor, against the very batches that a run learns from and is evaluated on."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.spec import TextSpec
from testbed.workloads import prepare
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
    for floor in (unigram_floor, bigram_floor):
        with pytest.raises(SpecError, match="but needs"):
            floor(text(50, 0, 500), text_spec(validation_batches=3), 50)


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


def test_a_text_whose_tokens_follow_from_each_other_has_a_bigram_floor_of_almost_nothing() -> None:
    even = np.resize(np.arange(50, dtype=np.uint16), 90_000)
    assert bigram_floor(even, text_spec(validation_batches=3), 50) < 2e-3
    assert unigram_floor(even, text_spec(validation_batches=3), 50) > 3.9


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
