"""What workers learn: a language model on their parts of a text's batches."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from testbed.spec import Recipe
from testbed.workloads.build import build_stage
from testbed.workloads.data import Data
from testbed.workloads.stage_model import StageModel


class TextLearner:
    """A `worker.Learner` of a language model.

    A batch is cut into as many equal parts as all workers together read; each has parts next to one another.
    """

    def __init__(self, recipe: Recipe, number: int, model: StageModel, data: Data) -> None:
        assert recipe.data is not None
        each = recipe.pipeline.microbatches * recipe.pipeline.accumulation
        counts = [part * each for part in recipe.data.parts]
        self._first, self._all = sum(counts[:number]), sum(counts)
        self.parts = counts[number]
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._model, self._data, self._batches = model, data, recipe.workload.validation_batches

    def loss(self, batch: int, part: int) -> Tensor:
        """Return the mean cross-entropy in nats over a part's tokens."""
        self._model.train(True)
        self._model.draw(batch, self._first + part)
        chosen = self._data.train(batch, self._first + part, self._all)
        return self._model.loss(self._model(chosen.inputs), chosen.targets)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the mean over all validation batches."""
        self._model.train(False)
        losses = []
        for batch in range(self._batches):
            for part in range(self._all):
                chosen = self._data.validation(batch, part, self._all)
                losses.append(self._model.loss(self._model(chosen.inputs), chosen.targets).item())
        return math.fsum(losses) / len(losses)


def text_learner(recipe: Recipe, number: int, *, vocabulary: int, tokens: str) -> TextLearner:
    """Build one worker's model and open its text; `vocabulary` and `tokens` as for `pipeline.alone.AloneJob`."""
    seed = recipe.training.seed
    model = build_stage(recipe.workload, stage=0, stages=1, seed=seed, vocabulary=vocabulary)
    return TextLearner(recipe, number, model, Data(np.load(tokens, mmap_mode="r"), recipe.workload, seed))
