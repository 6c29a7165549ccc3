"""One run in numbers, and its loss curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from testbed.metrics.ideal import ideal_step_s
from testbed.metrics.split import split_shares
from testbed.metrics.steps import Step, align, measured
from testbed.metrics.traffic import traffic
from testbed.metrics.wires import Wires
from testbed.records import LabRecord, Phase, RunCertificates, Split, StepRecord, Summary
from testbed.spec import Cell


class LossPoint(NamedTuple):
    """One point of a loss curve."""

    step: int
    """Optimiser steps done before the loss was taken."""
    seconds: float
    """Time spent in training steps when the loss was known: evaluations are taken out, warm-up is in."""
    loss: float


def _curve(stages: Sequence[Sequence[StepRecord]], phase: Phase) -> list[LossPoint]:
    points, seconds = [], 0.0
    for step in align(stages):
        if step.phase == "train":
            seconds += step.seconds
        if step.phase == phase and step.loss is not None:
            points.append(LossPoint(step.number, seconds, step.loss))
    return points


def loss_curve(stages: Sequence[Sequence[StepRecord]]) -> list[LossPoint]:
    """The training loss of every step."""
    return _curve(stages, "train")


def validation_curve(stages: Sequence[Sequence[StepRecord]]) -> list[LossPoint]:
    """The loss of every evaluation."""
    return _curve(stages, "evaluation")


def _split(steps: Sequence[Step], chosen: Sequence[Step], step_s: float) -> Split | None:
    """The shares of all measured time, laid on the median step."""
    shares = split_shares(steps, chosen)
    if shares is None:
        return None
    compute, codec, wire, wait = (share * step_s for share in shares)
    return Split(compute_s=compute, codec_s=codec, wire_s=wire, wait_s=wait)


def summarise(
    cell: Cell,
    lab: LabRecord | None,
    certificates: RunCertificates | None,
    stages: Sequence[Sequence[StepRecord]],
    *,
    status: Literal["ok", "failed", "interrupted"],
    error: str | None,
) -> Summary:
    """A run in numbers. `stages` holds the records of each stage, first stage first; records may be few or none (a failed run).

    Times are those of the measured steps (training, not warm-up); see `metrics.steps` for where a step begins. `step_s` and
    `ideal_step_s` are medians, `efficiency` is the median of the steps' own ratios, bytes are means. The engine is the lab's;
    without a lab the cell's. ResultsError when the records do not belong together.
    """
    steps = align(stages)
    train = [step for step in steps if step.phase == "train"]
    chosen = measured(steps)
    moved = traffic(chosen)
    seconds = np.array([step.seconds for step in chosen])
    wires = Wires(cell, None if lab is None else lab.played_at_ns)
    ideals = np.array([ideal_step_s(wires, step.records, step.free_ns) for step in chosen])
    step_s = float(np.median(seconds)) if chosen else None
    low_high = np.quantile(seconds, [0.25, 0.75]) if chosen else None
    losses = [step.loss for step in train if step.loss is not None]
    validations = [step.loss for step in steps if step.phase == "evaluation" and step.loss is not None]
    return Summary(
        status=status,
        error=error,
        cell_id=cell.id,
        engine=cell.engine if lab is None else lab.engine,
        certificate=None if certificates is None else certificates.verdict,
        steps=len(train),
        measured_steps=len(chosen),
        step_s=step_s,
        step_quartiles_s=None if low_high is None else (float(low_high[0]), float(low_high[1])),
        ideal_step_s=float(np.median(ideals)) if chosen else None,
        efficiency=float(np.median(ideals / seconds)) if chosen and seconds.min() > 0 else None,
        tokens_per_s=chosen[-1].tokens / step_s if chosen and step_s else None,
        raw_bytes_per_step=moved.raw,
        payload_bytes_per_step=moved.payload,
        wire_bytes_per_step=moved.wire,
        header_bytes_per_step=moved.header,
        retransmitted_bytes_per_step=moved.retransmitted,
        compression_ratio=moved.raw / moved.payload if moved.raw is not None and moved.payload else None,
        split=None if step_s is None else _split(steps, chosen, step_s),
        train_loss=losses[-1] if losses else None,
        validation_loss=validations[-1] if validations else None,
        wall_s=(train[-1].end_ns - train[0].begin_ns) / 1e9 if train else None,
    )
