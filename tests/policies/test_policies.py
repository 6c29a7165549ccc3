"""Policies: golden vectors, which the reference computed apart from this code, and the laws behind them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from testbed.errors import SpecError
from testbed.metrics.links import Pipes
from testbed.metrics.wires import HEADER_BYTES
from testbed.policies import dagc, deco, fedluck, thresholds
from testbed.policies.cycle import MessageSize, iteration_s, steady_cycle_s
from testbed.policies.link_estimate import LinkEstimate, PassiveEstimator, oracle
from testbed.predict.data_parallel_shapes import DataParallelShape
from testbed.profiles import load_profile
from testbed.runtime.frame import HEADER_BYTES as FRAME_BYTES
from testbed.trace.simulate import ideal_steps_ns

EXPANSION = 2.0
NS = 1e9


# ------------------------------------------------------------------ the time model
@settings(max_examples=60, deadline=None)
@given(compute=st.integers(1, 50), sending=st.integers(1, 200), delay=st.integers(0, 300), staleness=st.integers(0, 8))
def test_the_steady_cycle_is_that_of_a_simulation(compute: int, sending: int, delay: int, staleness: int) -> None:
    computed = left = 0
    arrived: list[int] = []
    ends = []
    for step in range(100 * (staleness + 1)):
        due = arrived[step - 1 - staleness] if step > staleness else 0
        computed = max(computed, due) + compute
        left = max(computed, left) + sending
        arrived.append(left + delay)
        ends.append(computed)
    half = len(ends) // 2
    simulated = (ends[-1] - ends[-1 - half]) / half
    assert steady_cycle_s(compute, sending, sending + delay, staleness) == pytest.approx(simulated, rel=1e-9)


# ------------------------------------------------------------------ DeCo
@pytest.mark.parametrize(
    ("compute_s", "size", "rate", "delay_s", "staleness", "ratio", "cycle_s", "synchronous_s"),
    [
        (0.1, 4.0e7, 1.25e7, 0.10, 2, 0.015625, 0.1, 3.40),
        (0.1, 4.0e7, 1.25e7, 0.25, 4, 0.015625, 0.1, 3.55),
        (0.5, 942_760, 1.25e6, 0.05, 1, 0.298326, 0.5, 1.304),
        (0.1, 942_760, 1.25e7, 0.50, 6, 1.0, 0.1, 0.675),
        (0.5, 4.96e8, 6.25e7, 0.20, 2, 0.031502, 0.5, 8.636),
        (1.0, 4.96e8, 1.25e8, 0.10, 2, 0.126008, 1.0, 5.068),
        (0.1, 4.0e7, 1.25e6, 0.10, 2, 0.0015625, 0.1, 32.2),
    ],
)
def test_deco_s_golden_vectors(
    compute_s: float,
    size: float,
    rate: float,
    delay_s: float,
    staleness: int,
    ratio: float,
    cycle_s: float,
    synchronous_s: float,
) -> None:
    link, exchanged = LinkEstimate(8 * rate, round(delay_s * NS)), MessageSize(size, EXPANSION)
    choice = deco.choose(link, exchanged, round(compute_s * NS), noise_weight=1.0)
    assert choice == (staleness, pytest.approx(ratio, rel=1e-4))
    times = {"compute_s": compute_s, "rate_bps": 8 * rate, "delay_s": delay_s}
    assert iteration_s(exchanged, choice.ratio, choice.staleness, **times) == pytest.approx(cycle_s, rel=1e-9)
    assert iteration_s(exchanged, 1.0, 0, **times) == pytest.approx(synchronous_s, rel=1e-3)


LINKS = st.builds(LinkEstimate, st.floats(1e5, 1e10), st.integers(0, 4 * 10**9))
SEVERAL = {**deco.NOISE_FACTORS, "least at 5 %": lambda ratio, staleness: abs(math.log(ratio / 0.05)) + staleness}


def worse_than_brute_force(
    link: LinkEstimate, exchanged: MessageSize, compute_ns: int, noise: deco.NoiseFactor
) -> list[tuple[float, int]]:
    """Return the pairs that hide and are less noisy than the choice; all that hide where the choice does not."""
    choice = deco.choose(link, exchanged, compute_ns, noise=noise, noise_weight=1.0)
    times = {"compute_s": compute_ns / NS, "rate_bps": link.rate_bps, "delay_s": link.delay_ns / NS}

    def hides(ratio: float, staleness: int) -> bool:
        return iteration_s(exchanged, ratio, staleness, **times) <= compute_ns / NS * (1 + 1e-9)

    ratios = [*np.geomspace(1e-3, 1, 200).tolist(), 1.0]
    hidden = [pair for pair in itertools.product(ratios, range(17)) if hides(*pair)]
    if not hides(choice.ratio, choice.staleness):
        return hidden
    return [pair for pair in hidden if noise(*pair) < noise(choice.ratio, choice.staleness) * (1 - 1e-9)]


@settings(max_examples=150, deadline=None)
@given(
    link=LINKS,
    size=st.floats(1e4, 1e9),
    expansion=st.floats(0.2, 4),
    compute_ns=st.just(0) | st.integers(10**6, 2 * 10**9),
    name=st.sampled_from(sorted(SEVERAL)),
)
@example(LinkEstimate(72e6, 1_400_000_000), 1e6, 2.0, 10**8, "exp")
@example(LinkEstimate(72e6, 900_000_000), 1e6, 2.0, 10**8, "exp")
@example(LinkEstimate(1e9, 10**8), 1e6, 2.0, 10**8, "printed")
@example(LinkEstimate(1e8, 0), 1e6, 0.5, 6 * 10**7, "additive")
@example(LinkEstimate(1e8, 10**7), 1e6, 2.0, 0, "exp")
def test_no_pair_that_hides_is_less_noisy(
    link: LinkEstimate, size: float, expansion: float, compute_ns: int, name: str
) -> None:
    assert not worse_than_brute_force(link, MessageSize(size, expansion), compute_ns, SEVERAL[name])


def test_a_ratio_may_be_too_large_to_be_the_least_noisy() -> None:
    choice = deco.choose(LinkEstimate(72e6, 1_400_000_000), MessageSize(1e6, 2.0), 10**8, noise_weight=1.0)
    assert choice == (15, pytest.approx(0.1446, rel=1e-3))
    assert deco.exponential(0.45, 15) > 2.5 * deco.exponential(choice.ratio, 15)


def test_where_nothing_hides_the_fastest_of_the_grid_is_taken() -> None:
    link, exchanged = LinkEstimate(1e5, 0), MessageSize(4e7, EXPANSION)
    choice = deco.choose(link, exchanged, 10**8, noise_weight=0.5)
    assert choice == deco.fastest(link, exchanged, 10**8, noise=deco.exponential, noise_weight=0.5)
    assert 1e-3 <= choice.ratio <= 1
    assert deco.choose(link, exchanged, 10**8, noise_weight=500.0).ratio >= choice.ratio


def test_noise_factors_are_what_they_say() -> None:
    for noise in deco.NOISE_FACTORS.values():
        values = [noise(ratio, 3) for ratio in (0.01, 0.1, 0.5)]
        assert values == sorted(values, reverse=True)
        assert noise(0.1, 5) > noise(0.1, 0)
    assert deco.exponential(1.0, 9) == 0
    assert math.isinf(deco.printed(1.0, 2))
    assert deco.printed(0.25, 3) == pytest.approx(0.75 / (0.25 * 0.75**3))
    assert deco.additive(1.0, 4) == 16


def test_staleness_moves_slowly() -> None:
    assert deco.approach(deco.DecoChoice(1, 0.5), deco.DecoChoice(9, 0.1)) == (3, 0.1)
    assert deco.approach(deco.DecoChoice(9, 0.5), deco.DecoChoice(8, 0.1)) == (8, 0.1)


# ------------------------------------------------------------------ FedLuck
@settings(max_examples=15, deadline=None)
@given(step_s=st.floats(0.01, 2), full_s=st.floats(0.01, 100), period_s=st.floats(0.1, 10))
def test_fedluck_s_optimum_is_that_of_brute_force(step_s: float, full_s: float, period_s: float) -> None:
    def value(k: int, d: float) -> float:
        return ((k * step_s + d * full_s) ** 2 * (2 - d) + period_s**2) / (k * math.sqrt(d) * period_s**2)

    best = min(value(k, place / 100) for k in range(2, 61) for place in range(1, 101))
    choice = fedluck.choose(step_s, full_s, period_s)
    assert value(*choice) == pytest.approx(best, rel=1e-12)
    staleness = fedluck.staleness(choice, step_s=step_s, full_s=full_s, period_s=period_s)
    round_s = choice.local_steps * step_s + choice.ratio * full_s
    assert (staleness - 1) * period_s * (1 - 1e-12) <= round_s <= staleness * period_s * (1 + 1e-12)


# ------------------------------------------------------------------ DAGC
@pytest.mark.parametrize(
    ("shares", "rule", "released"),
    [
        (
            (0.4, 0.3, 0.2, 0.1),
            (0.070119, 0.057882, 0.044172, 0.027827),
            (0.064821, 0.053509, 0.040835, 0.040835),
        ),
        (
            (0.5, 0.25, 0.15, 0.05, 0.05),
            (0.099642, 0.06277, 0.044654, 0.021467, 0.021467),
            (0.109828, 0.069187, 0.023662, 0.023662, 0.023662),
        ),
    ],
)
def test_dagc_s_golden_vectors(shares: tuple[float, ...], rule: tuple[float, ...], released: tuple[float, ...]) -> None:
    assert dagc.ratios(shares, 0.05) == pytest.approx(rule, abs=1e-6)
    assert dagc.released_ratios(shares, 0.05) == pytest.approx(released, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(shares=st.lists(st.floats(0.01, 100), min_size=2, max_size=12), mean=st.floats(0.001, 1))
def test_dagc_s_mean_holds_and_more_data_is_compressed_less(shares: list[float], mean: float) -> None:
    descending = sorted(shares, reverse=True)
    ratios = dagc.ratios(descending, mean)
    assert all(0 < ratio <= 1 + 1e-12 for ratio in ratios)
    assert math.fsum(ratios) / len(shares) == pytest.approx(mean, rel=1e-9)
    assert list(ratios) == sorted(ratios, reverse=True)
    assert math.fsum(dagc.released_ratios(descending, mean)) == pytest.approx(mean * len(shares), rel=1e-9)


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.4, 0.3, 0.2, 0.1), (0.035654, 0.043191, 0.056597, 0.089842)),
        ((0.5, 0.25, 0.15, 0.05, 0.05), (0.02509, 0.039828, 0.055987, 0.116457, 0.116457)),
    ],
)
def test_dagc_s_thresholds_are_golden_and_their_harmonic_mean_holds(
    shares: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    found = dagc.thresholds(shares, 0.05)
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(found) / math.fsum(1 / each for each in found) == pytest.approx(0.05, rel=1e-9)
    with pytest.raises(SpecError):
        dagc.thresholds(shares, 0.0)


# ------------------------------------------------------------------ thresholds
def test_a_threshold_follows_the_stepsize_and_keeps_the_ratio() -> None:
    update = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    first = thresholds.first_threshold(update, 0.1)
    for stepsize in (0.1, 0.05, 0.001):
        scaled = update * np.float32(stepsize / 0.1)
        assert (np.abs(scaled) >= thresholds.threshold(first, stepsize, 0.1)).mean() == pytest.approx(0.1, abs=1e-3)
    assert thresholds.threshold(first, 0.001, 0.1, power=0) == first
    with pytest.raises(SpecError):
        thresholds.threshold(0.0, 0.1, 0.1)
    with pytest.raises(SpecError):
        thresholds.first_threshold(np.zeros(4, np.float32), 0.1)


# ------------------------------------------------------------------ links
def test_the_oracle_is_the_profile() -> None:
    profile = load_profile("consumer-80mbps")
    # 1,448 of a packet's 1,500 bytes are payload, and each second packet is answered by one of 52.
    assert oracle(profile, "up") == (pytest.approx(profile.up.rate_bps * 1448 / 1526), profile.up.delay_ns)


@pytest.mark.parametrize(
    "link",
    [
        "link(25Mbit, 60ms, buffer=1s)",
        "link(100Mbit, 10ms, buffer=1s)",
        "link(10Mbit, 250ms, buffer=2s, layer=ethernet)",
        "link(1Gbit, 30ms, buffer=1s)",
    ],
)
@pytest.mark.parametrize("compute_ns", [40_000_000, 10**8, 7 * 10**8])
def test_a_choice_by_a_profile_hides_what_it_promises(link: str, compute_ns: int) -> None:
    """Two workers send each other frames: over their link as formulas a step takes no longer than computing does, to
    0.1 % and what the frame's own header and that of a last packet take, and nor does it with acknowledgements. One a
    twentieth larger does not hide.
    """
    profile = load_profile(link)
    exchanged = MessageSize(20 * profile.up.rate_bps / 8 * compute_ns / NS, EXPANSION)
    choice = deco.choose(oracle(profile, "up"), exchanged, compute_ns, noise_weight=1.0)
    assert 0.01 < choice.ratio < 0.03

    def cycles(ratio: float) -> tuple[float, float]:
        size = math.ceil(exchanged.message_bytes(ratio)) + FRAME_BYTES
        shape = DataParallelShape(
            workers=2,
            exchange="all-to-all",
            staleness=choice.staleness,
            compute_ns=compute_ns,
            message_bytes=(size, size),
            tokens=1,
        )
        steps = 20 * shape.least_steps
        spans = ideal_steps_ns(shape.trace(steps), Pipes("line", [profile], 2), steps)
        formula_s = shape.formula_s("line", [profile])
        assert formula_s is not None
        return shape.steady_ns(spans) / compute_ns, formula_s * NS / compute_ns

    headers_s = 8 * (FRAME_BYTES + HEADER_BYTES + profile.overhead_bytes) / profile.up.rate_bps
    assert max(cycles(choice.ratio)) <= 1.001 + headers_s * NS / compute_ns
    assert min(cycles(1.05 * choice.ratio)) > 1.01


def test_only_large_messages_tell_the_rate_and_the_shortest_round_trip_the_delay() -> None:
    estimator = PassiveEstimator()
    assert estimator.estimate is None
    for size in (100, 4000, 60_000):  # slow start would make the link look slow
        estimator.message(size, 0, 10**9)
    estimator.round_trip(70_000_000)
    assert estimator.estimate is None
    estimator.message(10**6, 0, 10**8)
    estimator.round_trip(40_000_000)
    estimator.round_trip(90_000_000)
    assert estimator.estimate == (8e7, 20_000_000)
    for _ in range(20):  # 4 bandwidth-delay products are 1.6 MB
        estimator.message(10**6, 0, 10**9)
    assert estimator.estimate == (8e7, 20_000_000)
    for _ in range(30):
        estimator.message(2 * 10**6, 0, 4 * 10**8)
    assert estimator.estimate.rate_bps == pytest.approx(4e7, rel=1e-3)
