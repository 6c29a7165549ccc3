from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.metrics import Wires, align, ideal_step_s
from testbed.metrics.ideal import unshaped_step_s
from testbed.spec import PipelineSpec
from tests.synthetic import Pipeline, profile

UNSHAPED = profile("unshaped")


@settings(max_examples=80, deadline=None)
@given(
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 8),
    accumulation=st.sampled_from([1, 2, 4]),
    forward_us=st.integers(1, 9_000),
    backward_us=st.integers(1, 9_000),
    update_us=st.integers(0, 9_000),
    dilation=st.integers(1, 5),
    more_in_flight=st.integers(0, 3),
)
def test_the_event_simulation_gives_exactly_that(
    schedule: str,
    stages: int,
    microbatches: int,
    accumulation: int,
    forward_us: int,
    backward_us: int,
    update_us: int,
    dilation: int,
    more_in_flight: int,
) -> None:
    pipeline = Pipeline(
        UNSHAPED,
        stages=stages,
        microbatches=microbatches,
        accumulation=accumulation,
        schedule=schedule,
        in_flight=stages + more_in_flight,
        forward_ns=forward_us * 1000,
        backward_ns=backward_us * 1000,
        update_ns=update_us * 1000,
        codec_ns=0,
        paced=True,
        dilation=dilation,
    )
    pipeline.run(0)
    pipeline.run(1)
    asked = {"forward_s": forward_us * 1e-6, "backward_s": backward_us * 1e-6, "update_s": update_us * 1e-6}
    expected = unshaped_step_s(pipeline.cell.pipeline, **asked) * dilation
    for step in align(pipeline.records):
        assert step.seconds == pytest.approx(expected)
        assert ideal_step_s(Wires(pipeline.cell), step.records, step.free_ns, pipeline.cell.compute) == pytest.approx(
            expected
        )


def test_two_stages_and_two_microbatches_by_hand() -> None:
    """In three rounds the first stage idles before its first backward, the last one at the beginning and the end."""
    shape = PipelineSpec(stages=2, microbatches=2, schedule="gpipe", in_flight=1)
    assert unshaped_step_s(shape, forward_s=1, backward_s=2, update_s=0.5) == 9.5
    assert (
        unshaped_step_s(shape.model_copy(update={"accumulation": 3}), forward_s=1, backward_s=2, update_s=0.5) == 27.5
    )


@settings(max_examples=40, deadline=None)
@given(stages=st.integers(2, 5), microbatches=st.integers(1, 8), in_flight=st.integers(1, 4))
def test_fewer_in_flight_never_take_less(stages: int, microbatches: int, in_flight: int) -> None:
    pipeline = Pipeline(
        UNSHAPED,
        stages=stages,
        microbatches=microbatches,
        in_flight=in_flight,
        schedule="1f1b",
        codec_ns=0,
        update_ns=0,
        paced=True,
    )
    pipeline.run(0)
    [step] = align(pipeline.records)
    bound = unshaped_step_s(
        pipeline.cell.pipeline, forward_s=pipeline.forward_ns / 1e9, backward_s=pipeline.backward_ns / 1e9
    )
    if in_flight == 1:  # one micro-batch after the other
        assert step.seconds == pytest.approx(microbatches * stages * (pipeline.forward_ns + pipeline.backward_ns) / 1e9)
    assert step.seconds >= bound - 1e-9
