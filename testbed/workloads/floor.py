"""The unigram floor of a workload: the loss of a model that knows only the frequency of each token. No torch.

A loss near or above it means that only word frequencies were learned, so that such a run cannot show harm by a codec.
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
    windows.check_text_for(spec, len(tokens))
    cut = windows.cut_windows(len(tokens), spec.sequence_length)
    order = windows.shuffled(len(cut.validation), "validation")[: spec.batch_size * spec.validation_batches]
    counts = _counts(tokens, cut.train, spec.sequence_length, vocabulary) + 1.0
    seen = _counts(tokens, cut.validation[order], spec.sequence_length, vocabulary)
    return float(-(seen @ np.log(counts / counts.sum())) / seen.sum())


def _counts(
    tokens: npt.NDArray[np.unsignedinteger], starts: windows.Starts, length: int, vocabulary: int
) -> npt.NDArray[np.int64]:
    """Count the targets of windows by token; (vocabulary,)."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for first in range(0, len(starts), _AT_ONCE):
        targets = tokens[starts[first : first + _AT_ONCE, None] + np.arange(1, length + 1)]
        counts += np.bincount(targets.ravel(), minlength=vocabulary)
    return counts
