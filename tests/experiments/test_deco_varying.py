"""deco_varying: over a link that stays, its event model gives the steady cycle; its arms choose as they say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from testbed.metrics.wires import wire_bytes
from testbed.pipeline.frame import HEADER_BYTES
from testbed.policies.cycle import steady_cycle_s
from testbed.policies.deco import DecoChoice
from testbed.profiles.timeline import timeline
from tests.commands import Command

FOLDER = Command.shipped / "deco_varying"


@pytest.fixture(scope="module")
def model() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    try:
        import timeline as found

        yield found
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("timeline", None)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("ratio", [0.001, 0.01])
def test_over_a_link_that_stays_a_step_is_the_steady_cycle(model: ModuleType, ratio: float, staleness: int) -> None:
    network, pair = model.Network("link(80Mbit, 50ms)", 40_000_000), DecoChoice(staleness, ratio)
    steps = model.simulate(network, model.leader_of(model.Static, network, pair), pair, 40)
    link = network.link
    packet = link.mtu + link.overhead_bytes
    bits = 8 * wire_bytes(network.message_bytes(ratio) + HEADER_BYTES, link)
    sent_s = bits * (1 + (52 + link.overhead_bytes) / (2 * packet)) / 80e6
    cycle_s = steady_cycle_s(model.COMPUTE_NS / 1e9, sent_s, sent_s + 0.05, staleness)
    period = staleness + 1
    assert (steps[-1].end_ns - steps[-1 - period].end_ns) / 1e9 / period == pytest.approx(cycle_s, rel=1e-3)


def test_a_leader_follows_the_link_later_than_one_that_is_told(model: ModuleType) -> None:
    network = model.NETWORKS["varying-80mbps"]
    ratios = {}
    for kind in (model.Leader, model.Informed):
        first = model.FIRST
        ratios[kind] = [
            step.ratio for step in model.simulate(network, model.leader_of(kind, network, first), first, 90)
        ]
    told, found = ratios[model.Informed], ratios[model.Leader]
    assert len(set(told)) > 2
    assert len(set(found)) > 2
    falls = [next(at for at in range(8, 90) if each[at] < 0.8 * each[at - 1]) for each in (told, found)]
    assert falls[0] <= falls[1]


def test_the_oracle_takes_the_pair_that_is_soonest_at_the_rate_to_come(model: ModuleType) -> None:
    network = model.NETWORKS["varying-80mbps"]
    oracle = model.leader_of(model.Oracle, network, model.FIRST)
    small, large = DecoChoice(1, 0.001), DecoChoice(1, 0.03)
    oracle.network, oracle.steps_to_target = network, {small: 200.0, large: 100.0}
    oracle.pipes = [timeline(pipe) for pipe in (network.link.up, network.link.down)]
    said = {}
    for moment_s in (1, 21):  # at 80 and at 20 Mbit/s: the large message takes 1.2 and 4.8 s, the small one none
        oracle.now_ns = moment_s * 10**9
        said[moment_s] = oracle.decide(model.EVERY - 1).codecs[0]
    assert said == {1: model.codec(0.001), 21: model.codec(0.001)}
    oracle.steps_to_target = {small: 400.0, large: 100.0}
    oracle.now_ns = 10**9
    assert oracle.decide(model.EVERY - 1).codecs[0] == model.codec(0.03)
    assert oracle.decide(0) is None
