"""The order of one stage's actions, as a pure function from numbers to a list, which `pipeline` follows.

Backwards run in the order of the micro-batches under every schedule, so gradients are summed in one order and training
is bit-identical under every schedule and depth.
"""

from __future__ import annotations

from typing import NamedTuple

from testbed.records import ActionKind
from testbed.spec import ScheduleName


class Action(NamedTuple):
    """One forward (F) or backward (B) of one micro-batch."""

    kind: ActionKind
    microbatch: int


def depth(schedule: ScheduleName, *, stage: int, stages: int, microbatches: int, in_flight: int) -> int:
    """Return the maximum number of micro-batches that a stage holds between forward and backward.

    gpipe: all of them; `in_flight` is ignored. 1f1b: `1 + ceil((in_flight - 1) * (stages - 1 - stage) / (stages - 1))`,
    and never more than there are micro-batches: `in_flight` at the first stage, 1 at the last, and in between
    proportional to the distance from the last stage, like the round trip to it. `in_flight == stages` is the classic
    1F1B (PipeDream-Flush, Narayanan et al. 2021, section 2.2): depth `stages - stage`. More hides the latency of slow
    links and costs memory; less is allowed and leaves stages idle. Depths never grow from one stage to the next, so no
    schedule deadlocks.
    """
    if schedule == "gpipe":
        return microbatches
    ahead = (in_flight - 1) * (stages - 1 - stage)
    return min(microbatches, 1 + -(-ahead // max(1, stages - 1)))


def actions(
    schedule: ScheduleName, *, stage: int, stages: int, microbatches: int, in_flight: int, accumulation: int = 1
) -> tuple[Action, ...]:
    """Return all actions of one step at one stage (0-based), in order.

    The schedule is repeated `accumulation` times, with consecutive micro-batch numbers.
    """
    assert 0 <= stage < stages
    assert microbatches >= 1
    assert in_flight >= 1
    assert accumulation >= 1
    ahead = depth(schedule, stage=stage, stages=stages, microbatches=microbatches, in_flight=in_flight)
    order = [Action("F", m) for m in range(ahead)]
    for m in range(microbatches):
        order.append(Action("B", m))
        if m + ahead < microbatches:
            order.append(Action("F", m + ahead))
    return tuple(Action(kind, turn * microbatches + m) for turn in range(accumulation) for kind, m in order)


def all_actions(schedule: ScheduleName, *, stages: int, **numbers: int) -> list[tuple[Action, ...]]:
    """Return the actions of a step, by stage; `numbers` as for `actions`."""
    return [actions(schedule, stage=stage, stages=stages, **numbers) for stage in range(stages)]
