"""What a leader of DeCo-SGD takes its links for, beside what they are and what their certificates say.

Its estimator is made anew and told what the records have: the bytes and moments of each message, and TCP's least round
trip. On the slowest of a message's links a packet's headers take their part of the rate.
"""

from __future__ import annotations

from statistics import median
from typing import NamedTuple

from testbed.errors import ResultsError
from testbed.metrics.wires import HEADER_BYTES
from testbed.policies.link_estimate import PassiveEstimator
from testbed.profiles.timeline import timeline
from testbed.records import Certificate
from testbed.results import Run
from testbed.spec import route

LEADER, HEARD = 0, 1


class Estimated(NamedTuple):
    """A run, in shares of the true values."""

    clock: str
    network: str
    messages: int
    rate_off: float
    """The estimated rate from the link's at that moment: median over messages."""
    rate_off_by: float
    """How far it is off: median of the distances."""
    settled_off_by: float
    """The same of the second half."""
    delay_off: float
    """Of the delay, after the last message."""
    certificate_off: float | None
    """What the certificate measured, rates and round trips, from what was asked: the largest distance. None: neither
    was."""


def estimated(run: Run) -> Estimated:
    """Say how far the leader's estimates are off. The leader is worker 0, and hears worker 1. ResultsError for a run in
    which it never knew its link.
    """
    lab, certificates = run.lab, run.certificates
    assert lab.played_at_ns is not None
    assert certificates is not None
    hops = [hop for hop in route(run.cell, HEARD, LEADER) if hop.pipe is not None]
    payload = 1 - HEADER_BYTES / run.cell.links[HEARD].mtu
    estimator, offs, delay_off = PassiveEstimator(least_products=0), list[float](), 0.0
    for record in run.steps(LEADER):
        least_ns = {socket.peer: 1000 * socket.min_rtt_us for socket in record.sockets}
        for message in record.received:
            times = (message.first_byte_ns, message.last_byte_ns, least_ns[message.peer or HEARD])
            estimator.heard(message.payload_bytes, *times)
            elapsed_ns = message.last_byte_ns - lab.played_at_ns
            true = [timeline(hop.pipe).at(elapsed_ns) for hop in hops if hop.pipe is not None]
            if (known := estimator.estimate) is not None:
                offs.append(known.rate_bps / (payload * min(each.rate_bps for each in true)) - 1)
                delay_off = known.delay_ns / sum(each.delay_ns for each in true) - 1
    if not offs:
        raise ResultsError(f"run {run.folder}: its leader heard no message that tells of a link; train more steps")
    return Estimated(
        clock=run.cell.clock,
        network=run.cell.network,
        messages=len(offs),
        rate_off=median(offs),
        rate_off_by=median(map(abs, offs)),
        settled_off_by=median(map(abs, offs[len(offs) // 2 :])),
        delay_off=delay_off,
        certificate_off=_off(certificates.before),
    )


def _off(certificate: Certificate | None) -> float | None:
    found = [] if certificate is None else certificate.measurements
    distances = [
        abs(each.measured / each.expected - 1)
        for each in found
        if each.quantity in ("goodput", "rtt") and each.measured and each.expected
    ]
    return max(distances, default=None)
