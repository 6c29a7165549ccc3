"""Numbers from records: pure functions, nothing is read, written or started here.

steps         the stages' records side by side, and where one step ends and the next begins
steady        which of the measured steps count
curves        loss curves, of one run and of several seeds
wires         the links as carriers of bits, constant or varying
ideal         how long a step would take if the links did exactly what the profile says
closed_form   how long it takes where links take no time and stages are alike
pace          whether stages kept to the emulated device's durations
split         where the time of a step went
traffic       what a step moved: raw, payload and wire bytes
statistics    how sure a number is
compare       a codec against a baseline, in time and in loss
time_to_loss  how long training takes to a target loss
spans         the timeline of a step: what each stage did, which frame was under way
fidelity      whether a replay stands for the full run
summary       one run in numbers
"""

from testbed.metrics.compare import Comparison, RunSteps, compare, run_steps
from testbed.metrics.curves import Bands, LossPoint, bands, loss_curve, uncompressed_curve, validation_curve
from testbed.metrics.ideal import ideal_step_s
from testbed.metrics.split import split_shares
from testbed.metrics.steady import steady
from testbed.metrics.steps import Step, align, measured
from testbed.metrics.summary import summarise
from testbed.metrics.time_to_loss import TimeToLoss, default_target, time_to_loss
from testbed.metrics.traffic import Traffic, traffic
from testbed.metrics.wires import Wires

__all__ = [
    "Bands",
    "Comparison",
    "LossPoint",
    "RunSteps",
    "Step",
    "TimeToLoss",
    "Traffic",
    "Wires",
    "align",
    "bands",
    "compare",
    "default_target",
    "ideal_step_s",
    "loss_curve",
    "measured",
    "run_steps",
    "split_shares",
    "steady",
    "summarise",
    "time_to_loss",
    "traffic",
    "uncompressed_curve",
    "validation_curve",
]
