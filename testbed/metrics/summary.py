"""Summarise one run: computes every field of Summary with the functions of the other modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np

from testbed.message_key import Phase
from testbed.metrics import statistics
from testbed.metrics.contention import stray_share
from testbed.metrics.ideal import ideal_step_s, recorded_steps_s
from testbed.metrics.spans import busy_cores, overrun_share, split_shares
from testbed.metrics.steps import PipelineStep, align, counted, durations_s, over_cycles
from testbed.metrics.traffic import traffic
from testbed.metrics.wires import Wires
from testbed.metrics.worst_step import worst_step
from testbed.records import Floors, LabRecord, RunCertificates, Sample, Split, StageCosts, StepRecord, Summary
from testbed.spec import Cell, PipelineSpec


def _last_loss(steps: Sequence[PipelineStep], phase: Phase) -> float | None:
    return next((step.loss for step in reversed(steps) if step.phase == phase and step.loss is not None), None)


def _ended(cell: Cell, steps: Sequence[PipelineStep]) -> Literal["steps", "target", "budget"] | None:
    """Return why training ended in a successful run. A reached target takes precedence."""
    reached, target = _last_loss(steps, "evaluation"), cell.training.target_loss
    if target is not None and reached is not None and reached <= target:
        return "target"
    if any(step.phase == "train" and step.number + 1 >= cell.training.steps for step in steps):
        return "steps"
    return None if cell.training.budget_s is None else "budget"


def _split(steps: Sequence[PipelineStep], chosen: Sequence[PipelineStep], step_s: float) -> Split | None:
    """Apply the shares of all measured time to the median step."""
    shares = split_shares(steps, chosen)
    if shares is None:
        return None
    compute, codec, wire, wait = (share * step_s for share in shares)
    return Split(compute_s=compute, codec_s=codec, wire_s=wire, wait_s=wait)


def _ideals_s(
    cell: Cell, lab: LabRecord | None, steps: Sequence[PipelineStep], chosen: Sequence[PipelineStep]
) -> Sequence[float] | None:
    """Return the ideal durations of the chosen steps, in seconds of the lab; None if undefined."""
    played_at_ns = None if lab is None else lab.played_at_ns
    if isinstance(cell.parallelism, PipelineSpec):
        wires = Wires(cell, played_at_ns)
        return [ideal_step_s(wires, step.records, step.free_ns, cell.compute) for step in chosen]
    if not chosen:
        return []
    if steps[0].resumed:
        return None
    nodes = list(zip(*(step.records for step in steps), strict=True))
    if (ideals_s := recorded_steps_s(cell, nodes, played_at_ns)) is None:
        return None
    return over_cycles([ideals_s[step.number] for step in chosen], cell.cycle)


def summarise(
    cell: Cell,
    lab: LabRecord | None,
    certificates: RunCertificates | None,
    stages: Sequence[Sequence[StepRecord]],
    *,
    status: Literal["ok", "failed", "interrupted"],
    error: str | None,
    costs: Sequence[StageCosts] | None = None,
    steady: tuple[int, int] | None = None,
    floors: Floors | None = None,
    lost: Mapping[str, str] | None = None,
    samples: Iterable[Sample] = (),
) -> Summary:
    """Summarise a run. `stages` holds the records of each stage, first stage first; a failed run may have few or none.

    Times are those of the measured steps (training, without warm-up, in the steady state), divided by the cell's
    dilation; see `metrics.steps` for where a step begins. `step_s` and `ideal_step_s` are medians, `efficiency` is the
    median of the steps' own ratios, bytes are means. The engine is the lab's; without a lab the cell's. `costs` are
    those of the cell's recipe in the sweep's calibration, by stage; `steady` is the repetition that a player proved, as
    first step and period; `floors` are those of the text. `lost`: nodes lost during training, by name, with
    the reason; their incomplete records are ignored. `samples`: those of the links' counters, read only for the worst
    step. ResultsError for inconsistent records.
    """
    lost = dict(lost or {})
    unigram, bigram = floors or Floors()
    steps = align([records for name, records in zip(cell.node_names, stages, strict=False) if name not in lost])
    train = [step for step in steps if step.phase == "train"]
    chosen = counted(steps, None if steady is None else steady[0])
    moved = traffic(chosen)
    dilation = cell.compute.dilation
    seconds = np.array(durations_s(chosen, cell.cycle)) / dilation
    ideals = None if (ideals_s := _ideals_s(cell, lab, steps, chosen)) is None else np.array(ideals_s) / dilation
    step_s = float(np.median(seconds)) if chosen else None
    low_high = np.quantile(seconds, [0.25, 0.75]) if chosen else None
    return Summary(
        status=status,
        error=error,
        cell_id=cell.id,
        engine=cell.engine if lab is None else lab.engine,
        timing=cell.timing,
        dilation=dilation,
        ended=_ended(cell, steps) if status == "ok" else None,
        lost=lost,
        certificate=None if certificates is None else certificates.verdict,
        bound=None if certificates is None else certificates.bound,
        contended=stray_share(cell, chosen, costs),
        steps=len(train),
        resumed_at=train[0].number or None if train else None,
        measured_steps=len(chosen),
        step_s=step_s,
        step_quartiles_s=None if low_high is None else (float(low_high[0]), float(low_high[1])),
        first_measured_step=chosen[0].number if chosen else None,
        steady_from=None if steady is None else steady[0],
        steady_period=None if steady is None else steady[1],
        step_interval_s=statistics.of_steps(seconds.tolist()).interval if chosen else None,
        ideal_step_s=float(np.median(ideals)) if chosen and ideals is not None else None,
        efficiency=float(np.median(ideals / seconds)) if chosen and ideals is not None and seconds.min() > 0 else None,
        tokens_per_s=chosen[-1].tokens / step_s if chosen and step_s else None,
        raw_bytes_per_step=moved.raw,
        payload_bytes_per_step=moved.payload,
        wire_bytes_per_step=moved.wire,
        header_bytes_per_step=moved.header,
        retransmitted_bytes_per_step=moved.retransmitted,
        compression_ratio=moved.raw / moved.payload if moved.raw is not None and moved.payload else None,
        split=None if step_s is None else _split(steps, chosen, step_s),
        worst=worst_step(cell, lab, steps, samples),
        train_loss=_last_loss(steps, "train"),
        validation_loss=_last_loss(steps, "evaluation"),
        validation_accuracy=next((step.accuracy for step in reversed(steps) if step.phase == "evaluation"), None),
        uncompressed_loss=_last_loss(steps, "uncompressed"),
        unigram_floor=unigram,
        bigram_floor=bigram,
        overrun_share=overrun_share(chosen),
        duty=busy_cores(chosen),
        wall_s=(train[-1].end_ns - train[0].begin_ns) / 1e9 / dilation if train else None,
    )
