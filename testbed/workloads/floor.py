"""The floors of a workload: the losses of models that know only the frequency of each token (unigram), or also which
token follows which (bigram). No torch.

A loss near or above the first means that only word frequencies were learned, so that such a run cannot show harm by a
codec; one above the second, that a table of pairs would have done as well.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from testbed.spec import TextSpec
from testbed.workloads import windows

_AT_ONCE = 4096
"""Windows counted together, so that a long text is not in memory twice."""


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
    for first in range(0, len(starts), _AT_ONCE):
        targets = tokens[starts[first : first + _AT_ONCE, None] + np.arange(1, length + 1)]
        counts += np.bincount(targets.ravel(), minlength=vocabulary)
    return counts


def bigram_floor(tokens: npt.NDArray[np.unsignedinteger], spec: TextSpec, vocabulary: int) -> float:
    """Return the bigram floor in nats per token: the cross-entropy of the validation targets given the token before
    each (`of_pairs`), with the same two parts of the text as `unigram_floor`. SpecError as there.
    """
    inside = np.arange(spec.sequence_length + 1)
    train, tested = (tokens[starts[:, None] + inside] for starts in _parts(tokens, spec))
    return of_pairs(train, tested, vocabulary)


def of_pairs(train: npt.NDArray[np.unsignedinteger], tested: npt.NDArray[np.unsignedinteger], vocabulary: int) -> float:
    """Return the cross-entropy of each token of sequences (n, t) but the first, given the token before it.

    Smoothing is Witten and Bell's (1991): after a token with n occurrences and k different followers, a follower seen c
    times has the probability (c + k p) / (n + k), where p is its unigram probability, with one added to each count.
    """
    before, given = (part[:, :-1].ravel().astype(np.int64) for part in (train, tested))
    after, asked = (part[:, 1:].ravel().astype(np.int64) for part in (train, tested))
    unigram = (np.bincount(after, minlength=vocabulary) + 1.0) / (len(after) + vocabulary)
    known, counts = np.unique(before * vocabulary + after, return_counts=True)
    occurrences = np.bincount(before, minlength=vocabulary)[given]
    followers = np.maximum(np.bincount(known // vocabulary, minlength=vocabulary)[given], 1)  # 1: never seen
    pairs = given * vocabulary + asked
    place = np.minimum(np.searchsorted(known, pairs), len(known) - 1)
    seen = np.where(known[place] == pairs, counts[place], 0)
    return float(-np.log((seen + followers * unigram[asked]) / (occurrences + followers)).mean())
