"""Synchronous federated rounds as a trace."""

from __future__ import annotations

import pytest

from testbed.metrics.links import Pipes
from testbed.profiles import load_profile
from testbed.trace.simulate import replay
from testbed.trace.synthetic import rounds_trace


def test_a_round_lasts_as_long_as_its_longest_message_and_the_answers() -> None:
    links = [load_profile(f"link(100Mbit, 10ms, up.rate={rate}Mbit)") for rate in (1, 2, 4)]
    profiles = [*links, load_profile("link(1Gbit, 10ms)")]
    sent = [(20_000, 20_000, 20_000), (1_000, 80_000, 1_000)]
    ends = replay(rounds_trace(sent, 50_000_000, 0), links=Pipes("star", profiles, 4))
    lasts = [ends[0] / 1e9, (ends[1] - ends[0]) / 1e9]
    # 50 ms of computing, the slowest upload with its headers, and four times 10 ms of delay: there and back.
    assert lasts == pytest.approx([0.05 + 0.16 + 0.04, 0.05 + 0.32 + 0.04], rel=0.08)
