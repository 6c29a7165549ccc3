"""Small networks that learn labelled images, in numbers: which there are, and what they cost. No torch.

`images` builds them. A new network is one row of `NETWORKS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

from testbed.errors import UnknownNameError
from testbed.spec import ImagesSpec

SCORED_TOGETHER: Final = 512
"""Images; what a network holds of more would not fit into a small guest's memory."""
_KERNEL = 3
"""Side of a convolution's kernel."""


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


class ImageCounts(NamedTuple):
    """How many images a set has, and of which shape."""

    shape: ImageShape
    train: int
    test: int


DIGITS: Final = ImageCounts(ImageShape(channels=1, side=8, classes=10), train=1437, test=360)


class Layer(NamedTuple):
    """A convolution of 3 x 3, or a linear layer."""

    inputs: int
    """Channels, or values."""
    outputs: int
    side: int | None = None
    """Of a convolution: pixels of a side, before and after it. None: linear."""

    @property
    def weights(self) -> int:
        """Values of its matrix or kernels."""
        return self.inputs * self.outputs * (1 if self.side is None else _KERNEL**2)

    @property
    def places(self) -> int:
        """How often these weights are used for an image."""
        return 1 if self.side is None else self.side**2


def _mlp(*inner: int) -> Callable[[ImageShape], tuple[Layer, ...]]:
    def layers(shape: ImageShape) -> tuple[Layer, ...]:
        widths = (shape.channels * shape.side**2, *inner, shape.classes)
        return tuple(Layer(into, out) for into, out in itertools.pairwise(widths))

    return layers


def _cnn(shape: ImageShape) -> tuple[Layer, ...]:
    return (
        Layer(shape.channels, 16, shape.side),
        Layer(16, 32, shape.side),
        Layer(32 * (shape.side // 2) ** 2, 64),
        Layer(64, shape.classes),
    )


NETWORKS: Final[dict[str, Callable[[ImageShape], tuple[Layer, ...]]]] = {
    "digits-mlp": _mlp(28),  # 2,110 parameters
    "digits-mlp-large": _mlp(256, 128),  # 50,826
    "digits-cnn": _cnn,  # 38,282
}
"""Networks by name, as layers with biases. Between two layers is a ReLU; after the last convolution each 2 x 2 pixels
become the largest of them."""


def layers(spec: ImagesSpec) -> tuple[Layer, ...]:
    """Return the layers of a workload's network. UnknownNameError for another name; SpecError for unknown images."""
    shape = image_counts(spec).shape
    if spec.model not in NETWORKS:
        raise UnknownNameError("network for images", spec.model, NETWORKS)
    return NETWORKS[spec.model](shape)


def parameters(spec: ImagesSpec) -> int:
    """Count the parameters of a workload's network."""
    return sum(layer.weights + layer.outputs for layer in layers(spec))


def products(spec: ImagesSpec) -> int:
    """Count the products that a forward pass needs for one image."""
    return sum(layer.weights * layer.places for layer in layers(spec))


def kept_values(spec: ImagesSpec) -> int:
    """Count the values that all layers make of one image, which a backward pass needs again."""
    return sum(layer.outputs * layer.places for layer in layers(spec))


def image_counts(spec: ImagesSpec) -> ImageCounts:
    """Return how many images a workload has. UnknownNameError for unknown ones."""
    if spec.images != "digits":
        raise UnknownNameError("images", spec.images, ("digits",))
    return DIGITS
