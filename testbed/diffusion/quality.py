"""How far are images from those that the unsplit sampler makes of the same noise, and from real ones?"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from testbed.errors import SpecError

RANGE: Final = 2.0
"""Pixels lie from -1 to 1."""
_RIDGE = 1e-6
"""Added to the variance of each feature: one that is the same for all images has none."""


def relative_l2(images: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference over the reference's, of all images together."""
    return float(torch.dist(images, reference) / reference.norm())


def psnr_db(images: Tensor, reference: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB, of all images together; infinity where they are equal."""
    error = float((images - reference).square().mean())
    return math.inf if error == 0 else 10 * math.log10(RANGE**2 / error)


@torch.no_grad()
def features(classifier: nn.Module, images: Tensor) -> Tensor:
    """Return a classifier's outputs before the softmax, (n, 10), of images (n, 64), -1 to 1: a few, so that few images
    tell their covariance.
    """
    found: Tensor = classifier((images + 1) / 2)
    return found


def frechet_distance(ours: Tensor, others: Tensor) -> float:
    """Return the Frechet distance between normal distributions with mean and covariance of two sets of features,
    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)), as FID has it of Inception's (Heusel et al., NeurIPS 2017).

    SpecError for fewer images than features, of which a covariance cannot be told.
    """
    for given in (ours, others):
        if len(given) <= given.shape[1]:
            raise SpecError(f"{len(given)} images do not tell the covariance of {given.shape[1]} features; take more")
    (mean_a, cov_a), (mean_b, cov_b) = (_moments(given) for given in (ours, others))
    root = _root(cov_a)
    shared = np.sqrt(np.clip(np.linalg.eigvalsh(root @ cov_b @ root), 0, None)).sum()
    return float(((mean_a - mean_b) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * shared)


def _moments(given: Tensor) -> tuple[np.ndarray, np.ndarray]:
    x = given.to(torch.float64).numpy()
    return x.mean(axis=0), np.cov(x, rowvar=False) + _RIDGE * np.eye(x.shape[1])


def _root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return np.asarray((vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T)
