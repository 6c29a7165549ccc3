"""Everybody gets everything, in one order; a lost or late stage is an error."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.errors import TransportError
from testbed.pipeline.gather import Gather, Met, global_norm, make_sockets


def together(stages: int, work: Callable[[Gather, int], None]) -> None:
    """Let every stage do it, in a thread of its own."""
    ends = [Gather(stage, sockets, 10) for stage, sockets in enumerate(make_sockets(stages))]
    threads = [threading.Thread(target=work, args=(end, stage)) for stage, end in enumerate(ends)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()


def exchange_all(parts: list[list[float]]) -> list[list[float]]:
    results: list[list[float]] = [[] for _ in parts]

    def work(end: Gather, stage: int) -> None:
        results[stage] = end.exchange(parts[stage])

    together(len(parts), work)
    return results


@pytest.mark.parametrize("stages", [1, 2, 5])
def test_every_stage_gets_all_values_in_order(stages: int) -> None:
    parts = [[stage + 0.5] * stage for stage in range(stages)]
    everything = list(itertools.chain(*parts))
    assert exchange_all(parts) == [everything] * stages


def test_empty_exchange_is_a_barrier() -> None:
    assert exchange_all([[], [], []]) == [[], [], []]


@pytest.mark.parametrize("asked", [None, 0, 2])
def test_all_stages_know_the_same_when_they_have_met(asked: int | None) -> None:
    found: list[Met] = []

    def tell(end: Gather, stage: int) -> None:
        found.append(
            end.meet(
                100 + stage,
                left_ns=90 - stage,
                asked=stage == asked,
                loss=2.5 if stage == 2 else None,
                squares=[float(stage)] * stage,
            )
        )

    together(3, tell)
    assert found == [Met(line_ns=102, left_ns=90, asked=asked is not None, loss=2.5, norm=math.sqrt(1 + 2 + 2))] * 3


@given(st.lists(st.floats(0, 1e12), max_size=20), st.randoms(use_true_random=False))
def test_the_norm_does_not_depend_on_the_order(squares: list[float], random: object) -> None:
    shuffled = list(squares)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert global_norm(shuffled) == global_norm(squares) == pytest.approx(math.sqrt(sum(squares)))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_stage_is_named(lost: int) -> None:
    ends = [Gather(stage, sockets, 10) for stage, sockets in enumerate(make_sockets(2))]
    ends[lost].close()
    with pytest.raises(TransportError, match=f"stage {1 - lost}: stage {lost} "):
        ends[1 - lost].exchange([1.0])
    ends[1 - lost].close()


def test_a_late_stage_is_named() -> None:
    ends = [Gather(stage, sockets, 0.05) for stage, sockets in enumerate(make_sockets(2))]
    with pytest.raises(TransportError, match=r"stage 0: stage 1 did not end the step within 0.05 s"):
        ends[0].exchange([1.0])
    for end in ends:
        end.close()
