"""Labelled images, and networks small enough to train in seconds: what data parallel methods are tried on.

"digits" are scikit-learn's copy of the test part of the UCI data set "Optical recognition of handwritten digits"
(Alpaydin and Kaynak, 1998): 1,797 of 8 x 8 pixels in ten classes, which install with the package. A fifth, the same
whatever the seed, is for testing. Other images are data sets of the hub, which say themselves what is for testing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from testbed import paths
from testbed.errors import SpecError, UnknownNameError
from testbed.workloads import texts
from testbed.workloads.prepare import prepare_images
from testbed.workloads.windows import shuffled

_BRIGHTEST = 16
TEST_EXAMPLES: Final = 360
"""Of the digits."""
_SCORED_TOGETHER = 512
"""Images; what a network holds of more would not fit into a small guest's memory."""


@dataclass(frozen=True)
class ImageShape:
    """What a network must know of images."""

    channels: int
    """1: grey; 3: red, green, blue."""
    side: int
    """Pixels: images are square."""
    classes: int

    def __str__(self) -> str:
        return f"{self.channels} x {self.side} x {self.side} values in {self.classes} classes"


DIGITS: Final = ImageShape(channels=1, side=8, classes=10)


class LabelledImages(NamedTuple):
    """n labelled images."""

    pixels: Tensor
    """(n, channels * side * side) uint8, channel after channel, row after row; perhaps mapped from a file."""
    labels: Tensor
    """(n,) int64, 0 to classes - 1."""
    brightest: int
    """What the brightest pixel can be."""

    @property
    def images(self) -> Tensor:
        """Pixels as (n, channels * side * side) fp32, 0 to 1."""
        return self.pixels.float() / self.brightest

    def at(self, places: object) -> LabelledImages:
        """Return those at the given places, an index array."""
        chosen = torch.as_tensor(places)
        return LabelledImages(self.pixels[chosen], self.labels[chosen], self.brightest)

    def between(self, start: int, stop: int) -> LabelledImages:
        """Return those from one place to before another, which are not copied."""
        return LabelledImages(self.pixels[start:stop], self.labels[start:stop], self.brightest)


@dataclass(frozen=True)
class ImageSet(ImageShape):
    """All images of a name, cut into two."""

    train: LabelledImages
    test: LabelledImages


class Score(NamedTuple):
    """How well a network does on labelled images."""

    loss: float
    """Mean cross-entropy, in nats."""
    accuracy: float
    """Share of the images whose class has the largest output."""


@functools.cache
def images(name: str, cache: Path | None = None) -> ImageSet:
    """Return "digits", or a data set of the hub, "hub:NAME" or "hub:NAME:CONFIGURATION", whose columns are one image
    and one class, with splits train and test: decoded once into `cache`, by default ours, and mapped from there.

    They are shared: not to be written to. SpecError for other names, and for a data set that cannot be had.
    """
    texts.check_images_name(name)
    if name == texts.DIGITS:
        return _digits()
    made = prepare_images(name, cache or paths.cache_folder())
    pixels = torch.from_numpy(np.load(made.pixels, mmap_mode="c"))  # torch would warn of one that is only read
    every = LabelledImages(pixels, torch.from_numpy(np.load(made.labels)), 255)
    train, test = every.between(0, made.train), every.between(made.train, made.train + made.test)
    return ImageSet(made.channels, made.side, made.classes, train, test)


def _digits() -> ImageSet:
    pixels, labels = load_digits(return_X_y=True)
    every = LabelledImages(torch.tensor(pixels, dtype=torch.uint8), torch.tensor(labels, dtype=torch.int64), _BRIGHTEST)
    order = shuffled(len(labels), "digits test")
    train, test = every.at(order[TEST_EXAMPLES:]), every.at(order[:TEST_EXAMPLES])
    return ImageSet(DIGITS.channels, DIGITS.side, DIGITS.classes, train, test)


def _mlp(shape: ImageShape, *inner: int) -> nn.Module:
    widths = (shape.channels * shape.side**2, *inner, shape.classes)
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn(shape: ImageShape) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (shape.channels, shape.side, shape.side)),
        nn.Conv2d(shape.channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (shape.side // 2) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, shape.classes),
    )


_FOR_DIGITS: Final = "digits-"
_NETWORKS: Final[dict[str, Callable[[ImageShape], nn.Module]]] = {  # with as many parameters for digits
    "mlp": lambda shape: _mlp(shape, 28),  # 2,110
    "mlp-large": lambda shape: _mlp(shape, 256, 128),  # 50,826
    "cnn": _cnn,  # 38,282
}
MODELS: Final = (*_NETWORKS, *(f"{_FOR_DIGITS}{name}" for name in _NETWORKS))
"""Networks from (n, channels * side * side) to (n, classes), by name: those for any images, and the same ones for
digits alone. None of them has buffers, so parameters are all that workers exchange.
"""


def build_network(model: str, shape: ImageShape, seed: int) -> nn.Module:
    """Make a network of `MODELS` for images, initialised as torch does from the seed; the global generator is left as
    it was.

    UnknownNameError for another name; SpecError for a network of digits and images that are none.
    """
    if model not in MODELS:
        raise UnknownNameError("model", model, MODELS)
    found = ImageShape(shape.channels, shape.side, shape.classes)
    if model.startswith(_FOR_DIGITS) and found != DIGITS:
        raise SpecError(
            f"model {model!r} is for digits, {DIGITS}; these images have {found}: take "
            f"{model.removeprefix(_FOR_DIGITS)!r}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _NETWORKS[model.removeprefix(_FOR_DIGITS)](found)


def batch_loss(model: nn.Module, examples: LabelledImages) -> Tensor:
    """Return the mean cross-entropy in nats, a scalar in autograd's graph."""
    return functional.cross_entropy(model(examples.images), examples.labels)


def score(model: nn.Module, examples: LabelledImages) -> Score:
    """Return loss and accuracy."""
    losses, right, total = [], 0, len(examples.labels)
    with torch.no_grad():
        for start in range(0, total, _SCORED_TOGETHER):
            part = examples.between(start, start + _SCORED_TOGETHER)
            outputs = model(part.images)
            losses.append(float(functional.cross_entropy(outputs, part.labels)) * (len(part.labels) / total))
            right += int((outputs.argmax(1) == part.labels).sum())
    return Score(math.fsum(losses), right / total)
