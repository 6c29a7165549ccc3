"""The floors of a workload: the losses of models that know only the frequency of each token (unigram), or also which
token follows which (bigram). No torch.

A loss near or above the first means that only word frequencies were learned, so that such a run cannot show harm by a
codec; one above the second, that a table of pairs would have done as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from testbed.records import Floors
from testbed.spec import TextSpec, Workload
from testbed.workloads import windows

_AT_ONCE = 4096
"""Windows counted together, so that a long text is not in memory twice."""


@functools.cache
def floors_of(path: Path, spec: Workload, vocabulary: int) -> Floors:
    """Return the floors of a prepared text, which a process computes once; for images there are none. SpecError for a
    text that is too short.
    """
    if not isinstance(spec, TextSpec):
        return Floors()
    tokens = np.load(path, mmap_mode="r")
    return Floors(unigram_floor(tokens, spec, vocabulary), bigram_floor(tokens, spec, vocabulary))


def unigram_floor(tokens: npt.NDArray[np.unsignedinteger], spec: TextSpec, vocabulary: int) -> float:
    """Return the floor in nats per token: the cross-entropy of the validation targets under the frequencies of tokens
    in the text's training part.

    The validation targets are those of the batches that a run of this workload evaluates. The frequencies are those of
    all training windows, even if a run uses only a few of them (`training_sequences`): it is the floor of the text, not
    of the sample. One is added to the count of each token (Laplace), so that a token that occurs only in validation has
    a non-zero probability. SpecError for a text that is too short.
    """
    train, tested = _parts(tokens, spec)
    counts = _counts(tokens, train, spec.sequence_length, vocabulary) + 1.0
    seen = _counts(tokens, tested, spec.sequence_length, vocabulary)
    return float(-(seen @ np.log(counts / counts.sum())) / seen.sum())


def _parts(tokens: npt.NDArray[np.unsignedinteger], spec: TextSpec) -> windows.Windows:
    windows.check_text_for(spec, len(tokens))
    cut = windows.cut_windows(len(tokens), spec.sequence_length)
    order = windows.shuffled(len(cut.validation), "validation")[: spec.batch_size * spec.validation_batches]
    return windows.Windows(cut.train, cut.validation[order])


def _counts(
    tokens: npt.NDArray[np.unsignedinteger], starts: windows.Starts, length: int, vocabulary: int
) -> npt.NDArray[np.int64]:
    """Count the targets of windows by token; (vocabulary,)."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for part in _sequences(tokens, starts, length):
        counts += np.bincount(part[:, 1:].ravel(), minlength=vocabulary)
    return counts


def _sequences(
    tokens: npt.NDArray[np.unsignedinteger], starts: windows.Starts, length: int
) -> Iterator[npt.NDArray[np.unsignedinteger]]:
    """Yield windows with their targets, some at a time; (n, length + 1)."""
    for first in range(0, len(starts), _AT_ONCE):
        yield tokens[starts[first : first + _AT_ONCE, None] + np.arange(length + 1)]


def bigram_floor(tokens: npt.NDArray[np.unsignedinteger], spec: TextSpec, vocabulary: int) -> float:
    """Return the bigram floor in nats per token: the cross-entropy of the validation targets given the token before
    each (`of_pairs`), with the same two parts of the text as `unigram_floor`. SpecError as there.
    """
    train, tested = _parts(tokens, spec)
    asked = np.concatenate(list(_sequences(tokens, tested, spec.sequence_length)))
    return of_pairs(_sequences(tokens, train, spec.sequence_length), asked, vocabulary)


def of_pairs(
    train: Iterable[npt.NDArray[np.unsignedinteger]], tested: npt.NDArray[np.unsignedinteger], vocabulary: int
) -> float:
    """Return the cross-entropy of each token of sequences (n, t) but the first, given the token before it. `train`
    comes in parts, of which only the different pairs stay in memory.

    Smoothing is Witten and Bell's (1991): after a token with n occurrences and k different followers, a follower seen c
    times has the probability (c + k p) / (n + k), where p is its unigram probability, with one added to each count.
    """
    known = counts = np.zeros(0, dtype=np.int64)
    for part in train:
        new, often = np.unique(_pairs(part, vocabulary), return_counts=True)
        known, place = np.unique(np.concatenate([known, new]), return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, often])).astype(np.int64)
    before, after = np.divmod(known, vocabulary)
    unigram = np.bincount(after, counts, vocabulary) + 1.0
    unigram /= unigram.sum()
    pairs = _pairs(tested, vocabulary)
    given, asked = np.divmod(pairs, vocabulary)
    occurrences = np.bincount(before, counts, vocabulary)[given]
    followers = np.maximum(np.bincount(before, minlength=vocabulary)[given], 1)  # 1: never seen
    place = np.minimum(np.searchsorted(known, pairs), len(known) - 1)
    seen = np.where(known[place] == pairs, counts[place], 0)
    return float(-np.log((seen + followers * unigram[asked]) / (occurrences + followers)).mean())


def _pairs(sequences: npt.NDArray[np.unsignedinteger], vocabulary: int) -> npt.NDArray[np.int64]:
    """Return a number for each two neighbouring tokens."""
    return (sequences[:, :-1].astype(np.int64) * vocabulary + sequences[:, 1:]).ravel()
