"""Labelled images, and networks small enough to train in seconds, for experiments with data parallel methods.

"digits" are scikit-learn's copy of the test part of the UCI data set "Optical recognition of handwritten digits"
(Alpaydin and Kaynak, 1998): 1,797 of 8 x 8 pixels in ten classes, which install with the package. A fifth, the same for
every seed, is for testing. Other images are data sets of the hub, which define their own test split.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from testbed import paths
from testbed.workloads import texts
from testbed.workloads.networks import DIGITS, KERNEL, OF_DIGITS, ImageShape, network_layers, scored_together
from testbed.workloads.prepare import prepare_images
from testbed.workloads.windows import shuffled

_BRIGHTEST = 16


class LabelledImages(NamedTuple):
    """n labelled images."""

    pixels: Tensor
    """(n, channels * side * side) uint8, channel by channel, row by row; possibly mapped from a file."""
    labels: Tensor
    """(n,) int64, 0 to classes - 1."""
    brightest: int
    """Maximum value of a pixel."""

    @property
    def images(self) -> Tensor:
        """Pixels as (n, channels * side * side) fp32, 0 to 1."""
        return self.pixels.float() / self.brightest

    def at(self, places: object) -> LabelledImages:
        """Return the images at the given indices, an index array."""
        chosen = torch.as_tensor(places)
        return LabelledImages(self.pixels[chosen], self.labels[chosen], self.brightest)

    def to(self, device: torch.device) -> LabelledImages:
        """Return the images on a device."""
        return self._replace(pixels=self.pixels.to(device), labels=self.labels.to(device))

    def between(self, start: int, stop: int) -> LabelledImages:
        """Return a range of images, without copying."""
        return LabelledImages(self.pixels[start:stop], self.labels[start:stop], self.brightest)


@dataclass(frozen=True)
class ImageSet(ImageShape):
    """All images of a set, split into two."""

    train: LabelledImages
    test: LabelledImages


class Score(NamedTuple):
    """A network's score on labelled images."""

    loss: float
    """Mean cross-entropy, in nats."""
    accuracy: float
    """Share of the images whose class has the largest output."""


@functools.cache
def images(name: str, cache: Path | None = None) -> ImageSet:
    """Return "digits", or a data set of the hub, "hub:NAME" or "hub:NAME:CONFIGURATION", whose columns are one image
    and one class, with splits train and test: decoded once into `cache`, by default ours, and mapped from there.

    They are shared, so read-only. SpecError for other names, and for an unavailable data set.
    """
    texts.check_images_name(name)
    if name == texts.DIGITS:
        return _digits()
    made = prepare_images(name, cache or paths.cache_folder())
    pixels = torch.from_numpy(np.load(made.pixels, mmap_mode="c"))  # torch warns of read-only ones
    every = LabelledImages(pixels, torch.from_numpy(np.load(made.labels)), 255)
    train, test = every.between(0, made.train), every.between(made.train, made.train + made.test)
    return ImageSet(made.channels, made.side, made.classes, train, test)


def _digits() -> ImageSet:
    # Read as a file: importing scikit-learn costs each worker 150 MB and a second.
    package = importlib.util.find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    rows = np.loadtxt(
        Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", dtype=np.int64, delimiter=","
    )
    every = LabelledImages(torch.from_numpy(rows[:, :-1].astype(np.uint8)), torch.from_numpy(rows[:, -1]), _BRIGHTEST)
    order = shuffled(len(rows), "digits test")
    train, test = every.at(order[OF_DIGITS.test :]), every.at(order[: OF_DIGITS.test])
    return ImageSet(DIGITS.channels, DIGITS.side, DIGITS.classes, train, test)


def build_network(model: str, shape: ImageShape, seed: int) -> nn.Module:
    """Make a network of `networks.NETWORKS` for images, initialised as torch does from the seed; the global generator
    is left as it was.

    UnknownNameError for another name; SpecError for a digits network with other images.
    """
    layers = network_layers(model, shape)
    modules: list[nn.Module] = []
    if layers[0].side is not None:
        modules.append(nn.Unflatten(1, (shape.channels, shape.side, shape.side)))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for before, layer in zip((None, *layers), layers, strict=False):
            modules += [] if before is None else [nn.ReLU()]
            if before is not None and before.side is not None and layer.side is None:
                modules += [nn.MaxPool2d(2), nn.Flatten()]
            if layer.side is None:
                modules.append(nn.Linear(layer.inputs, layer.outputs))
            else:
                modules.append(nn.Conv2d(layer.inputs, layer.outputs, KERNEL, padding=KERNEL // 2))
    return nn.Sequential(*modules)


def batch_loss(model: nn.Module, examples: LabelledImages) -> Tensor:
    """Return the mean cross-entropy in nats, a scalar in autograd's graph."""
    return functional.cross_entropy(model(examples.images), examples.labels)


def score(model: nn.Module, examples: LabelledImages) -> Score:
    """Return loss and accuracy."""
    losses, right, total = [], 0, len(examples.labels)
    with torch.no_grad():
        together = scored_together(examples.pixels.shape[1])
        for start in range(0, total, together):
            part = examples.between(start, start + together)
            outputs = model(part.images)
            losses.append(float(functional.cross_entropy(outputs, part.labels)) * (len(part.labels) / total))
            right += int((outputs.argmax(1) == part.labels).sum())
    return Score(math.fsum(losses), right / total)
