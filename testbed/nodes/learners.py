"""Learning tasks of workers: a language model on parts of a text's batches, or a small network on shards of images."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from testbed.codecs.wire.header import CPU
from testbed.nodes.worker import Evaluated, Learner
from testbed.spec import Recipe, TextSpec
from testbed.workloads.build_stage import build_stage
from testbed.workloads.data import Data
from testbed.workloads.images import ImageSet, batch_loss, build_network, images, score
from testbed.workloads.shards import ShardBatches, divide
from testbed.workloads.stage_model import StageModel


class TextLearner:
    """A `worker.Learner` of a language model.

    A batch is split into as many equal parts as all workers read together; each worker reads adjacent parts.
    """

    def __init__(self, parts: int, first: int, every: int, model: StageModel, data: Data, batches: int) -> None:
        """Read `parts` of the `every` parts of a batch, from part `first` on; `batches` per evaluation."""
        self.parts, self._first, self._all = parts, first, every
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.tables = model.by_token()
        self._model, self._data, self._batches = model, data, batches

    def loss(self, batch: int, part: int) -> Tensor:
        """Return the mean cross-entropy in nats over a part's tokens."""
        self._model.train(True)
        self._model.draw(batch, self._first + part)
        chosen = self._data.train(batch, self._first + part, self._all)
        return self._model.loss(self._model(chosen.inputs), chosen.targets)

    @torch.no_grad()
    def evaluate(self) -> Evaluated:
        """Return the mean over all validation batches."""
        self._model.train(False)
        losses = []
        for batch in range(self._batches):
            for part in range(self._all):
                chosen = self._data.validation(batch, part, self._all)
                losses.append(self._model.loss(self._model(chosen.inputs), chosen.targets).item())
        return Evaluated(math.fsum(losses) / len(losses))


class ImagesLearner:
    """A `worker.Learner` of a network on one worker's shard of the training images."""

    def __init__(self, model: nn.Module, batches: ShardBatches, images: ImageSet, parts: int = 1) -> None:
        """`parts`: number of equal parts into which each of the worker's batches is split."""
        self.model, self.parts = model, parts
        self.parameters = list(model.parameters())
        self.tables = self.parameters[-2:]  # the output layer
        self.batches, self._images = batches, images

    def loss(self, batch: int, part: int) -> Tensor:
        """Return the mean cross-entropy in nats over a part of the worker's batch number `batch`."""
        chosen = np.split(self.batches.batch(batch), self.parts)[part]
        return batch_loss(self.model, self._images.train.at(chosen).to(self.parameters[0].device))

    def evaluate(self) -> Evaluated:
        """Evaluate on all test images."""
        return Evaluated(*score(self.model, self._images.test.to(self.parameters[0].device)))


def learner_of(recipe: Recipe, number: int, *, vocabulary: int, tokens: str, device: torch.device = CPU) -> Learner:
    """Build one worker's model, on a device, and open its data; for the other arguments see `training.alone.AloneJob`.

    All workers start with the same weights. SpecError for more workers than images.
    """
    spec, seed = recipe.workload, recipe.training.seed
    assert recipe.data is not None
    each = recipe.pipeline.microbatches * recipe.pipeline.accumulation
    counts = [part * each for part in recipe.data.parts]
    if isinstance(spec, TextSpec):
        model = build_stage(spec, stage=0, stages=1, seed=seed, vocabulary=vocabulary).to(device)
        data = Data(np.load(tokens, mmap_mode="r"), spec, seed)
        data.device = device
        first = sum(counts[:number])
        return TextLearner(counts[number], first, sum(counts), model, data, spec.validation_batches)
    every = images(spec.images, Path(tokens))
    shard = divide(every.train.labels.numpy(), recipe.data.parts, alpha=spec.alpha, seed=seed)[number]
    size = spec.batch_size * counts[number] // sum(counts)
    batches = ShardBatches(shard, size, seed=seed, worker=number)
    return ImagesLearner(build_network(spec.model, every, seed).to(device), batches, every, counts[number])
