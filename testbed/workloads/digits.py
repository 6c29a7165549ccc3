"""Handwritten digits, and networks small enough to train in seconds: what data parallel methods are tried on.

The images are scikit-learn's copy of the test part of the UCI data set "Optical recognition of handwritten digits"
(Alpaydin and Kaynak, 1998): 1,797 of 8 x 8 pixels in ten classes, which install with the package. A fifth, the same
whatever the seed, is for testing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from testbed.errors import UnknownNameError
from testbed.workloads.windows import shuffled

CLASSES: Final = 10
SIDE: Final = 8
_BRIGHTEST = 16.0
TEST_EXAMPLES: Final = 360


class LabelledImages(NamedTuple):
    """n labelled images."""

    images: Tensor
    """(n, 64) fp32, 0 to 1, row after row."""
    labels: Tensor
    """(n,) int64, 0 to 9."""

    def at(self, places: object) -> LabelledImages:
        """Return those at the given places, an index array."""
        chosen = torch.as_tensor(places)
        return LabelledImages(self.images[chosen], self.labels[chosen])


class Digits(NamedTuple):
    """All images, cut into two."""

    train: LabelledImages
    test: LabelledImages


class Score(NamedTuple):
    """How well a network does on labelled images."""

    loss: float
    """Mean cross-entropy, in nats."""
    accuracy: float
    """Share of the images whose class has the largest output."""


@functools.cache
def digits() -> Digits:
    """Read the images. They are shared: not to be written to."""
    images, labels = load_digits(return_X_y=True)
    every = LabelledImages(
        torch.tensor(images / _BRIGHTEST, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)
    )
    order = shuffled(len(labels), "digits test")
    return Digits(every.at(order[TEST_EXAMPLES:]), every.at(order[:TEST_EXAMPLES]))


def _mlp(*inner: int) -> nn.Module:
    widths = (SIDE * SIDE, *inner, CLASSES)
    layers: list[nn.Module] = []
    for into, out in itertools.pairwise(widths):
        layers += [nn.Linear(into, out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, SIDE, SIDE)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (SIDE // 2) ** 2, 64),
        nn.ReLU(),
        nn.Linear(64, CLASSES),
    )


MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "digits-mlp": lambda: _mlp(28),  # 2,110 parameters
    "digits-mlp-large": lambda: _mlp(256, 128),  # 50,826
    "digits-cnn": _cnn,  # 38,282
}
"""Networks from (n, 64) to (n, 10), by name. None of them has buffers, so parameters are all that workers exchange."""


def build_model(name: str, seed: int) -> nn.Module:
    """Make a network of `MODELS`, initialised as torch does from the seed; the global generator is left as it was.

    UnknownNameError for another name.
    """
    if name not in MODELS:
        raise UnknownNameError("model", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return MODELS[name]()


def batch_loss(model: nn.Module, examples: LabelledImages) -> Tensor:
    """Return the mean cross-entropy in nats, a scalar in autograd's graph."""
    return functional.cross_entropy(model(examples.images), examples.labels)


def score(model: nn.Module, examples: LabelledImages) -> Score:
    """Return loss and accuracy."""
    with torch.no_grad():
        outputs = model(examples.images)
        loss = functional.cross_entropy(outputs, examples.labels)
        return Score(float(loss), float((outputs.argmax(1) == examples.labels).double().mean()))
