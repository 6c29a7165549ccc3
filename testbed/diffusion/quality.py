"""Distance of images from those of the unsplit sampler with the same noise, and from real ones."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from testbed.diffusion.pretrain import classifier
from testbed.errors import SpecError
from testbed.workloads.images import images as image_sets

RANGE: Final = 2.0
"""Range of pixels, -1 to 1."""
_RIDGE = 1e-6
"""Added to the variance of each feature, because a constant feature has none."""


def relative_l2(images: Tensor, reference: Tensor) -> float:
    """Return the relative norm of the difference, over all images together."""
    return float(torch.dist(images, reference) / reference.norm())


def psnr_db(images: Tensor, reference: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB, over all images together; infinity if equal."""
    error = float((images - reference).square().mean())
    return math.inf if error == 0 else 10 * math.log10(RANGE**2 / error)


@torch.no_grad()
def features(classifier: nn.Module, images: Tensor) -> Tensor:
    """Return a classifier's outputs before the softmax, (n, 10), of images (n, 64), -1 to 1: few features, so that few
    images suffice for their covariance.
    """
    outputs: Tensor = classifier((images + 1) / 2)
    return outputs


def frechet_distance(ours: Tensor, others: Tensor) -> float:
    """Return the Frechet distance between normal distributions with mean and covariance of two sets of features, |m1 -
    m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), as FID does with Inception features (Heusel et al., NeurIPS 2017).

    SpecError for fewer images than features, which do not determine a covariance.
    """
    for given in (ours, others):
        if len(given) <= given.shape[1]:
            raise SpecError(f"{len(given)} images cannot give the covariance of {given.shape[1]} features; use more")
    (mean_a, cov_a), (mean_b, cov_b) = (_moments(given) for given in (ours, others))
    root = _root(cov_a)
    shared = np.sqrt(np.clip(np.linalg.eigvalsh(root @ cov_b @ root), 0, None)).sum()
    return float(((mean_a - mean_b) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * shared)


class Judge:
    """Says how far images are from the unsplit sampler's, and from the digits that the models learned from."""

    def __init__(self) -> None:
        self._real = features(classifier(), image_sets("digits").train.images * 2 - 1)

    def __call__(self, images: Tensor, reference: Tensor) -> tuple[float, float, float, float]:
        """Return relative L2 error, PSNR in dB, and the Frechet distances to the reference and to the digits."""
        ours, theirs = (features(classifier(), each) for each in (images, reference))
        distances = frechet_distance(ours, theirs), frechet_distance(ours, self._real)
        return relative_l2(images, reference), psnr_db(images, reference), *distances


def _moments(given: Tensor) -> tuple[np.ndarray, np.ndarray]:
    x = given.to(torch.float64).numpy()
    return x.mean(axis=0), np.cov(x, rowvar=False) + _RIDGE * np.eye(x.shape[1])


def _root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T)
