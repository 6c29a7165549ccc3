"""Star servers and all-to-all workers decode each message while the next is on its way."""

from __future__ import annotations

import pytest

from testbed.jobs.actions import Action, Decode, Sizes, Work
from testbed.jobs.data_parallel import DataParallelJob
from testbed.jobs.loop import Loop
from testbed.spec import Exchange
from tests.jobs.recording import DelayedLinks

_GAP_NS = 100


def step_ns(exchange: Exchange, decode_ns: int) -> int:
    job = DataParallelJob(4, exchange, [0] * 4, [1] * 4, 1)
    nodes = len(job.places)

    def cost(node: int, action: Action) -> int | None:
        match action:
            case Work("local step"):
                return 1000
            case Decode(messages) if exchange != "star" or node == 4:
                return decode_ns * len(messages)
        return None

    def in_turn_ns(source: int, target: int, size: int) -> int:
        """A receiver's messages come one after the other, in the order in which their senders stand after it."""
        return _GAP_NS * (source if exchange == "star" and target == 4 else (source - target) % nodes)

    programs = [job.program(place) for place in range(nodes)]
    loop = Loop(programs, [Sizes(lambda key: 8)] * nodes, cost=cost, links=DelayedLinks(in_turn_ns))
    loop.run()
    return loop.now_ns


@pytest.mark.parametrize("exchange", ["star", "all-to-all"])
def test_only_the_last_message_is_decoded_after_all_have_come(exchange: Exchange) -> None:
    assert step_ns(exchange, 60) - step_ns(exchange, 0) == 60


def test_what_goes_round_a_ring_is_decoded_when_it_has_been_round() -> None:
    assert step_ns("all-gather", 60) - step_ns("all-gather", 0) == 4 * 60
