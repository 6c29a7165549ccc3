"""ns-3, the formula and the player are three implementations of the same links: here the first two, in small cells."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from testbed.metrics.links import Pipes
from testbed.profiles import load_profile
from testbed.trace.simulate import replay
from tests.ns3.cells import cells, exchange_trace, job_trace, lossy
from tests.ns3.describe import describe, play_in_ns3

STEPS = 6
LINK = load_profile("consumer-80mbps")


def test_there_are_12_cells_without_loss_and_6_that_lose() -> None:
    assert [cell.lossy for cell in cells()] == [False] * 12 + [True] * 6


def test_a_description_has_every_operation_and_the_queue_without_what_is_on_its_way() -> None:
    trace = job_trace("pipeline", 2)
    told = describe(trace, "star", LINK)
    assert [[len(step) for step in lane["steps"]] for lane in told["lanes"]] == [
        [lane.starts[1], lane.starts[2] - lane.starts[1]] for lane in trace.lanes
    ]
    assert len(told["links"]) == 3
    up = told["links"][0]["up"]
    assert (up["rate_bps"], up["loss"]) == (80_000_000, 0.0)
    assert up["queue_packets"] == pytest.approx(1_000_000 / 1500, abs=2)


@pytest.fixture(scope="module")
def simulated() -> list[dict[str, Any]]:
    """One program of ns-3, which takes most of its time to begin, for all cells."""
    links = (LINK, LINK, lossy(LINK, 0.02))
    jobs = (job_trace("pipeline", STEPS), exchange_trace(2, STEPS, 65_536, 1_000_000), job_trace("pipeline", STEPS))
    return play_in_ns3(sys.executable, [describe(job, "star", link) for job, link in zip(jobs, links, strict=True)])


@pytest.mark.ns3
@pytest.mark.parametrize("number", [0, 1])
def test_without_loss_ns3_takes_as_long_as_the_formula(simulated: list[dict[str, Any]], number: int) -> None:
    trace = job_trace("pipeline", STEPS) if number == 0 else exchange_trace(2, STEPS, 65_536, 1_000_000)
    ideal = replay(trace, STEPS, Pipes("star", [LINK], len(trace.nodes)))
    ends = simulated[number]["step_ends_ns"]
    assert simulated[number]["dropped"] == 0
    assert ends[-1] - ends[-2] == pytest.approx(ideal[-1] - ideal[-2], rel=0.005)  # the window is open by then


@pytest.mark.ns3
def test_with_loss_it_takes_longer(simulated: list[dict[str, Any]]) -> None:
    assert simulated[2]["recoveries"] > 0
    assert simulated[2]["step_ends_ns"][-1] > simulated[0]["step_ends_ns"][-1]
