"""Metrics: which numbers follow from a run's records? Pure functions; nothing is read, written or started here.

steps         the stages' records aligned into steps of the pipeline, and which of them count
spans         what each stage did when: frames in flight, shares of the time, overruns
traffic       what a step moved: raw, payload and wire bytes
wires         a cell's links as carriers of bits, constant or varying
links         the same as sources of events for the loop of jobs: when a message arrives
ideal         how long a step would take if the links did exactly what the profile says
bound         how far what was found wrong with the links moves a step
contention    whether a run computed as fast as its calibration
curves        loss curves of one run, and of several seeds together
statistics    how sure a number is
summary       one run in numbers
compare       a codec compared with a baseline, in time and in loss
verdicts      what a comparison shows of a claim: holds, fails, not resolved
time_to_loss  how long training takes to reach a target loss
live_checks   which played cells are run live too
fidelity      whether a played run stands for the live one

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
