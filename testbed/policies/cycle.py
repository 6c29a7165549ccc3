"""Duration of an iteration in the steady state: the time model of delayed aggregation."""

from __future__ import annotations

from typing import NamedTuple


def steady_cycle_s(compute_s: float, busy_s: float, whole_s: float, staleness: int) -> float:
    """Return the seconds from one iteration to the next, `max(Tc, S, (Tc + E) / (staleness + 1))`.

    A worker may be `staleness` iterations ahead of the aggregate. S, `busy_s`, is the time for which an exchange
    occupies its slowest link; E, `whole_s`, the time from its first byte to the aggregate. These are three loops of a
    timed event graph: computing, the link, and both together with as many iterations in flight as staleness allows.
    """
    return max(compute_s, busy_s, (compute_s + whole_s) / (staleness + 1))


class MessageSize(NamedTuple):
    """Size of an iteration's message, with and without compression."""

    dense_bytes: float
    """The message without compression."""
    expansion: float
    """Bytes per kept value over bytes per value of the dense message: 2 for fp32 values with 4-byte indices."""

    def message_bytes(self, ratio: float) -> float:
        """Return the message's size; a ratio of 1 is sent dense."""
        return self.dense_bytes if ratio >= 1 else self.expansion * ratio * self.dense_bytes


def iteration_s(
    exchanged: MessageSize, ratio: float, staleness: int, *, compute_s: float, rate_bps: float, delay_s: float
) -> float:
    """Return the steady cycle for messages over one link: S is size / rate, E adds the delay. The rate is that of
    messages, as in `link_estimate.LinkEstimate`.
    """
    sent_s = 8 * exchanged.message_bytes(ratio) / rate_bps
    return steady_cycle_s(compute_s, sent_s, sent_s + delay_s, staleness)
