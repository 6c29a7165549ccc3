"""Small image networks and numbers of images. No torch.

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

from testbed import manifest, paths
from testbed.errors import SpecError, UnknownNameError
from testbed.spec import ImagesSpec
from testbed.workloads import texts

_SCORED_VALUES = 1 << 17
"""Values of images scored together; activations of more would not fit into a small guest's memory."""
KERNEL: Final = 3
"""Side of a convolution's kernel, in pixels."""
VERSION: Final = 1
"""Version in the names of prepared images: increment it when the pixels of the same images change."""


@dataclass(frozen=True)
class ImageShape:
    """The properties of images that a network depends on."""

    channels: int
    """1: grey; 3: red, green, blue."""
    side: int
    """Side in pixels; images are square."""
    classes: int

    @property
    def pixels(self) -> int:
        """Values per image."""
        return self.channels * self.side**2

    def __str__(self) -> str:
        return f"{self.channels} x {self.side} x {self.side} values in {self.classes} classes"


DIGITS: Final = ImageShape(channels=1, side=8, classes=10)


# ------------------------------------------------------------------ how many images
class ImageCounts(NamedTuple):
    """Number and shape of the images of a set."""

    shape: ImageShape
    train: int
    test: int


OF_DIGITS: Final = ImageCounts(DIGITS, train=1437, test=360)


class PreparedImages(NamedTuple):
    """Images with labels, in two files: training images, then test images."""

    pixels: Path
    """A .npy of uint8, (n, channels * side * side): channel after channel, row after row."""
    labels: Path
    """A .npy of int64, (n,), 0 to classes - 1."""
    train: int
    """Number of training images, the first of the n images."""
    test: int
    channels: int
    """1: grey; 3: red, green, blue."""
    side: int
    """Side in pixels; images are square."""
    classes: int


def prepared_paths(hub: texts.HubSet, cache: Path) -> tuple[Path, Path, Path]:
    """Return the paths of pixels, labels and description of a data set below `cache`, existing or not."""
    name = f"{hub.file_name}-{VERSION}"
    return tuple(cache / "images" / f"{name}{end}" for end in (".npy", "-labels.npy", ".json"))  # type: ignore[return-value]


def find_prepared(hub: texts.HubSet, cache: Path) -> PreparedImages | None:
    """Return the prepared images of a data set of the hub; None unless complete. SpecError for altered files; those of
    an older testbed have no manifest, and are not checked.
    """
    pixels, labels, description = every = prepared_paths(hub, cache)
    proving = description.with_suffix(manifest.ENDING)
    if proving.exists() and (fault := manifest.find_fault(proving, lambda: description.stem)):
        whose = f"workload.images: data set {hub} in {proving.parent} is not as it was fetched"
        raise SpecError(f"{whose}: {fault}; remove {description.stem}* there, and fetch it again")
    if not all(path.is_file() for path in every):
        return None
    return PreparedImages(pixels, labels, **json.loads(description.read_text(encoding="utf8")))


def image_counts(images: str) -> ImageCounts:
    """Return the number and shape of images. SpecError for an unknown name, and for a data set that was not fetched
    yet.
    """
    texts.check_images_name(images)
    if (hub := texts.hub_set(images, "images")) is None:
        return OF_DIGITS
    if (prepared := find_prepared(hub, paths.cache_folder())) is None:
        raise SpecError(
            f"workload.images: data set {hub} is not on this machine yet; fetch it once with: python -m "
            f"testbed.workloads.prepare --images {images}"
        )
    return ImageCounts(ImageShape(prepared.channels, prepared.side, prepared.classes), prepared.train, prepared.test)


# ------------------------------------------------------------------ networks
class Layer(NamedTuple):
    """A size-preserving convolution or a linear layer; with biases."""

    inputs: int
    """Input channels or values."""
    outputs: int
    side: int | None = None
    """Side of a convolution's images in pixels; None: linear."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int]]:
        """Shapes of its matrix or kernels, and of its biases."""
        kernel = () if self.side is None else (KERNEL, KERNEL)
        return (self.outputs, self.inputs, *kernel), (self.outputs,)

    @property
    def places(self) -> int:
        """Number of uses of its weights per image."""
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
_LAYERS: Final[dict[str, Callable[[ImageShape], tuple[Layer, ...]]]] = {  # with the number of parameters for digits
    "mlp": _mlp(28),  # 2,110
    "mlp-large": _mlp(256, 128),  # 50,826
    "cnn": _cnn,  # 38,282
}
NETWORKS: Final = (*_LAYERS, *(f"{_FOR_DIGITS}{name}" for name in _LAYERS))
"""Networks by name, from (n, channels * side * side) to (n, classes): those for any images, and the same ones for
digits only. ReLU between layers; max pooling of 2 x 2 pixels between convolutions and the first linear layer. None of
them has buffers, so workers exchange only parameters.
"""


def network_layers(model: str, shape: ImageShape) -> tuple[Layer, ...]:
    """Return the layers of a network of `NETWORKS` for images of a shape.

    UnknownNameError for another name; SpecError for a digits network with other images.
    """
    if model not in NETWORKS:
        raise UnknownNameError("network", model, NETWORKS)
    shape_of_images = ImageShape(shape.channels, shape.side, shape.classes)
    if model.startswith(_FOR_DIGITS) and shape_of_images != DIGITS:
        raise SpecError(
            f"model {model!r} is for digits, {DIGITS}; these images have {shape_of_images}: use "
            f"{model.removeprefix(_FOR_DIGITS)!r}"
        )
    return _LAYERS[model.removeprefix(_FOR_DIGITS)](shape_of_images)


def workload_layers(spec: ImagesSpec) -> tuple[Layer, ...]:
    """Return the layers of a workload's network. Raises SpecError and UnknownNameError like the functions above."""
    return network_layers(spec.model, image_counts(spec.images).shape)


def products(spec: ImagesSpec) -> int:
    """Count the multiplications of a forward pass for one image."""
    return sum(math.prod(layer.shapes[0]) * layer.places for layer in workload_layers(spec))


def values(spec: ImagesSpec) -> int:
    """Count the output values of all layers for one image."""
    return sum(layer.outputs * layer.places for layer in workload_layers(spec))


def scored_together(pixels: int) -> int:
    """Return the number of images of `pixels` values that are scored together."""
    return max(1, _SCORED_VALUES // pixels)
