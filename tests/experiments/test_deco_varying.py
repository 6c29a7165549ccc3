"""deco_varying: what is chosen while it is played is what its records say afterwards; its arms choose as they say."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from testbed.nodes.leader import ratio_of
from testbed.player.play_trace import Player
from testbed.policies.cycle import steady_cycle_s
from testbed.policies.deco import DecoChoice
from tests.commands import Command, module_beside
from tests.player.fake_network import fake

FOLDER = Command.shipped / "deco_varying"
STEPS = 40
REACHED = ((DecoChoice(1, 0.001), 100.0), (DecoChoice(0, 0.03), 99.0))


@pytest.fixture(scope="module")
def model() -> Iterator[ModuleType]:
    with module_beside(FOLDER, "timeline") as program:
        yield program


def arm_of(model: ModuleType, name: str, **changes: Any) -> Any:
    network = model.Network("varying-80mbps", (4_000_000, 100))
    return model.Arm(name, network, DecoChoice(1, 0.01), STEPS, REACHED)._replace(**changes)


def test_what_was_chosen_meanwhile_is_what_is_found_afterwards(model: ModuleType) -> None:
    """Over a network that takes no time, so that only those choose who need not measure it."""
    chosen = {}
    for name in ("static", model.KNOWS, model.ORACLE):
        arm = arm_of(model, name, network=model.Network("varying-80mbps", (200_000, 100)))
        begin = model.Choosing(arm)
        frame_bytes, awaited = zip(*(begin.numbers(step) for step in range(STEPS)), strict=True)
        trace = model.trace_of([frame_bytes] * 2, awaited)
        with fake(trace) as (network, waiter):
            played = Player(trace, network, waiter, clock="virtual", director=model.Choosing(arm)).play()
        steps = model.steps_of(arm, played)
        sizes = [arm.network.message_bytes(step.ratio) + model.HEADER_BYTES for step in steps]
        for worker in (0, 2):
            assert trace.lanes[worker].value[1::3].tolist() == sizes
            lacking = [step + 1 - there for step, there in enumerate(trace.lanes[worker].value[2::3][:-1])]
            assert lacking == [step.staleness for step in steps[1:]]
        chosen[name] = len({step.ratio for step in steps})
    assert chosen["static"] == 1
    assert chosen[model.KNOWS] > 1
    assert chosen[model.ORACLE] > 1


def test_who_measures_finds_a_links_rate_and_chooses_what_hides(model: ModuleType) -> None:
    """Every message takes 0.3 s: so at the same rate one of the ratio that is chosen takes as long as computing."""
    arm = arm_of(model, model.DECO)
    choosing, taken_s = model.Choosing(arm), 0.3
    moments = [round(step * 0.5e9) for step in range(STEPS)]
    first_ns = [moment for moment in moments for _ in range(2)]
    last_ns = [round(moment + (taken_s + 0.01) * 1e9) for moment in moments for _ in range(2)]
    decisions = [choosing.begins(step, moments[step], first_ns, last_ns) for step in range(1, 8)]
    (decision,) = [each for each in decisions if each is not None]
    rate_bps = 8 * arm.network.message_bytes(0.01) / taken_s
    assert choosing.leader.slowest().rate_bps == pytest.approx(rate_bps, rel=1e-6)
    hidden_bytes = rate_bps / 8 * model.COMPUTE_NS / 1e9
    assert arm.network.message_bytes(ratio_of(decision.codecs[0])) == pytest.approx(hidden_bytes, rel=0.01)
    assert decision.effective_from == 4 + 1 + 2


def test_a_director_that_a_job_can_name_is_the_arm_it_was_made_of(model: ModuleType) -> None:
    job = model.job_of(arm_of(model, model.ORACLE, begins_ns=7))
    made = job.director.make()
    assert (made.arm, made.leader.steps_to_target) == (arm_of(model, model.ORACLE, begins_ns=7), dict(REACHED))
    assert model.job_of(arm_of(model, "static")).director is None


def test_the_oracle_takes_the_pair_that_is_soonest_at_the_rate_to_come(model: ModuleType) -> None:
    small, large = DecoChoice(1, 0.001), DecoChoice(1, 0.03)

    def chosen(moment_s: int, reached: dict[DecoChoice, float]) -> str:
        arm = arm_of(model, model.ORACLE, network=model.NETWORKS["varying-80mbps"], reached=tuple(reached.items()))
        oracle = arm.leader()
        oracle.now_ns = moment_s * 10**9
        assert oracle.decide(0) is None
        codec: str = oracle.decide(model.EVERY - 1).codecs[0]
        return codec

    # At 80 and at 20 Mbit/s the large message takes 1.2 and 4.8 s, the small one none.
    assert chosen(1, {small: 200.0, large: 100.0}) == model.codec(0.001)
    assert chosen(21, {small: 200.0, large: 100.0}) == model.codec(0.001)
    assert chosen(1, {small: 400.0, large: 100.0}) == model.codec(0.03)


@pytest.mark.clock_kernel
@pytest.mark.slow
def test_over_a_link_that_stays_a_step_is_the_steady_cycle(model: ModuleType) -> None:
    """Where a message fits into the window, so that nobody waits for acknowledgements."""
    arms = [
        arm_of(model, "static", network=model.Network("link(80Mbit, 50ms, buffer=1s)", (size,)), first=pair)
        for size in (1_000_000, 40_000_000)
        for pair in (DecoChoice(0, 0.01), DecoChoice(1, 0.01))
    ]
    for arm, steps in zip(arms, model.timelines(arms), strict=True):
        frame_bytes = arm.network.message_bytes(0.01) + model.HEADER_BYTES
        sent_s = 8 * model.wire_bytes(frame_bytes, arm.network.link) / 80e6
        cycle_s = steady_cycle_s(model.COMPUTE_NS / 1e9, sent_s, sent_s + 0.05, arm.first.staleness)
        period = arm.first.staleness + 1
        found_s = (steps[-1].end_ns - steps[-1 - 4 * period].end_ns) / 1e9 / (4 * period)
        assert found_s == pytest.approx(cycle_s, rel=0.005)
