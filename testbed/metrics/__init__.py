"""Numbers from records: pure functions, nothing is read, written or started here.

steps    the stages' records side by side, and where one step ends and the next begins
wires    the links as carriers of bits, constant or varying
ideal    how long a step would take if the links did exactly what the profile says
split    where the time of a step went
traffic  what a step moved: raw, payload and wire bytes
summary  one run in numbers, and its loss curves
"""

from testbed.metrics.ideal import ideal_step_s
from testbed.metrics.split import split_shares
from testbed.metrics.steps import Step, align, measured
from testbed.metrics.summary import LossPoint, loss_curve, summarise, validation_curve
from testbed.metrics.traffic import Traffic, traffic
from testbed.metrics.wires import Wires

__all__ = [
    "LossPoint",
    "Step",
    "Traffic",
    "Wires",
    "align",
    "ideal_step_s",
    "loss_curve",
    "measured",
    "split_shares",
    "summarise",
    "traffic",
    "validation_curve",
]
