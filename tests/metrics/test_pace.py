"""Overruns and busy cores, from records that say when maths was done and when it was due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.metrics import align, spans
from testbed.metrics.steps import PipelineStep
from testbed.records import ActionRecord
from tests.synthetic import Pipeline, profile


def steps(maths_ns: list[int], slot_ns: int) -> list[PipelineStep]:
    """Make two steps of a pipeline whose actions take `maths_ns` in turn and are due after `slot_ns`."""
    pipeline = Pipeline(profile(), stages=2, microbatches=2).run(0).run(1)
    count = 0

    def paced(action: ActionRecord) -> ActionRecord:
        nonlocal count
        took = maths_ns[count % len(maths_ns)]
        count += 1
        done, due = action.decoded_ns + took, action.decoded_ns + slot_ns
        return action.model_copy(
            update={"began_ns": action.decoded_ns, "maths_ns": done, "due_ns": due, "computed_ns": max(done, due)}
        )

    stages = [
        [record.model_copy(update={"actions": tuple(map(paced, record.actions))}) for record in records]
        for records in pipeline.records
    ]
    return align(stages)


@given(st.lists(st.integers(1, 2_000_000), min_size=16, max_size=16), st.integers(1, 2_000_000))
def test_the_share_is_that_of_the_actions_done_after_they_were_due(maths_ns: list[int], slot_ns: int) -> None:
    found = steps(maths_ns, slot_ns)
    assert (
        spans.overrun_share(found) == sum(took > slot_ns for took in maths_ns) / 16
    )  # 2 stages, 2 steps, F and B of 2 micro-batches


@given(st.lists(st.integers(1, 2_000_000), min_size=16, max_size=16))
def test_duty_is_busy_time_by_the_time_of_the_steps(maths_ns: list[int]) -> None:
    found = steps(maths_ns, 10)
    assert spans.busy_cores(found) == pytest.approx(sum(maths_ns) / sum(step.end_ns - step.begin_ns for step in found))


def test_where_nothing_is_paced_there_is_no_share() -> None:
    pipeline = Pipeline(profile()).run(0)
    assert spans.overrun_share(align(pipeline.records)) is None
    assert spans.busy_cores(align(pipeline.records)) is None
    assert spans.overrun_share([]) is None
    assert spans.busy_cores([]) is None
