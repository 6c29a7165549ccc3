"""Small networks that learn labelled images, and how many images there are, in numbers. No torch.

`images` builds and reads them, `prepare` fetches data sets of the hub. A new network is one row of `NETWORKS`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from testbed import paths
from testbed.errors import SpecError, UnknownNameError
from testbed.spec import ImagesSpec
from testbed.workloads import texts

_SCORED_VALUES = 1 << 17
"""Of images that are scored together; what a network makes of more would not fit into a small guest's memory."""
KERNEL: Final = 3
"""Side of a convolution's kernel, in pixels."""
VERSION: Final = 1
"""Part of the name of prepared images: raise it when the same ones would give other pixels."""


@dataclass(frozen=True)
class ImageShape:
    """What a network must know of images."""

    channels: int
    """1: grey; 3: red, green, blue."""
    side: int
    """Pixels: images are square."""
    classes: int

    @property
    def pixels(self) -> int:
        """Values of an image."""
        return self.channels * self.side**2

    def __str__(self) -> str:
        return f"{self.channels} x {self.side} x {self.side} values in {self.classes} classes"


DIGITS: Final = ImageShape(channels=1, side=8, classes=10)


# ------------------------------------------------------------------ how many images
class ImageCounts(NamedTuple):
    """How many images a set has, and of which shape."""

    shape: ImageShape
    train: int
    test: int


OF_DIGITS: Final = ImageCounts(DIGITS, train=1437, test=360)


class PreparedImages(NamedTuple):
    """Images with labels, in two files: those to train on, and after them those to test on."""

    pixels: Path
    """A .npy of uint8, (n, channels * side * side): channel after channel, row after row."""
    labels: Path
    """A .npy of int64, (n,), 0 to classes - 1."""
    train: int
    """How many of the n images come first, to train on."""
    test: int
    channels: int
    """1: grey; 3: red, green, blue."""
    side: int
    """Pixels: images are square."""
    classes: int


def prepared_paths(hub: texts.HubSet, cache: Path) -> tuple[Path, Path, Path]:
    """Return where pixels, labels and a description of a data set lie below `cache`, or will lie."""
    name = f"{hub.file_name}-{VERSION}"
    return tuple(cache / "images" / f"{name}{end}" for end in (".npy", "-labels.npy", ".json"))  # type: ignore[return-value]


def find_prepared(hub: texts.HubSet, cache: Path) -> PreparedImages | None:
    """Return what was made of a data set of the hub; None where that is not there, whole."""
    pixels, labels, description = every = prepared_paths(hub, cache)
    if not all(path.is_file() for path in every):
        return None
    return PreparedImages(pixels, labels, **json.loads(description.read_text(encoding="utf8")))


def image_counts(images: str) -> ImageCounts:
    """Return how many images there are, and their shape. SpecError for an unknown name, and for a data set that was not
    fetched yet.
    """
    texts.check_images_name(images)
    if (hub := texts.hub_set(images, "images")) is None:
        return OF_DIGITS
    if (found := find_prepared(hub, paths.cache_folder())) is None:
        raise SpecError(
            f"workload.images: data set {hub} is not on this machine yet; fetch it once with: python -m "
            f"testbed.workloads.prepare --images {images}"
        )
    return ImageCounts(ImageShape(found.channels, found.side, found.classes), found.train, found.test)


# ------------------------------------------------------------------ networks
class Layer(NamedTuple):
    """A convolution that keeps the images' size, or a linear layer; with biases."""

    inputs: int
    """Channels, or values."""
    outputs: int
    side: int | None = None
    """Of a convolution: pixels of a side. None: linear."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int]]:
        """Of its matrix or kernels, and of its biases."""
        kernel = () if self.side is None else (KERNEL, KERNEL)
        return (self.outputs, self.inputs, *kernel), (self.outputs,)

    @property
    def places(self) -> int:
        """How often its weights are used for an image."""
        return 1 if self.side is None else self.side**2


def _mlp(*inner: int) -> Callable[[ImageShape], tuple[Layer, ...]]:
    def layers(shape: ImageShape) -> tuple[Layer, ...]:
        widths = (shape.pixels, *inner, shape.classes)
        return tuple(Layer(into, out) for into, out in itertools.pairwise(widths))

    return layers


def _cnn(shape: ImageShape) -> tuple[Layer, ...]:
    return (
        Layer(shape.channels, 16, shape.side),
        Layer(16, 32, shape.side),
        Layer(32 * (shape.side // 2) ** 2, 64),
        Layer(64, shape.classes),
    )


_FOR_DIGITS: Final = "digits-"
_LAYERS: Final[dict[str, Callable[[ImageShape], tuple[Layer, ...]]]] = {  # with as many parameters for digits
    "mlp": _mlp(28),  # 2,110
    "mlp-large": _mlp(256, 128),  # 50,826
    "cnn": _cnn,  # 38,282
}
NETWORKS: Final = (*_LAYERS, *(f"{_FOR_DIGITS}{name}" for name in _LAYERS))
"""Networks by name, from (n, channels * side * side) to (n, classes): those for any images, and the same ones for
digits alone. Between two layers is a ReLU; before the first linear one behind a convolution each 2 x 2 pixels become
the largest of them. None of them has buffers, so parameters are all that workers exchange.
"""


def network_layers(model: str, shape: ImageShape) -> tuple[Layer, ...]:
    """Return the layers of a network of `NETWORKS` for such images.

    UnknownNameError for another name; SpecError for a network of digits and images that are none.
    """
    if model not in NETWORKS:
        raise UnknownNameError("network", model, NETWORKS)
    found = ImageShape(shape.channels, shape.side, shape.classes)
    if model.startswith(_FOR_DIGITS) and found != DIGITS:
        raise SpecError(
            f"model {model!r} is for digits, {DIGITS}; these images have {found}: take "
            f"{model.removeprefix(_FOR_DIGITS)!r}"
        )
    return _LAYERS[model.removeprefix(_FOR_DIGITS)](found)


def workload_layers(spec: ImagesSpec) -> tuple[Layer, ...]:
    """Return the layers of a workload's network. SpecError or UnknownNameError as the functions above."""
    return network_layers(spec.model, image_counts(spec.images).shape)


def products(spec: ImagesSpec) -> int:
    """Count the products that a forward pass needs for one image."""
    return sum(math.prod(layer.shapes[0]) * layer.places for layer in workload_layers(spec))


def values(spec: ImagesSpec) -> int:
    """Count the values that all layers make of one image."""
    return sum(layer.outputs * layer.places for layer in workload_layers(spec))


def scored_together(pixels: int) -> int:
    """Return how many images of so many values are scored together."""
    return max(1, _SCORED_VALUES // pixels)
