"""Batches of a prepared text. Every stage derives the same order from the seed, so token ids never cross a link."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from testbed.spec import TextSpec
from testbed.workloads import windows


class Batch(NamedTuple):
    """One micro-batch of b sequences of n tokens."""

    inputs: Tensor
    """(b, n) int64: input of the first stage."""
    targets: Tensor
    """(b, n) int64: the token after each input, for the last stage's loss."""
    samples: tuple[int, ...]
    """Ids of the sequences: their positions in the text, in tokens; the same in every epoch."""


class Data:
    """Training batches, epoch after epoch; validation batches are always the same, for every seed."""

    def __init__(self, tokens: npt.NDArray[np.unsignedinteger], spec: TextSpec, seed: int) -> None:
        """`tokens` is one long text, (t,), possibly mapped from a file. SpecError when it is too short for the
        workload.
        """
        windows.check_text_for(spec, len(tokens))
        self._tokens, self._spec, self._seed = tokens, spec, seed
        self._train, self._validation = windows.cut_windows(len(tokens), spec.sequence_length)
        if spec.training_sequences is not None:
            self._train = windows.choose_training_windows(self._train, spec.training_sequences)
        self._validation = self._validation[windows.shuffled(len(self._validation), "validation")]
        self._epoch, self._order = -1, self._train
        self.device = torch.device("cpu")
        """Device of the batches."""

    @property
    def batches_per_epoch(self) -> int:
        """Training batches in an epoch. A remainder smaller than a batch is dropped, a different one in each epoch
        unless the order is fixed.
        """
        return len(self._train) // self._spec.batch_size

    @property
    def validation_batches(self) -> int:
        """Maximum number of validation batches."""
        return len(self._validation) // self._spec.batch_size

    def train(self, step: int, microbatch: int, microbatches: int) -> Batch:
        """Return part `microbatch` of the batch for an optimiser step; together the parts are the batch, in order."""
        epoch, index = divmod(step, self.batches_per_epoch)
        if self._spec.order == "fixed":
            epoch = 0
        if epoch != self._epoch:
            order = windows.shuffled(len(self._train), f"train {self._seed} {epoch}")
            self._epoch, self._order = epoch, self._train[order]
        return self._part(self._order, index, microbatch, microbatches)

    def validation(self, index: int, microbatch: int, microbatches: int) -> Batch:
        """Return part `microbatch` of validation batch `index`. IndexError past the last (`windows.check_text_for`
        reports that earlier).
        """
        if not 0 <= index < self.validation_batches:
            raise IndexError(f"validation batch {index} of {self.validation_batches}")
        return self._part(self._validation, index, microbatch, microbatches)

    def _part(self, order: windows.Starts, index: int, microbatch: int, microbatches: int) -> Batch:
        size = self._spec.batch_size // microbatches
        first = index * self._spec.batch_size + microbatch * size
        starts = order[first : first + size]
        tokens = torch.from_numpy(
            self._tokens[starts[:, None] + np.arange(self._spec.sequence_length + 1)].astype(np.int64)
        ).to(self.device)
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), tuple(starts.tolist()))
