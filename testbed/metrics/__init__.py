"""Metrics: compute a run's numbers from its records. Pure functions without I/O.

steps         the stages' records aligned into steps of the pipeline, and the choice of steps that count
spans         timelines of stages: frames in flight, shares of the time, overruns
traffic       traffic of a step: raw, payload and wire bytes
wires         a cell's links as carriers of bits, constant or varying
links         the same as event sources for the job loop: arrival times of messages
ideal         duration of a step over links that match their profile exactly
bound         bound on the step-time error caused by link deviations
worst_step    the worst step, if much longer than the median, and the state of the links during it
contention    whether a run computed as fast as its calibration
curves        loss curves of one run, and of several seeds together
statistics    confidence intervals
summary       one run in numbers
compare       a codec compared with a baseline, in time and in loss
verdicts      verdict of a comparison on a claim: holds, fails, not resolved
time_to_loss time to a target loss
live_checks   choice of played cells to run live too
fidelity      agreement of a played run with the live one

A new metric is a function here, a field of `records.Summary` that `summary` fills, and a row of
`report.tables.COLUMNS`. Exports and the combination of several runs follow from the field.
"""

from testbed.metrics.compare import CodecComparison, RunSteps, compare
from testbed.metrics.curves import LossPoint, bands, loss_curve, uncompressed_curve, validation_curve
from testbed.metrics.steps import PipelineStep, align, measured, steady
from testbed.metrics.summary import summarise
from testbed.metrics.time_to_loss import TimeToLoss, default_target, time_to_loss

__all__ = [
    "CodecComparison",
    "LossPoint",
    "RunSteps",
    "PipelineStep",
    "TimeToLoss",
    "align",
    "bands",
    "compare",
    "default_target",
    "loss_curve",
    "measured",
    "steady",
    "summarise",
    "time_to_loss",
    "uncompressed_curve",
    "validation_curve",
]
