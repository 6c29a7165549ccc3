"""Loss curves of one run, and of several seeds together. Times are seconds of the emulated world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from testbed.message_key import Phase
from testbed.metrics.steps import align
from testbed.records import StepRecord
from testbed.spec import Cell


class LossPoint(NamedTuple):
    """One point of a loss curve."""

    step: int
    """Optimiser steps done before the loss was taken."""
    seconds: float
    """Time spent in training steps until the loss was known, including warm-up, excluding evaluations."""
    loss: float
    accuracy: float | None = None
    """Accuracy of an evaluation on images."""


class Bands(NamedTuple):
    """Several curves combined into a band, at the steps common to all."""

    steps: list[int]
    low: list[float]
    """Smallest loss; a sweep has too few seeds for quantiles."""
    median: list[float]
    high: list[float]
    """Largest loss."""
    curves: int


def _curve(cell: Cell, stages: Sequence[Sequence[StepRecord]], phase: Phase) -> list[LossPoint]:
    points, seconds = [], 0.0
    for step in align(stages):
        if step.phase == "train":
            seconds += step.seconds / cell.compute.dilation
        if step.phase == phase and step.loss is not None:
            points.append(LossPoint(step.number, seconds, step.loss, step.accuracy))
    return points


def loss_curve(cell: Cell, stages: Sequence[Sequence[StepRecord]]) -> list[LossPoint]:
    """Return the training loss of every step."""
    return _curve(cell, stages, "train")


def validation_curve(cell: Cell, stages: Sequence[Sequence[StepRecord]]) -> list[LossPoint]:
    """Return the loss of every evaluation, with the codec in place."""
    return _curve(cell, stages, "evaluation")


def uncompressed_curve(cell: Cell, stages: Sequence[Sequence[StepRecord]]) -> list[LossPoint]:
    """Return the loss of every evaluation that was repeated with fp32 at the boundaries."""
    return _curve(cell, stages, "uncompressed")


def bands(curves: Sequence[Sequence[LossPoint]]) -> Bands:
    """Combine the curves of a cell's seeds into one band.

    Steps missing from one of them, because it ended early, are omitted.
    """
    losses = [{point.step: point.loss for point in curve} for curve in curves]
    steps = sorted(set.intersection(*(set(curve) for curve in losses))) if losses else []
    if not steps:
        return Bands([], [], [], [], len(losses))
    rows = np.array([[curve[step] for step in steps] for curve in losses], dtype=np.float64)
    low, median, high = rows.min(axis=0), np.median(rows, axis=0), rows.max(axis=0)
    return Bands(steps, low.tolist(), median.tolist(), high.tolist(), len(losses))
